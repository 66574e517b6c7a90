"""Which kernels a worker gets, and which combinations are refused, where."""

from __future__ import annotations

import json
import logging
import threading
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import create_autospec

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.kernels import select
from lightserve.kernels.select import make_kernels, missing_core, tune_kernels
from lightserve.kernels.triton import NEWEST_TRITON, OLDEST_TRITON, product_tuning, tuning
from lightserve.kernels.triton.configs import (
    INTERPRETER,
    AttentionConfigs,
    ChunkClass,
    Gpu,
    default_decode,
    default_prefill,
)
from lightserve.kernels.triton.products import ProductConfig
from lightserve.kernels.triton.tuning import (
    TuningKey,
    Work,
    choose,
    load_choices,
    scenes,
    tuned_configs,
    tuning_path,
    works,
)
from lightserve.kernels.weights import KernelShapes

ON_CPU = "torch" if select.missing_core() else "native"
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "batch_invariant", "device", "expected"),
    [
        ("auto", False, None, ON_CPU),
        ("auto", False, CPU, ON_CPU),
        ("auto", False, CUDA, "triton"),
        ("torch", False, CPU, "torch"),
        ("triton", False, CUDA, "triton"),
        ("reference", False, CPU, "reference"),
        ("reference", False, CUDA, "reference"),
        (
            "auto",
            True,
            CPU,
            "torch-batch-invariant" if missing_core() else "native-batch-invariant",
        ),
        ("torch", True, CPU, "torch-batch-invariant"),
    ],
)
def test_kernels(
    name: str, batch_invariant: bool, device: torch.device | None, expected: str
) -> None:
    assert make_kernels(name, batch_invariant=batch_invariant, device=device).name == expected


def test_triton_on_the_cpu_is_for_trying_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert make_kernels("triton", batch_invariant=False, device=CPU).name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="needs a GPU"):
        make_kernels("triton", batch_invariant=False, device=CPU)


def test_torchs_kernels_are_for_the_cpu() -> None:
    message = "--attention-backend must be auto, triton or reference on a GPU, got 'torch'"
    with pytest.raises(ConfigError, match=message):
        make_kernels("torch", batch_invariant=False, device=CUDA)


@pytest.mark.parametrize("name", ["auto", "triton", "torch"])
def test_a_gpu_without_triton(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the extra gpu"):
        make_kernels(name, batch_invariant=False, device=CUDA)
    assert make_kernels("torch", batch_invariant=False, device=CPU).name == "torch"


def test_versions_of_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is older is refused; what is newer is said, and left to the check of the start."""
    for version in ("3.6.0", "3.9.1"):
        monkeypatch.setattr(triton, "__version__", version)
        make_kernels("reference", batch_invariant=False, device=CUDA)
    assert not caplog.records
    monkeypatch.setattr(triton, "__version__", "3.10.0+git1")
    make_kernels("reference", batch_invariant=False, device=CUDA)
    assert caplog.messages == ["triton 3.10.0+git1 is untried: the newest that was tried is 3.9"]
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.raises(ConfigError, match=r"needs triton 3\.6 or newer, got 3\.5\.1"):
        make_kernels("reference", batch_invariant=False, device=CUDA)
    wanted = "triton>={}.{},<{}.{}".format(*OLDEST_TRITON, NEWEST_TRITON[0], NEWEST_TRITON[1] + 1)
    root = Path(__file__).parents[2]
    assert tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "gpu"
    ] == [wanted]
    assert wanted in (root / "requirements" / "triton.in").read_text()


def test_auto_on_a_gpu_is_no_place_for_batch_invariance() -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        make_kernels("auto", batch_invariant=True, device=CUDA)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": "gpu"}, "--device must be one of auto, cpu, cuda, got 'gpu'"),
        ({"attention_backend": "flash"}, "--attention-backend must be one of auto, triton, torch"),
        ({"kernel_tuning": "off", "device": "cpu"}, "--kernel-tuning needs a GPU"),
        (
            {"kernel_tuning": "off", "attention_backend": "torch"},
            "--kernel-tuning needs --attention-backend triton, got 'torch'",
        ),
        (
            {"batch_invariant": True, "device": "cuda"},
            "--batch-invariant needs --device cpu or auto, got 'cuda'",
        ),
        (
            {"batch_invariant": True, "attention_backend": "triton"},
            "--batch-invariant needs --attention-backend torch or auto, got 'triton'",
        ),
        (
            {"quantization": "int3"},
            "--quantization must be one of none, int8, w8a8, int4, fp8, got 'int3'",
        ),
        (
            {"quantization": "int8", "attention_backend": "torch"},
            "--quantization int8 needs --attention-backend auto or triton, got 'torch'",
        ),
        (
            {"quantization": "int8", "batch_invariant": True},
            "--quantization int8 cannot be had with --batch-invariant",
        ),
        ({"kv_dtype": "fp4"}, "--kv-dtype must be one of auto, int8, fp8, got 'fp4'"),
        (
            {"kv_dtype": "fp8", "attention_backend": "torch"},
            "--kv-dtype fp8 needs --attention-backend auto or triton or reference, got 'torch'",
        ),
        (
            {"kv_dtype": "int8", "batch_invariant": True},
            "--kv-dtype int8 cannot be had with --batch-invariant",
        ),
        (
            {"batch_invariant": True, "dtype": "bfloat16"},
            "--batch-invariant needs --dtype float32 or auto, got 'bfloat16'",
        ),
    ],
)
def test_refused_options(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**values)  # type: ignore[arg-type]


# Which configuration is chosen, with made-up times; what is kept and what is not believed.

TUNED_ON = torch.device("cpu")
GPUS = [
    Gpu("H200", 90, 132, 227 << 10),
    Gpu("A100", 80, 108, 163 << 10),
    Gpu("L4", 89, 58, 99 << 10),
    Gpu("B200", 100, 148, 227 << 10),
]


def make_shapes(**changes: object) -> KernelShapes:
    fields: dict[str, object] = {
        "dtype": torch.bfloat16,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rotary_dim": 16,
        "sliding_windows": (None,),
        "rms_norm_eps": 1e-5,
        "qk_norm": False,
        "qkv_bias": False,
        "context_len": 40,
        **changes,
    }
    return KernelShapes(**fields)  # type: ignore[arg-type]


class MadeUpTimes:
    """A timer that never calls: times by the configuration that a call would use."""

    def __init__(self, time_of: Callable[[tuning.Config], float]) -> None:
        self.num_calls = 0
        self.widths: set[int] = set()
        """Of the tables that calls read."""
        self._time_of = time_of
        self._configs: dict[tuning.Call, tuning.Config] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        call = tuning.Scenery.call

        def noted(scenery: tuning.Scenery, config: tuning.Config) -> tuning.Call:
            made = call(scenery, config)
            self._configs[made] = config
            self.widths.add(scenery._batch.req_to_slot.shape[1])
            return made

        monkeypatch.setattr(tuning.Scenery, "call", noted)

    def __call__(self, call: tuning.Call) -> float:
        self.num_calls += 1
        return self._time_of(self._configs[call])


def work_of(chunks: ChunkClass | None) -> Work:
    return next(work for work in works(make_shapes()) if work.chunks is chunks)


@pytest.mark.parametrize("chunks", [None, *ChunkClass])
def test_the_fastest_is_chosen_unless_the_gain_may_be_chance(
    chunks: ChunkClass | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_of(chunks)
    default = tuning.default_config(work, INTERPRETER)
    others = [c for c in tuning.candidates(work, INTERPRETER) if c != default]
    assert len(others) >= 4
    favourite, broken = others[2], others[0]
    for gain, expected in ((0.5, favourite), (0.03, favourite), (0.01, default)):

        def time_of(config: tuning.Config, gain: float = gain) -> float:
            if config == broken:
                raise OutOfResources(2, 1, "shared memory")
            return 1e-3 * (1 - gain if config == favourite else 1.0)

        with monkeypatch.context() as patch:
            timer = MadeUpTimes(time_of)
            timer.install(patch)
            choice = choose(work, 40, TUNED_ON, timer)
        assert tuning.asdict(expected) == choice.config
        assert choice.default_time_us == pytest.approx(1000)
        assert timer.num_calls >= len(others)
        assert timer.widths == {41}, "as a server's"


def test_choices_are_kept_by_version_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = make_shapes(sliding_windows=(None, 8))
    timer = MadeUpTimes(lambda config: 1e-3 / config.num_stages)
    timer.install(monkeypatch)
    done: list[int] = []
    configs = tuned_configs(shapes, TUNED_ON, timer=timer, directory=tmp_path, advance=done.append)
    assert sum(done) == len(works(shapes)) == 8
    num_calls = timer.num_calls
    assert num_calls > 8
    again = tuned_configs(shapes, TUNED_ON, timer=timer, directory=tmp_path)
    assert timer.num_calls == num_calls, "nothing is measured twice"
    for work in works(shapes):
        for some in (configs, again):
            if work.chunks is None:
                assert some.decode(work.shape, INTERPRETER).num_stages == 4
                assert default_decode(work.shape, INTERPRETER).num_stages != 4
            else:
                chosen = some.prefill(work.shape, INTERPRETER, work.chunks)
                assert chosen.num_stages == 3 != default_prefill(work.shape, INTERPRETER).num_stages
    tuned_configs(make_shapes(head_dim=32), TUNED_ON, timer=timer, directory=tmp_path)
    assert timer.num_calls > num_calls, "another shape is measured"
    (path,) = tmp_path.iterdir()
    assert len(json.loads(path.read_text())["choices"]) == 12

    key = TuningKey("interpreter", tuning.triton.__version__, tuning.KERNEL_VERSION)
    assert path == tuning_path(key, tmp_path)
    assert len(load_choices(path, key)) == 12
    with caplog.at_level(logging.WARNING):
        other = TuningKey("interpreter", "0.0", tuning.KERNEL_VERSION)
        assert load_choices(path, other) == {}
        path.write_text(path.read_text()[:-30])
        assert load_choices(path, key) == {}
    assert len(caplog.records) == 2
    num_calls = timer.num_calls
    tuned_configs(shapes, TUNED_ON, timer=timer, directory=tmp_path)
    assert timer.num_calls > num_calls, "a broken file is measured anew"


def test_what_is_measured_runs(tmp_path: Path) -> None:
    """Every candidate of every kind of work, in the interpreter, on the smallest scenes."""

    def timer(call: tuning.Call) -> float:
        result = call()
        assert isinstance(result, torch.Tensor) and bool(result.isfinite().all())
        return 1.0

    shapes = make_shapes(sliding_windows=(5,), context_len=9, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "DECODE_SCENES", ((2, 9),))
        patch.setattr(tuning, "CHUNK_SCENES", dict.fromkeys(ChunkClass, ((4, 9),)))
        tuned_configs(shapes, TUNED_ON, timer=timer, directory=tmp_path)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_built_in_ones_and_candidates_fit(gpu: Gpu, head_dim: int) -> None:
    shapes = make_shapes(num_heads=32, num_kv_heads=8, head_dim=head_dim, context_len=32768)
    for work in works(shapes):
        for config in (tuning.default_config(work, gpu), *tuning.candidates(work, gpu)):
            if work.chunks is None:
                assert config.split_len % config.block_n == 0  # type: ignore[union-attr]
            else:
                assert tuning.prefill_bytes(config, work.shape) <= gpu.shared_bytes  # type: ignore[arg-type]
        token_bytes = 2 * 8 * head_dim * 2
        for scene in scenes(work, 32768):
            assert sum(context for _, context in scene) * token_bytes <= tuning.MAX_POOL_BYTES
            assert all((new == 1) == (work.chunks is None) for new, _ in scene)


def test_nothing_is_measured_off_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightserve.kernels.triton.kernels import TritonKernels

    kernels = TritonKernels()
    before = kernels.configs
    monkeypatch.setattr(tuning, "tuned_configs", lambda *_, **__: pytest.fail("measured"))
    for mode, device in (("auto", TUNED_ON), ("off", torch.device("cuda"))):
        tune_kernels(kernels, [make_shapes()], device, mode=mode, is_shown=False)
    assert kernels.configs is before
    assert isinstance(before, AttentionConfigs)


def test_candidates_are_compiled_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many at a time as there are cores; what does not run here is left to the measurement."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(devices.append(device)))
    gpu, together = torch.device("cuda", 1), threading.Barrier(3)
    running, most = 0, 0
    lock = threading.Lock()

    def call(number: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(timeout=60)  # nothing goes on until three are here
        with lock:
            running -= 1
        if number % 3 == 0:
            raise OutOfResources(9, 8, "registers")

    tuning.compile_ahead([partial(call, number) for number in range(6)], gpu, num_threads=3)
    assert most == 3 and devices == [gpu] * 6

    def fail() -> None:
        raise RuntimeError("CUDA error: 7")

    with pytest.raises(RuntimeError, match="CUDA error: 7"):
        tuning.compile_ahead([fail], gpu, num_threads=3)


def test_on_a_gpu_every_candidate_is_compiled_before_one_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(
        tuning, "compile_ahead", lambda some, device, num_threads: calls.append(len(some))
    )
    monkeypatch.setattr(tuning, "Scenery", lambda *args, **options: FakeScenery())
    monkeypatch.setattr(tuning, "gpu_of", lambda device: GPUS[0])
    work = works(make_shapes())[0]
    choose(work, 40, torch.device("cuda", 0), lambda call: 1.0 + len(calls))
    num_configs = len(
        dict.fromkeys([default_decode(work.shape, GPUS[0]), *tuning.candidates(work, GPUS[0])])
    )
    assert calls == [num_configs] * len(scenes(work, 40)) and num_configs > 2


def test_the_timer_asks_events_for_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    event = create_autospec(torch.cuda.Event, instance=True)
    event.elapsed_time.return_value = 2.0
    monkeypatch.setattr(torch.cuda, "Event", create_autospec(torch.cuda.Event, return_value=event))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    calls: list[int] = []
    assert tuning.cuda_timer(lambda: calls.append(1)) == 0.002 and len(calls) > 10


# Products of few rows: ours where it is faster than cuBLAS, and nowhere else.


class MadeUpProductTimes:
    """Times by the configuration of the kernels that a call uses: a call is made, and counted."""

    def __init__(self, time_of: Callable[[ProductConfig | None], float]) -> None:
        self.num_calls = 0
        self._time_of = time_of
        self._used: ProductConfig | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def multiply(
            x: torch.Tensor, weight: torch.Tensor, bias: None, config: ProductConfig, **_: object
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self._used = config
            return x, x

        monkeypatch.setattr("lightserve.kernels.triton.kernels.multiply", multiply)

    def __call__(self, call: tuning.Call) -> float:
        self.num_calls += 1
        self._used = None
        call()
        return self._time_of(self._used)


def test_products_are_cublas_unless_another_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = make_shapes()
    for gain, is_ours in ((0.5, True), (0.03, True), (0.01, False), (-0.5, False)):
        timer = MadeUpProductTimes(lambda c, g=gain: 1e-3 * (1.0 if c is None else 1 - g))  # type: ignore[misc]
        with monkeypatch.context() as patch:
            timer.install(patch)
            done: list[int] = []
            directory = tmp_path / str(gain)
            found = product_tuning.tuned_products(
                shapes, TUNED_ON, timer=timer, directory=directory, advance=done.append
            )
            assert sum(done) == len(product_tuning.product_works(shapes)) == 16
            num_calls = timer.num_calls
            again = product_tuning.tuned_products(
                shapes, TUNED_ON, timer=timer, directory=directory
            )
        assert timer.num_calls == num_calls, "nothing is measured twice"
        assert again == found
        assert len(found) == (16 if is_ours else 0)
    (path,) = (tmp_path / "0.5").iterdir()
    assert {choice["work"] for choice in json.loads(path.read_text())["choices"]} >= {
        "norm, product 1x64 to 128 bfloat16",
        "product 8x96 to 64 bfloat16",
        "norm, gated product 4x64 to 192 bfloat16",
    }


@pytest.mark.parametrize(
    ("changes", "inputs"),
    [
        ({"dtype": torch.float32}, set()),
        ({"value_dim": 8}, {64, 96}),
        ({"intermediate_size": 0}, {64}),
    ],
)
def test_which_products_are_measured(changes: dict[str, object], inputs: set[int]) -> None:
    found = product_tuning.product_works(make_shapes(**changes))
    assert {work.key.num_inputs for work in found} == inputs
    assert not changes.get("value_dim") or all(w.num_outputs in {64, 192} for w in found)


class FakeScenery:
    """Calls that do nothing."""

    def call(self, config: tuning.Config) -> tuning.Call:
        return lambda: None
