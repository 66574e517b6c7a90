"""Models that see images through the real core and worker: as transformers, on any schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from support.graph_recorders import Tape, TapeRecorder
from support.grids import choose, more_when_long
from support.lossless import (
    MAX_LEN,
    MAX_SEQS,
    NUM_CATALOGUE,
    NUM_SLOTS,
    Catalogue,
    Tally,
    make_runner,
    make_schedule,
)
from support.tensor_kernels import TensorKernels
from support.tiny_models import find_tiny_model
from support.tiny_vision import (
    FAMILIES,
    Reference,
    given_image,
    ids_of,
    picture,
    write_llava,
    write_vision_model,
)

from lightserve.errors import ModelLoadError, ProtocolError
from lightserve.kernels.interface import AttentionBatch, SeenWhole
from lightserve.kernels.reference import kv_in_8_bits, numbers_of_8_bit_kv
from lightserve.kernels.select import missing_core
from lightserve.messages.common import TokenLogprob, TokenSegment, pack_int32, unpack_int32
from lightserve.messages.frontend_router import Submit
from lightserve.messages.images import EncodeOrder, digest_of, without_pixels
from lightserve.messages.router_worker import (
    AddSequence,
    OutputKind,
    PlanRow,
    SlotRange,
    StepPlan,
    StepResult,
)
from lightserve.models.base import SingleRank, kv_layout
from lightserve.models.config import load_model_config
from lightserve.models.decoder import DecoderModel
from lightserve.models.layers.attention import seeing_whole
from lightserve.models.loader import load_model
from lightserve.models.vision_config import VISION
from lightserve.models.weight_files import expected_tensors
from lightserve.router.admission.baselines import ConservativeAdmission
from lightserve.router.config import SchedulerConfig
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.from_submit import QueueLimits
from lightserve.router.kv.cache import KVOptions, Preemption
from lightserve.router.kv.prefix_node import task_aware
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies import POLICIES
from lightserve.router.scheduler import Scheduler
from lightserve.sim.images import SimulatedEncoder
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.sim.virtual_gpus import COMPUTE_SHARE, MODELS, PAIRS_SHARE
from lightserve.types import FrontendId, RequestClass, RequestId, RowId, SamplingParams, StepId
from lightserve.worker.device import HostQueue
from lightserve.worker.graphs import DecodeGraphs
from lightserve.worker.host_pool import DirectHostPool
from lightserve.worker.memory import KVPool
from lightserve.worker.mixed_graphs import MixedGraphs
from lightserve.worker.model_runner import ModelRunner

KERNELS = ("reference", "torch", *(() if missing_core() else ("native",)))
PICTURES = [
    picture(1),
    picture(2, 30, 41),
    picture(3, 28, 28),
    picture(4, 90, 31),
    picture(5, 3, 7),
]
LOGPROB = 1e-4


class Prompt(NamedTuple):
    """Text, and pictures in it."""

    parts: Sequence[int | Image.Image]
    """Numbers of random tokens, and pictures."""


PROMPTS = [
    Prompt([5, PICTURES[0], 7]),
    Prompt([1, PICTURES[1], 2, PICTURES[2], 9]),
    Prompt([PICTURES[3], 4]),
    Prompt([2, PICTURES[4], 1, PICTURES[0], 3]),
    Prompt([12]),
    Prompt([6, PICTURES[2]]),
]
"""One in the middle, two apart, at the beginning, two nearly side by side, none, at the end."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    return write_vision_model(made, request.param, max_position_embeddings=MAX_LEN)


def request_of(path: Path, number: int, prompt: Prompt, **options: object) -> Submit:
    rng = random.Random(number)
    ids: list[int] = []
    images = []
    for part in prompt.parts:
        if isinstance(part, int):
            ids += [rng.randrange(5, 250) for _ in range(part)]
        else:
            images.append(given_image(path, part, len(ids)))
            ids += ids_of(path, images[-1])
    fields: dict[str, object] = {
        "max_tokens": 8,
        "sampling": SamplingParams(temperature=0.0, num_logprobs=3, seed=number),
    }
    return Submit(
        request_id=RequestId(number),
        prompt=[TokenSegment(token_ids=pack_int32(ids))],
        eos_token_ids=[],
        request_class=RequestClass.RT,
        age_s=0.0,
        images=tuple(images),
        **(fields | options),  # type: ignore[arg-type]
    )


class Answer(NamedTuple):
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    num_cached: int


SIMULATED: WeakKeyDictionary[ModelRunner, SimulatedEncoder] = WeakKeyDictionary()
"""What simulations take for each runner's encoder."""


class Worker:
    """Lets the simulation drive a runner, which has to encode what a simulated one would."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._simulated = SIMULATED.setdefault(runner, SimulatedEncoder(runner.encoder))
        self.encoded = 0.0
        self.num_state_slots = runner.pool.num_state_slots

    def execute(self, plan: StepPlan, *, exec_s: float, idle_s: float) -> StepResult:
        result = self._runner.execute(plan)
        assert self._simulated.work_of(plan) == pytest.approx(result.encoded)
        self.encoded += result.encoded
        return result


def answers_of(
    runner: ModelRunner | Worker,
    requests: Sequence[Submit],
    *,
    budget: int = 512,
    gap_s: float = 0.0,
) -> list[Answer]:
    core = Scheduler(
        SchedulerConfig(
            max_model_len=MAX_LEN,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=budget,
            queue_limits=dict.fromkeys(RequestClass, QueueLimits(100, 1 << 30)),
            policy=POLICIES["chunked"](),
            admission=ConservativeAdmission(),
            lengths=OutputLengths(max_output_tokens=MAX_LEN),
            kv=KVOptions(cache_order=task_aware),
        )
    )
    worker = runner if isinstance(runner, Worker) else Worker(runner)
    simulation = Simulation(
        core,
        worker,  # type: ignore[arg-type]
        lambda plan: 0.01,
        WorkersReady(NUM_SLOTS, num_state_slots=worker.num_state_slots),
    )
    simulation.run(
        [
            TimedEvent(gap_s * number, FromFrontend(FrontendId(0), request))
            for number, request in enumerate(requests)
        ]
    )
    core.check_integrity()
    found = {key.request_id: outcome for key, outcome in simulation.outcomes.items()}
    outcomes = [found[request.request_id] for request in requests]
    return [Answer(o.token_ids, o.logprobs, o.num_cached_tokens) for o in outcomes]


def check(
    reference: Reference, request: Submit, pictures: Sequence[Image.Image], answer: Answer
) -> float:
    """Return the largest difference of log-probabilities; each token is transformers' best."""
    prompt = unpack_int32(request.prompt[0].token_ids).tolist()
    expected = reference.logprobs([*prompt, *answer.token_ids[:-1]], pictures)[len(prompt) - 1 :]
    assert answer.token_ids == expected.argmax(-1).tolist()
    largest = 0.0
    for row, own in zip(expected, answer.logprobs, strict=True):
        for token_id, logprob in zip(own.top_token_ids, own.top_logprobs, strict=True):
            largest = max(largest, abs(float(row[token_id]) - logprob))
    return largest


def pictures_of(prompt: Prompt) -> list[Image.Image]:
    return [part for part in prompt.parts if isinstance(part, Image.Image)]


@pytest.mark.parametrize(("kernels", "budget"), [(k, b) for k in KERNELS for b in (512, 11)])
def test_answers_are_those_of_transformers(path: Path, kernels: str, budget: int) -> None:
    backend = "auto" if kernels == "native" else kernels
    runner = make_runner(path, model=None, invariant=False, attention_backend=backend)
    requests = [request_of(path, number, prompt) for number, prompt in enumerate(PROMPTS)]
    answers = answers_of(runner, requests, budget=budget)
    reference = Reference(path)
    assert len({tuple(answer.token_ids) for answer in answers}) == len(PROMPTS)
    for prompt, request, answer in zip(PROMPTS, requests, answers, strict=True):
        assert check(reference, request, pictures_of(prompt), answer) < LOGPROB


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_recorded_passes_turn_by_the_same_positions(tmp_path: Path, family: str) -> None:
    """Decodes and chunks of text behind an image run as graphs, by positions of their own."""
    write_vision_model(tmp_path, family, max_position_embeddings=MAX_LEN)
    config = load_model_config(tmp_path)
    kernels = TensorKernels()
    model = load_model(
        tmp_path, config, dtype=torch.float32, kernels=kernels, tp=SingleRank(), context_len=MAX_LEN
    )
    pool = KVPool(kv_layout(config, tp_size=1, dtype="float32"), NUM_SLOTS, torch.device("cpu"))
    runner = ModelRunner(
        model,
        pool,
        SingleRank(),
        host_pool=DirectHostPool(0, pool),
        queue=HostQueue(),
        max_num_seqs=MAX_SEQS,
    )
    recorder = TapeRecorder()
    graphs = DecodeGraphs(
        model, pool, runner.tables, sizes=(1, 2, 4, 8), recorder=recorder, has_logits=True
    )
    graphs.capture()
    graphs.check(1e-5)
    mixed = MixedGraphs(model, pool, runner.tables, sizes=(16, 32), recorder=recorder)
    mixed.capture()
    mixed.check()
    runner.use_graphs(graphs, mixed)
    prompts = [PROMPTS[0], Prompt([3, PICTURES[3], 30]), PROMPTS[4]]
    requests = [request_of(tmp_path, number, prompt) for number, prompt in enumerate(prompts)]
    reference = Reference(tmp_path)
    for prompt, request, answer in zip(
        prompts, requests, answers_of(runner, requests, budget=11), strict=True
    ):
        assert check(reference, request, pictures_of(prompt), answer) < LOGPROB


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma4"])
def test_what_turns_an_image_is_worked_out_on_the_device(tmp_path: Path, family: str) -> None:
    """Brought there from the host, a GPU's step before would have to be over first."""
    write_vision_model(tmp_path, family, max_position_embeddings=MAX_LEN)
    config = load_model_config(tmp_path)
    model = load_model(
        tmp_path, config, dtype=torch.float32, kernels=TensorKernels(), tp=SingleRank()
    )
    assert isinstance(model, DecoderModel)
    encoder = model._vision
    assert encoder is not None
    encoder._device = torch.device("meta")
    with Tape() as tape:
        found = encoder._grid(4, 6, 24, 1)
    assert tape.operations and found.whole[0].tokens.is_meta
    assert found.tables is None or found.tables[0].is_meta


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("pixtral", "mistral-full"),  # gates by GELU, each patch is a token, the first names
        ("mistral3", "ministral3"),
        ("mistral3", "mistral4"),
        ("internvl", "qwen3"),
        ("internvl_6b", "qwen2"),  # InternViT-6B: norms of queries and keys, RMS norms in layers
        ("gemma4_plain", ""),
    ],
)
def test_other_encoders_and_text_parts(tmp_path: Path, family: str, text: str) -> None:
    changes: dict[str, Any] = {}
    if text:
        changes = {**find_tiny_model(text).config, "model_type": text.partition("-")[0]}
    write_vision_model(
        tmp_path,
        family,
        has_old_names=family == "pixtral",
        **changes,
        max_position_embeddings=MAX_LEN,
    )
    runner = make_runner(tmp_path, model=None, invariant=False, attention_backend="torch")
    prompts = [Prompt([5, picture(6, 30, 41), 7]), Prompt([1, picture(2, 20, 9), PICTURES[2], 2])]
    requests = [request_of(tmp_path, number, prompt) for number, prompt in enumerate(prompts)]
    reference = Reference(tmp_path)
    for prompt, request, answer in zip(
        prompts, requests, answers_of(runner, requests, budget=11), strict=True
    ):
        assert check(reference, request, pictures_of(prompt), answer) < LOGPROB


@pytest.mark.parametrize("budget", [512, 11])
def test_a_model_with_states_sees_images(tmp_path: Path, budget: int) -> None:
    write_vision_model(tmp_path, "qwen3_5", max_position_embeddings=MAX_LEN)
    runner = make_runner(tmp_path, model=None, speculation="off")
    requests = [request_of(tmp_path, number, prompt) for number, prompt in enumerate(PROMPTS)]
    reference = Reference(tmp_path)
    for prompt, request, answer in zip(
        PROMPTS, requests, answers_of(runner, requests, budget=budget), strict=True
    ):
        assert check(reference, request, pictures_of(prompt), answer) < LOGPROB
    (tmp_path / "preprocessor_config.json").unlink()
    assert load_model_config(tmp_path).vision is None, "its text alone"


def test_layers_that_plans_order_are_not_computed_again(path: Path) -> None:
    runner = make_runner(path, model=None)
    request = request_of(path, 0, PROMPTS[0])
    (expected,) = answers_of(runner, [request])
    encoder = runner.encoder
    assert encoder is not None
    image = request.images[0]
    other = make_runner(path, model=None)
    simulated = SIMULATED.setdefault(other, SimulatedEncoder(encoder))
    for number in range(encoder.num_layers):
        given_pixels = image if number == 0 else without_pixels(image)
        plan = StepPlan(
            step_id=StepId(number),
            sequences=[],
            slot_ranges=[],
            rows=[],
            encodes=(EncodeOrder(given_pixels, 1),),
        )
        result = other.execute(plan)
        assert result.encoded == pytest.approx(encoder.of_layer(image)) and result.encode_s > 0
        assert simulated.work_of(plan) == pytest.approx(result.encoded)
    lost = msgspec.structs.replace(without_pixels(image), digest=bytes(32))
    plan = msgspec.structs.replace(plan, encodes=(EncodeOrder(lost, 1),))
    assert other.execute(plan).encoded == 0.0  # its row will bring the pixels
    worker = Worker(other)
    (answer,) = answers_of(worker, [request])
    assert answer.token_ids == expected.token_ids
    assert worker.encoded == 0.0


def test_no_step_ends_within_an_image_that_sees_itself(tmp_path: Path) -> None:
    write_vision_model(tmp_path, "gemma3", max_position_embeddings=MAX_LEN)
    request = request_of(tmp_path, 0, Prompt([3, PICTURES[0]]))
    num_prompt_tokens = len(unpack_int32(request.prompt[0].token_ids))
    (image,), row = request.images, RowId(0)
    for num_tokens in (num_prompt_tokens - 1, 4):
        runner = make_runner(tmp_path, model=None)
        sequence = AddSequence(
            row=row,
            segments=list(request.prompt),
            sampling=request.sampling,
            num_prompt_tokens=num_prompt_tokens,
            eos_token_ids=[],
            images=request.images,
        )
        plan = StepPlan(
            step_id=StepId(0),
            sequences=[sequence],
            slot_ranges=[SlotRange(row, 0, pack_int32(list(range(num_tokens))))],
            rows=[PlanRow(row, 0, num_tokens, OutputKind(0))],
        )
        with pytest.raises(ProtocolError, match=f"a part of an image, up to {num_tokens}"):
            runner.execute(plan)
    with pytest.raises(ProtocolError, match="an image of 56 x 56"):
        other = msgspec.structs.replace(image, sees_itself=False)
        answers_of(runner, [msgspec.structs.replace(request, images=(other,))])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("window", [None, 5, 40])
def test_images_see_themselves_with_keys_of_8_bits(dtype: torch.dtype, window: int | None) -> None:
    made = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(30, heads, 8, generator=made) for heads in (4, 2, 2))
    pools = kv_in_8_bits(k, dtype, 4), kv_in_8_bits(v, dtype, 4)
    slots = torch.randperm(30, generator=made)
    batch = AttentionBatch(
        positions=torch.arange(10, 26),
        slot_mapping=torch.arange(16),
        req_to_slot=slots[None].int(),
        rows=torch.tensor([0]),
        cu_seqlens_q=torch.tensor([0, 16]),
        context_lens=torch.tensor([26]),
        host_rows=[0],
        host_q_lens=[16],
        host_context_lens=[26],
        seen=[SeenWhole(0, 3, 13, 22)],
    )
    found = seeing_whole(torch.zeros(16, 4, 8), q, pools, batch, scale=0.3, window=window)
    wide_k, wide_v = (numbers_of_8_bit_kv(pool, 8)[slots] for pool in pools)
    for token in range(16):
        position, is_image = token + 10, 3 <= token < 12
        low = 0 if window is None else max(0, position - window + 1)
        for head in range(4):
            scores = (wide_k[low:22, head // 2] @ q[token, head] * 0.3).softmax(0)
            expected = scores @ wide_v[low:22, head // 2] if is_image else torch.zeros(8)
            assert torch.allclose(found[token, head], expected, atol=1e-5)


class ThreadRank(SingleRank):
    """One of ranks that are threads and add up what each has."""

    def __init__(self, rank: int, shared: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, barrier.parties
        self._shared, self._barrier = shared, barrier

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks."""
        self._shared[self.rank] = x
        self._barrier.wait()
        total = torch.stack(self._shared).sum(dim=0)
        self._barrier.wait()
        return total


@pytest.mark.parametrize("num_heads", [2, 3])
def test_ranks_have_parts_of_an_encoder(tmp_path: Path, num_heads: int) -> None:
    """Or all of it, where heads do not divide; each gets the same embeddings."""
    encoder = {"hidden_size": 16 * num_heads, "num_attention_heads": num_heads}
    write_vision_model(tmp_path, "internvl_6b", encoder=encoder)
    config = load_model_config(tmp_path)
    image = given_image(tmp_path, PICTURES[0], 0)
    pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)

    def embeddings(tp: SingleRank) -> torch.Tensor:
        model = load_model(
            tmp_path, config, dtype=torch.float32, kernels=TensorKernels(), tp=tp, context_len=64
        )
        with torch.inference_mode():
            return model.encode(pixels.view(image.height, image.width, 3)).embeddings()

    expected = embeddings(SingleRank())
    barrier, shared = threading.Barrier(2, timeout=60), [torch.empty(0)] * 2
    ranks = [ThreadRank(rank, shared, barrier) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(embeddings, ranks):
            assert torch.allclose(found, expected, atol=1e-5)
    assert expected.std() > 0.01


def test_another_picture_gives_another_answer(path: Path) -> None:
    """The comparison has teeth: what was seen matters at every token behind."""
    request = request_of(path, 0, PROMPTS[0])
    runner = make_runner(path, model=None)
    (answer,) = answers_of(runner, [request])
    with contextlib.suppress(AssertionError):  # the tokens are others, or are less certain
        difference = check(Reference(path), request, [picture(8)], answer)
        if difference < 10 * LOGPROB:
            pytest.fail(f"only {difference}")


def test_prefixes_are_found_inside_and_behind_images(path: Path) -> None:
    runner = make_runner(path, model=None)
    first = Prompt([6, PICTURES[0], 8])
    whole = request_of(path, 7, first)
    ids = unpack_int32(whole.prompt[0].token_ids).tolist()
    behind = [*ids, 33, 34]
    start = whole.images[0].start
    other = given_image(path, picture(8), start)
    requests = [
        whole,
        msgspec.structs.replace(
            whole, request_id=RequestId(8), prompt=[TokenSegment(token_ids=pack_int32(behind))]
        ),
        msgspec.structs.replace(whole, request_id=RequestId(9), images=(other,), max_tokens=8),
        msgspec.structs.replace(whole, request_id=RequestId(10)),
    ]
    answers = answers_of(runner, requests, gap_s=5.0)
    assert [answer.num_cached for answer in answers] == [0, len(ids), start, len(ids) - 1]
    reference = Reference(path)
    seen = [PICTURES[0], PICTURES[0], picture(8), PICTURES[0]]
    for request, image, answer in zip(requests, seen, answers, strict=True):
        assert check(reference, request, [image], answer) < LOGPROB


def test_a_prompt_that_ends_within_a_cached_image(path: Path) -> None:
    """KV of a part of an image is taken only where enough of its ids are the same."""
    runner = make_runner(path, model=None)
    for number in (0, 1):
        request = request_of(path, 20 + number, Prompt([4, PICTURES[number]]))
        again = msgspec.structs.replace(request, request_id=RequestId(30 + number))
        answers = answers_of(runner, [request, again], gap_s=5.0)
        assert answers[0].token_ids == answers[1].token_ids
        assert answers[1].num_cached == 3 + request.images[0].num_tokens


def requests_with_images(path: Path) -> list[Submit]:
    """Return requests of which some begin alike, with and without images, told by their seeds."""
    rng = random.Random(5)
    beginnings = [
        Prompt([20, PICTURES[0], 6]),
        Prompt([20, PICTURES[1], 6]),
        Prompt([3, PICTURES[2], PICTURES[3], 1]),
        Prompt([25]),
    ]
    requests = []
    for number in range(NUM_CATALOGUE):
        kind = rng.randrange(len(beginnings))
        begun = request_of(path, kind, beginnings[kind])
        own = [rng.randrange(5, 250) for _ in range(rng.choice((1, 6, 20)))]
        ids = [*unpack_int32(begun.prompt[0].token_ids).tolist(), *own]
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 1.0)), seed=number, frequency_penalty=rng.choice((0, 0.8))
        )
        requests.append(
            msgspec.structs.replace(
                begun,
                request_id=RequestId(number),
                prompt=[TokenSegment(token_ids=pack_int32(ids))],
                sampling=sampling,
                max_tokens=rng.randrange(4, 40),
            )
        )
    return requests


@more_when_long
def test_no_schedule_changes_a_token(path: Path) -> None:
    """Chunked, found as prefixes, paused, computed again, loaded from the host."""
    runner = make_runner(path, model=None)
    drawn = [
        make_schedule(number, preemption=preemption, num_host_slots=600)
        for number in range(13, 13 + choose(3, 6))
        for preemption in Preemption
    ]
    catalogue = Catalogue(runner, requests=requests_with_images(path))
    total = Tally()
    for schedule in drawn:
        kv = dataclasses.replace(schedule.kv, cache_order=task_aware)
        total.add(catalogue.run(dataclasses.replace(schedule, num_slots=150, kv=kv)))
        assert not runner._images._held
    assert total.num_compared > 5 * len(drawn) and total.num_different == 0
    assert total.num_prefix_hits > len(drawn) and total.lost_tokens > 0
    assert total.num_pauses > len(drawn) / 2 and total.loaded_tokens > 0
    assert total.seen.num_checked_resumed > 5 * len(drawn)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_the_authors_files(tmp_path: Path, family: str) -> None:
    write_vision_model(tmp_path, family, has_old_names=True, max_position_embeddings=MAX_LEN)
    runner = make_runner(tmp_path, model=None)
    request = request_of(tmp_path, 0, PROMPTS[0])
    (answer,) = answers_of(runner, [request])
    assert len(answer.token_ids) == 8


def test_an_image_that_the_encoder_does_not_read(path: Path) -> None:
    runner = make_runner(path, model=None)
    request = request_of(path, 0, PROMPTS[0])
    pixels = bytes(3 * 15 * 14)
    odd = msgspec.structs.replace(
        request.images[0], height=15, width=14, pixels=pixels, digest=digest_of(15, 14, pixels)
    )
    with pytest.raises(ProtocolError, match="14 x 15"):
        answers_of(runner, [msgspec.structs.replace(request, images=(odd,))])


@pytest.mark.parametrize(
    ("file", "key", "value", "complaint"),
    [
        ("preprocessor_config.json", "do_resize", False, "'do_resize' must be true"),
        ("preprocessor_config.json", "crop_size", {"height": 14, "width": 14}, "28 x 28"),
        ("preprocessor_config.json", "image_std", [0, 1, 1], "'image_std' must hold three"),
        ("preprocessor_config.json", "image_processor_type", "OtherImageProcessor", "must be CLIP"),
        ("config.json", "vision_feature_select_strategy", "cls", "must be 'default' or 'full'"),
        ("config.json", "vision_feature_layer", -9, "'vision_feature_layer' must be between -4"),
        ("config.json", "projector_hidden_act", "tanh", "must be one of quick_gelu"),
    ],
)
def test_files_that_cannot_be_served(
    tmp_path: Path, file: str, key: str, value: object, complaint: str
) -> None:

    write_llava(tmp_path)
    values = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps(values | {key: value}))
    with pytest.raises(ModelLoadError, match=complaint):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [
        ("qwen2_vl", {"patch_size": 0}, "'vision_config.patch_size' must be between"),
        ("qwen2_vl", {"patch_size": 9}, "'patch_size' times merge_size must be 18, got 14"),
        ("qwen2_vl", {"model_type": "clip"}, "must be 'qwen2_vl_vision' or 'qwen2_vl', got 'clip'"),
        ("qwen2_vl", {"in_channels": 4}, "'vision_config.in_channels' must be 3"),
        ("qwen2_vl", {"embed_dim": 36, "num_heads": 6}, "must make heads of a multiple of 4"),
        ("qwen2_5_vl", {"window_size": 13}, "'vision_config.window_size' must be at least 14"),
        ("qwen2_5_vl", {"hidden_act": "gelu"}, "'vision_config.hidden_act' must be 'silu'"),
        ("qwen2_5_vl", {"fullatt_block_indexes": [3]}, "must hold numbers of layers below 3"),
        ("qwen3_vl", {"num_position_embeddings": 24}, "must be a square number, got 24"),
        ("qwen3_vl", {"deepstack_visual_indexes": [0, 1, 2]}, "must be fewer than the 3 layers"),
        ("mistral3", {"hidden_act": "quick_gelu"}, "must be 'silu', 'gelu' or"),
        ("mistral3", {"hidden_size": 36, "num_attention_heads": 6}, "heads of a multiple of 4"),
        ("mistral3", {"model_type": "clip"}, "must be 'pixtral', got 'clip'"),
        ("gemma3", {"image_size": 63}, "must be that of a grid of 9 x 9 patches"),
        ("gemma3", {"image_size": 84}, "'size' must be the encoder's 84 x 84"),
        ("gemma3", {"model_type": "clip"}, "must be 'siglip_vision_model', got 'clip'"),
        ("gemma4", {"head_dim": 8}, "'vision_config.head_dim' must be 16, got 8"),
        ("gemma4", {"num_key_value_heads": 1}, "'vision_config.num_key_value_heads' must be 2"),
        ("gemma4", {"hidden_activation": "silu"}, "must be 'gelu_pytorch_tanh', got 'silu'"),
        ("gemma4", {"hidden_size": 36, "num_attention_heads": 6}, "heads of a multiple of 4"),
        ("gemma4", {"position_embedding_size": 33}, "must be at least 34, got 33"),
        ("gemma4", {"patch_size": 8}, "'patch_size' times pooling_kernel_size must be 16, got 14"),
        (
            "gemma4",
            {"rope_parameters": {"rope_type": "yarn"}},
            "must be 'axial' or 'default', got 'yarn'",
        ),
        ("gemma4", {"model_type": "siglip_vision_model"}, "must be 'gemma4_vision', got 'siglip"),
        ("internvl", {"norm_type": "batch_norm"}, "or 'rms_norm', got 'batch_norm'"),
        ("internvl", {"image_size": [28, 14]}, "must be a square of 1 to 4096"),
        ("internvl", {"image_size": 35}, "must be a multiple of 14, got 35"),
        ("internvl", {"image_size": 42}, "'size' must be the encoder's 42 x 42"),
    ],
)
def test_encoders_that_cannot_be_served(
    tmp_path: Path, family: str, changes: dict[str, object], complaint: str
) -> None:
    write_vision_model(tmp_path, family)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    values["vision_config"] |= changes
    file.write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=complaint):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"output_dim": 128}, "'visual.output_dim' must be hidden_size 256 and a multiple of 128"),
        ({"n_queries": 15}, "'visual.n_queries' must be a square number, got 15"),
        ({"image_size": 6}, "'visual.image_size' must be at least patch_size 7, got 6"),
        ({"image_size": None}, "'visual.image_size' must be a square of 1 to 4096, got None"),
        ({"heads": 3}, "'visual.width' must divide by heads 3, got 32"),
        ({"mlp_ratio": -1}, "'visual.mlp_ratio' must be"),
        ({"image_start_id": -1}, "'visual.image_start_id' must be"),
        ({"layers": 0}, "'visual.layers' must be"),
    ],
)
def test_first_qwen_vls_that_cannot_be_served(
    tmp_path: Path, changes: dict[str, object], complaint: str
) -> None:
    file = write_vision_model(tmp_path, "qwen_vl") / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"visual": values["visual"] | changes}))
    with pytest.raises(ModelLoadError, match=complaint):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [
        ("mistral3", {"size": {"longest_edge": 4104}}, "'size.longest_edge' must be between"),
        ("mistral3", {"size": {"height": 70, "width": 70}}, "longest_edge"),
        ("mistral3", {"image_processor_type": "CLIPImageProcessor"}, "must be PixtralImage"),
        ("gemma3", {"do_pan_and_scan": True}, "'do_pan_and_scan' must be false"),
        ("gemma3", {"size": {"height": 28, "width": 28}}, "must be the encoder's 56 x 56"),
        ("gemma4", {"do_normalize": True}, "'do_normalize' must be false"),
        ("gemma4", {"do_resize": False}, "'do_resize' must be true"),
        ("gemma4", {"max_soft_tokens": 85599}, "must be between 1 and 85598, got 85599"),
        ("gemma4", {"image_processor_type": "Gemma3ImageProcessor"}, "must be Gemma4ImageProc"),
        ("internvl", {"size": {"height": 28, "width": 14}}, "must be the encoder's 28 x 28"),
        ("internvl", {"max_patches": 21399}, "must be at most 21398, got 21399"),
        ("internvl", {"min_patches": 5}, "'min_patches' must be between 1 and 4"),
    ],
)
def test_pictures_that_cannot_be_prepared(
    tmp_path: Path, family: str, changes: dict[str, object], complaint: str
) -> None:
    file = write_vision_model(tmp_path, family) / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelLoadError, match=complaint):
        load_model_config(tmp_path)


@pytest.mark.parametrize("sections", [[2, 3], [2, 3, 4], [2, 6, 0], "2"])
def test_positions_that_do_not_fit_the_heads(tmp_path: Path, sections: object) -> None:
    write_vision_model(tmp_path, "qwen2_vl")
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    values["text_config"]["rope_parameters"]["mrope_section"] = sections
    file.write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match="mrope_section' must be"):
        load_model_config(tmp_path)


def test_the_first_files_have_all_keys_side_by_side(tmp_path: Path) -> None:
    """With `type: mrope`, and the text's keys beside `vision_config`."""
    write_vision_model(tmp_path, "qwen2_5_vl", tie_word_embeddings=True)
    expected = load_model_config(tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "model_type": "qwen2_5_vl"}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    values["vision_config"] |= {"model_type": "qwen2_5_vl", "in_chans": 3}
    file.write_text(json.dumps({**text, **values}))
    assert load_model_config(tmp_path) == expected


def test_the_published_qwen_vl_has_the_simulators_sizes(tmp_path: Path) -> None:
    visual = {"image_size": 448, "patch_size": 14, "width": 1664, "layers": 48, "heads": 16}
    visual |= {"mlp_ratio": 4.9231, "output_dim": 4096}
    config = {
        "architectures": ["QWenLMHeadModel"],
        "visual": visual,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 151_936,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 8192,
        "seq_length": 2048,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, shape = load_model_config(tmp_path), MODELS["qwen-vl-chat"]
    assert found.vision is not None and shape.encoder is not None
    assert found.vision.num_tokens(448, 448) == 256 and found.vision.placeholder == 151_859
    work = found.vision.work_within(2048)
    assert (work.num_layers, work.max_image_tokens) == (shape.encoder.num_layers, 256)
    pair_share = work.pair_share * COMPUTE_SHARE / PAIRS_SHARE
    assert pair_share == pytest.approx(shape.encoder.work.pair_share, rel=0.05)
    counts = {True: 0, False: 0}
    for name, size in expected_tensors(found).items():
        counts[name.startswith(VISION)] += math.prod(size)
    assert counts == {
        True: pytest.approx(shape.encoder.num_params, rel=0.03),
        False: pytest.approx(shape.num_params, rel=0.01),
    }


def test_clipped_products_have_ranges_of_their_own(tmp_path: Path) -> None:
    """A range that is not there is named, and each of them changes what is seen."""
    file = write_vision_model(tmp_path, "gemma4") / "model.safetensors"
    tensors = load_file(file)
    made = picture(1)
    pixels = torch.frombuffer(
        bytearray(given_image(tmp_path, made, 0).pixels), dtype=torch.uint8
    ).view(42, 56, 3)

    def seen() -> torch.Tensor:
        runner = make_runner(tmp_path, model=None)
        with torch.inference_mode():
            return runner._model.encode(pixels).embeddings()

    before, prefix = seen(), "model.vision_tower.encoder.layers.1"
    products = [f"self_attn.{name}_proj" for name in "qkvo"]
    products += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    ends = [f"{kind}_{end}" for kind in ("input", "output") for end in ("min", "max")]
    for name in (f"{prefix}.{product}.{end}" for product in products for end in ends):
        save_file(tensors | {name: tensors[name] / 4}, file, metadata={"format": "pt"})
        assert (seen() - before).abs().max() > 1e-4, name
    for end, sign in (("min", -1), ("max", 1)):  # as transformers makes a model: nothing is clipped
        wide = {
            key: one * 0 + sign * math.inf
            for key, one in tensors.items()
            if key.endswith(f"put_{end}")
        }
        save_file(tensors | wide, file, metadata={"format": "pt"})
        assert seen().isfinite().all() and (seen() - before).abs().max() > 1e-4
    save_file(tensors | {name: tensors[name] * math.nan}, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"tensor '{name}' has values that are not finite"):
        seen()
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"tensor '{name}' is missing"):
        seen()


def test_a_gemma_4_whose_tokens_see_all_texts_is_refused(tmp_path: Path) -> None:
    """Images that see themselves are those of files that say so."""
    file = write_vision_model(tmp_path, "gemma4") / "config.json"
    values = json.loads(file.read_text())
    for seen, sees_itself in (("vision", True), (None, False)):
        values["text_config"]["use_bidirectional_attention"] = seen
        file.write_text(json.dumps(values))
        vision = load_model_config(tmp_path).vision
        assert vision is not None and vision.prompt.sees_itself is sees_itself
    values["text_config"]["use_bidirectional_attention"] = "all"
    file.write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match="must be null or 'vision', got 'all'"):
        load_model_config(tmp_path)


def test_the_processor_may_be_in_another_file(tmp_path: Path) -> None:

    write_llava(tmp_path)
    own = tmp_path / "preprocessor_config.json"
    before = load_model_config(tmp_path).vision
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": json.loads(own.read_text())})
    )
    own.unlink()
    assert load_model_config(tmp_path).vision == before
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(ModelLoadError, match="no such file, which a model that sees"):
        load_model_config(tmp_path)


def test_a_text_part_alone_has_a_processor_file_without_images(tmp_path: Path) -> None:
    """As older directories of Gemma 3 and Mistral 3 have: nothing says how pictures are made."""
    write_vision_model(tmp_path, "gemma3")
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text('{"image_seq_length": 256}')
    assert load_model_config(tmp_path).vision is None


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("pixtral", "mistral"),
        ("mistral3", "mistral"),
        ("mistral3", "ministral3"),
        ("pixtral", "qwen2"),
        ("internvl", "qwen2"),
        ("internvl", "qwen3"),
        ("internvl", "qwen3_moe"),
    ],
)
def test_keys_of_text_parts_that_equal_defaults_may_be_left_out(
    tmp_path: Path, family: str, text: str
) -> None:
    """Older releases of transformers leave them out."""
    write_vision_model(tmp_path, family)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    values["text_config"] = transformers.AutoConfig.for_model(text).to_dict()
    file.write_text(json.dumps(values))
    expected = load_model_config(tmp_path)
    stated = ("model_type", "rope_parameters", "dtype")
    values["text_config"] = {key: values["text_config"].get(key) for key in stated}
    file.write_text(json.dumps(values))
    assert load_model_config(tmp_path) == expected
    values["text_config"] |= {"num_attention_heads": 16, "num_key_value_heads": None}
    file.write_text(json.dumps(values))
    assert load_model_config(tmp_path).num_kv_heads == 16
