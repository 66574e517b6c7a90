"""Constraints through the real core and the real model: every output satisfies its own, whatever
else runs beside it, and recomputation changes no token."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import psutil
import pytest
import torch
from llguidance import LLMatcher
from support.grids import long_but

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.config import ServeConfig
from lightserve.messages.common import (
    Constraint,
    GrammarConstraint,
    JsonSchemaConstraint,
    RegexConstraint,
    TokenSegment,
    pack_int32,
)
from lightserve.messages.frontend_router import ErrorCode, Submit
from lightserve.messages.router_worker import AddSequence, StepPlan, StepResult
from lightserve.router.admission.baselines import ConservativeAdmission
from lightserve.router.config import SchedulerConfig
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.from_submit import QueueLimits
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies import POLICIES
from lightserve.router.request import Request
from lightserve.router.scheduler import Scheduler
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.structured import MAX_COMPILED_BYTES, MiB, model_vocabulary
from lightserve.tokenization.tokenizer import Tokenizer
from lightserve.types import (
    FinishReason,
    FrontendId,
    RequestClass,
    RequestId,
    RowId,
    SamplingParams,
)
from lightserve.worker import constraints, matchers
from lightserve.worker.build import build_runner
from lightserve.worker.model_runner import ModelRunner

NUM_SLOTS, MAX_LEN, MAX_TOKENS = 2400, 512, 240
LENGTHS = defaultdict[RowId, int](int, dict.fromkeys(map(RowId, range(4)), 1))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é☃"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
SUM = 'start: NUM (("+" | "-") NUM){1,3}\nNUM: /[1-9][0-9]{0,2}/'
CONSTRAINTS: list[Constraint | None] = [
    JsonSchemaConstraint(schema=json.dumps(SCHEMA)),
    RegexConstraint(pattern=DATE),
    None,
    GrammarConstraint(grammar=SUM),
]


class RunnerWorker:
    """Lets the simulation drive a real model runner; only the clock is virtual."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute(self, plan: StepPlan, *, exec_s: float, idle_s: float) -> StepResult:
        del exec_s, idle_s
        return self._runner.execute(plan)


class RecklessAdmission:
    """Admits all requests, so that some are preempted and recomputed."""

    forecast_peak = None

    def begin(self, live: Collection[Request], num_slots: int) -> RecklessAdmission:
        return self

    def admit(self, request: Request) -> bool:
        return True


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(BUNDLED_MODEL_DIR)


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = ServeConfig(batch_invariant=True, max_model_len=MAX_LEN, max_kv_tokens=NUM_SLOTS)
    yield build_runner(config)
    torch.set_num_threads(threads)


def make_request(
    number: int, constraint: Constraint | None, tokenizer: Tokenizer, *, temperature: float = 1.0
) -> Submit:
    prompt = tokenizer.encode(f"Number {number} of them is", add_special_tokens=True)
    return Submit(
        request_id=RequestId(number),
        prompt=[TokenSegment(token_ids=pack_int32(prompt))],
        max_tokens=MAX_TOKENS,
        eos_token_ids=list(tokenizer.eos_token_ids),
        sampling=SamplingParams(temperature=temperature, seed=number, num_logprobs=1),
        request_class=RequestClass.RT,
        age_s=0.0,
        constraint=constraint,
    )


def run(
    runner: ModelRunner, requests: list[Submit], *, num_slots: int = NUM_SLOTS
) -> tuple[Simulation, Scheduler]:
    scarce = num_slots < NUM_SLOTS
    core = Scheduler(
        SchedulerConfig(
            max_model_len=MAX_LEN,
            max_num_seqs=32,
            max_num_batched_tokens=256,
            queue_limits=dict.fromkeys(RequestClass, QueueLimits(100, 1 << 30)),
            policy=POLICIES["chunked"](),
            admission=RecklessAdmission() if scarce else ConservativeAdmission(),
            lengths=OutputLengths(max_output_tokens=MAX_LEN),
        )
    )
    simulation = Simulation(core, RunnerWorker(runner), lambda plan: 0.01, WorkersReady(num_slots))
    simulation.run(
        [
            TimedEvent(0.015 * index, FromFrontend(FrontendId(0), request))
            for index, request in enumerate(requests)
        ]
    )
    core.check_integrity()
    return simulation, core


def satisfies(text: str, constraint: Constraint) -> bool:
    match constraint:
        case JsonSchemaConstraint():
            jsonschema.validate(json.loads(text), SCHEMA)
            return True
        case RegexConstraint():
            return re.fullmatch(DATE, text) is not None
        case GrammarConstraint():
            return re.fullmatch(r"[1-9][0-9]{0,2}([+-][1-9][0-9]{0,2}){1,3}", text) is not None


def test_outputs_satisfy_their_constraints_and_preemption_changes_no_token(
    runner: ModelRunner, tokenizer: Tokenizer
) -> None:
    requests = [
        make_request(i, CONSTRAINTS[i % 4], tokenizer, temperature=0.0 if i % 3 == 0 else 1.0)
        for i in range(16)
    ]
    relaxed, _ = run(runner, requests)
    scarce, core = run(runner, requests, num_slots=450)
    assert core.num_preemptions > 0
    num_ended = 0
    for request in requests:
        key = next(k for k in relaxed.outcomes if k.request_id == request.request_id)
        outcome = relaxed.outcomes[key]
        assert scarce.outcomes[key].token_ids == outcome.token_ids
        if request.constraint is None or outcome.finish_reason is not FinishReason.STOP:
            continue
        num_ended += 1
        assert satisfies(tokenizer.decode(outcome.token_ids), request.constraint)
    assert num_ended >= 10  # of the 12 that have a constraint, all of which are short


def test_the_end_is_allowed_exactly_where_the_grammar_ends(
    runner: ModelRunner, tokenizer: Tokenizer
) -> None:
    """The model would go on, or end at once: neither is up to it."""
    (eos,) = tokenizer.eos_token_ids
    for bias in (-100.0, 100.0):
        request = make_request(0, RegexConstraint(pattern="[a-z]{7}"), tokenizer)
        sampling = SamplingParams(temperature=1.0, seed=1, logit_bias=((eos, bias),))
        simulation, _ = run(runner, [msgspec.structs.replace(request, sampling=sampling)])
        (outcome,) = simulation.outcomes.values()
        assert outcome.finish_reason is FinishReason.STOP
        assert re.fullmatch("[a-z]{7}", tokenizer.decode(outcome.token_ids))


@pytest.mark.parametrize("num_slots", [NUM_SLOTS, 100])
def test_steps_go_on_while_grammars_are_compiled(
    runner: ModelRunner, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, num_slots: int
) -> None:
    """The same tokens come, only later; the unconstrained do not notice."""
    patterns = [f"[a-z]{{100,{num_slots // 10 + number}}}" for number in range(100, 104)]
    slow = [
        make_request(i, RegexConstraint(pattern=pattern), tokenizer)
        for i, pattern in enumerate(patterns)
    ]
    short = [msgspec.structs.replace(request, max_tokens=9) for request in slow]
    free = [
        msgspec.structs.replace(make_request(len(slow) + i, None, tokenizer), max_tokens=50)
        for i in range(2)
    ]
    steps: list[StepResult] = []
    known = runner._constraints
    assert known is not None

    def send_late(request: matchers.Request) -> None:
        """As if nothing were compiled during the first steps: what began waits for its turn."""
        if isinstance(request, matchers.Update) and len(steps) < 20:
            late_ones.append(request)
            request = matchers.Update(request.left, [])
        if len(steps) >= 20:
            for late_one in late_ones:
                real_send(matchers.Update([], late_one.begun))
            late_ones.clear()
        if isinstance(request, matchers.Ask) and late_ones:
            request = matchers.Ask(request.number, [])
        real_send(request)

    def receive() -> matchers.Masks | None:
        masks = real_receive()
        num_late = sum(len(late_one.begun) for late_one in late_ones)
        if masks is None or not num_late or masks.bits:
            return masks
        num_bytes = -(-known._setup.vocab_size // 32) * 4
        return matchers.Masks(0, b"\xff" * num_bytes * num_late, (), tuple(range(num_late)))

    def execute(plan: StepPlan) -> StepResult:
        steps.append(real_execute(plan))
        return steps[-1]

    late_ones: list[matchers.Update] = []
    real_execute, real_send, real_receive = runner.execute, known._send, known._receive
    with monkeypatch.context() as patch:
        patch.setattr(known, "_send", send_late)
        patch.setattr(known, "_receive", receive)
        patch.setattr(runner, "execute", execute)
        late, _ = run(runner, short + free, num_slots=num_slots)
    at_once, core = run(runner, short + free, num_slots=num_slots)
    for key, outcome in at_once.outcomes.items():
        assert late.outcomes[key].token_ids == outcome.token_ids
        assert len(outcome.token_ids) >= 9
    assert (core.num_preemptions > 0) == (num_slots < NUM_SLOTS)
    unready = [row for step in steps[:20] for row in step.rows if not row.token_ids]
    assert len(unready) > len(slow) and all(row.error is None for row in unready)


class Text(matchers.RowMatchers):
    """Matchers whose memory is what `sizes` says of each compiled one; compiling can be held up."""

    def __init__(self, tokenizer: Tokenizer, sizes: Callable[[Constraint], int]) -> None:
        self.asked: list[Constraint] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._compiled = OrderedDict()
        super().__init__(
            model_vocabulary(tokenizer, 4096), used=lambda: sum(map(sizes, self._compiled))
        )

    def _compile(self, constraint: Constraint) -> LLMatcher:
        assert self.may_go_on.wait(60.0)
        if constraint not in self._compiled:
            self.asked.append(constraint)
        return super()._compile(constraint)

    def begin(self, *constraints: Constraint, first: int = 0, is_real_time: bool = False) -> None:
        self.update(
            [],
            [
                matchers.Begun(first + number, constraint, b"", is_real_time)
                for number, constraint in enumerate(constraints)
            ],
        )

    def are_ready(self, *rows: int) -> bool:
        """Whether the grammars of all rows are, and the compiler has nothing else to do."""
        self._compiler.submit(lambda: None).result(60.0)
        return not self.masks(rows).unready

    def cached(self) -> list[Constraint]:
        self._compiler.submit(lambda: None).result(60.0)
        return list(self._compiled)


def regexes(letters: str) -> list[Constraint]:
    return [RegexConstraint(pattern=letter) for letter in letters]


def test_what_is_kept_of_grammars_is_bounded_by_their_memory(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr(matchers, "MAX_KEPT_BYTES", 35)
    made = Text(tokenizer, lambda constraint: 10)
    for constraint in regexes("abcdefgea"):
        made.begin(constraint)
        assert made.are_ready(0)
        assert made.num_bytes <= 45, "with the one that is in use"
    assert made.asked == regexes("abcdefga"), "e was kept"
    made.update([0], [])
    assert len(made.cached()) == 3


def test_nothing_is_kept_for_rows_that_were_left(tokenizer: Tokenizer) -> None:
    """Neither compiled grammars nor compilations that wait."""
    made = Text(tokenizer, lambda constraint: 0)
    made.may_go_on.clear()
    made.begin(*regexes("abcdefgh"))
    made.update(range(7), [])
    assert list(made._rows) == [7]
    made.wait_for_any([0])
    made.may_go_on.set()
    assert made.are_ready(7)
    assert set(made.asked) <= {*regexes("a"), *regexes("h")}
    assert not made._pending


def test_what_rows_are_under_at_once_is_bounded_by_its_memory(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """More waits for its turn; rows under the same constraint share it, whatever else is kept."""
    monkeypatch.setattr(matchers, "MAX_KEPT_BYTES", 0)
    monkeypatch.setattr(matchers, "MAX_COMPILED_BYTES", 1)
    monkeypatch.setattr(matchers, "MAX_USED_BYTES", 20)
    made = Text(tokenizer, lambda constraint: 10)
    a, b, c, d = regexes("abcd")
    made.begin(a, b, is_real_time=True)
    assert made.are_ready(0, 1)
    made.begin(a, b, c, d, a, first=2, is_real_time=True)
    assert made.are_ready(*range(4)) and list(made._waiting) == [4, 5, 6]
    made.update([1, 5], [])  # one of two under b, and d, which waits
    assert list(made._waiting) == [4, 6]
    made.update([3], [])
    made.cached()
    made.update([], [])
    assert made.are_ready(4, 6) and made.asked == [a, b, c]
    made.update([0, 2, 4, 6], [])
    assert made.cached() == [] and made.num_bytes == 0
    made.begin(d, first=5)
    assert made.are_ready(5) and made.cached() == [d]


def test_constraints_of_real_time_rows_go_before_those_of_best_effort_ones(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """These leave them some room, and those that wait have their turn later."""
    monkeypatch.setattr(matchers, "MAX_COMPILED_BYTES", 10)
    monkeypatch.setattr(matchers, "MAX_USED_BYTES", 40)
    made = Text(tokenizer, lambda constraint: 10)
    made.may_go_on.clear()
    made.begin(*regexes("abcde"))
    assert list(made._waiting) == [3, 4], "three are theirs"
    made.begin(*regexes("fg"), first=5, is_real_time=True)
    assert list(made._waiting) == [3, 4, 6]
    made.update([0], [])
    assert list(made._waiting) == [3, 4]
    made.update([5, 6], [])
    assert list(made._waiting) == [4]
    made.may_go_on.set()


def test_the_grammar_that_has_grown_most_fails_where_all_have_too_much(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr(matchers, "MAX_COMPILED_BYTES", 1)
    monkeypatch.setattr(matchers, "MAX_USED_BYTES", 20)
    monkeypatch.setattr(matchers, "MAX_GROWN_BYTES", 100)
    sizes = dict.fromkeys(regexes("abc"), 9)
    made = Text(tokenizer, sizes.__getitem__)
    made.begin(*regexes("abca"))
    assert made.are_ready(0, 1, 2, 3)
    draw = made._draw

    def grow(bits: Any, matcher: LLMatcher | None) -> bool:
        sizes[by_digest[at_work[0]]] += (
            30 if at_work[0] == matchers.digest_of(regexes("b")[0]) else 1
        )
        return draw(bits, matcher)

    def note(compiled: bytes, masked: bytes) -> None:
        at_work[0] = masked

    by_digest = {matchers.digest_of(one): one for one in sizes}
    at_work = [b""]
    monkeypatch.setattr(made, "_draw", grow)
    monkeypatch.setattr(made, "_note", note)
    failed = [made.masks(range(4)).failed for _ in range(6)]
    assert failed == [()] * 3 + [(1,)] * 3
    assert made.cached() == regexes("ca")
    monkeypatch.setattr(made, "_draw", draw)
    made.update(range(4), [])
    sizes.update(dict.fromkeys(sizes, 9))
    made.begin(*regexes("b"))
    assert made.are_ready(0) and not made.masks([0]).failed, "compiled anew"


def sequence(number: int, constraint: Constraint) -> AddSequence:
    return AddSequence(
        RowId(number),
        [TokenSegment(token_ids=pack_int32([1]))],
        SamplingParams(),
        num_prompt_tokens=1,
        eos_token_ids=[2],
        constraint=constraint,
    )


def masks_of(enforcer: constraints.RowConstraints, *rows: int) -> constraints.StepMasks:
    """The masks of rows, as soon as the grammars of all that have one are ready."""
    while True:
        step = enforcer.begin([RowId(row) for row in rows], LENGTHS.copy, lambda *_: [])
        assert step is not None
        if not (masks := step()).unready:
            return masks
        enforcer.wait_for_any([RowId(row) for row in rows])


@pytest.mark.parametrize("moment", [0, 1], ids=["while it compiles", "while it draws"])
def test_a_process_that_ends_fails_what_it_was_at_alone(tokenizer: Tokenizer, moment: int) -> None:
    """All other rows go on behind the tokens that they have."""
    enforcer = constraints.RowConstraints(BUNDLED_MODEL_DIR, 4096)
    try:
        enforcer.update([], [sequence(n, c) for n, c in enumerate(regexes("abab"))])
        first = masks_of(enforcer, 0, 1, 2, 3)
        assert first.allowed is not None and not first.failed
        drawn = [int(row.nonzero()[0, 0]) for row in first.allowed]
        before = enforcer._process.pid
        enforcer.advance(list(LENGTHS), drawn, frozenset(), frozenset(LENGTHS))
        other = masks_of(enforcer, 0, 1, 2, 3)
        at_work = [matchers.NOTHING, matchers.NOTHING]
        at_work[moment] = matchers.digest_of(regexes("b")[0])
        os.pwrite(enforcer._at_work, constraints.AT_WORK.pack(*at_work), 0)
        enforcer._process.kill()
        enforcer._process.wait()
        after = masks_of(enforcer, 0, 1, 2, 3)
        assert enforcer._process.pid != before
        assert after.failed == {1, 3}, "the rows under it"
        assert other.allowed is not None and after.allowed is not None
        for row in (0, 2):
            assert torch.equal(after.allowed[row], other.allowed[row])
        enforcer.update([RowId(1)], [sequence(1, regexes("c")[0]), sequence(4, regexes("b")[0])])
        assert masks_of(enforcer, 0, 1, 2).failed == frozenset()
        assert masks_of(enforcer, 0, 4).failed == {1}, "it ends no second process"
    finally:
        enforcer.close()


SMALL = regexes("a")[0]
LARGE = JsonSchemaConstraint(
    schema=json.dumps(
        {"prefixItems": [{"type": "integer", "multipleOf": 9000 + n} for n in range(12)]}
        | {"type": "array", "minItems": 12}
    )
)
LIMITED = "from lightserve.worker import matchers; matchers.MAX_BYTES = {} * 2**20; matchers.main()"


@pytest.mark.parametrize(
    ("limit_mib", "killer", "has_left"),
    long_but(
        itertools.product([32, 1024], [0, 1], [False, True]),
        [(32, 0, False), (32, 1, True), (1024, 0, True), (1024, 1, False)],  # all pairs
    ),
)
def test_of_two_constraints_at_work_the_killer_alone_is_blamed(
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    limit_mib: int,
    killer: int,
    has_left: bool,
) -> None:
    """With 32 MiB it dies alone, with 1024 it is the larger one: memory fails whichever thread asks
    for it. And a client may leave before its row's process does, and its row be another's by then.
    """
    enforcer = constraints.RowConstraints(BUNDLED_MODEL_DIR, 4096)
    try:
        enforcer.update([], [sequence(0, SMALL), sequence(1, LARGE), sequence(2, SMALL)])
        masks_of(enforcer, 0, 1, 2)
        command = (sys.executable, "-P", "-c", LIMITED.format(limit_mib))
        monkeypatch.setattr(constraints, "COMMAND", command)
        at_work = [matchers.digest_of(one) for one in (SMALL, LARGE)]
        if has_left:
            enforcer.update([RowId(1)], [sequence(1, regexes("c")[0])])
        os.pwrite(enforcer._at_work, constraints.AT_WORK.pack(*at_work[:: 1 - 2 * killer]), 0)
        enforcer._process.kill()
        enforcer._process.wait()
        assert masks_of(enforcer, 0, 1, 2).failed == (frozenset() if has_left else {1})
        assert list(enforcer._guilty) == at_work[1:]
        enforcer.update([], [sequence(3, LARGE)])
        assert masks_of(enforcer, 0, 3).failed == {1}, "it ends no second process"
    finally:
        enforcer.close()


def test_a_process_that_does_not_answer_is_at_the_mask_that_takes_so_long(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    enforcer = constraints.RowConstraints(BUNDLED_MODEL_DIR, 4096)
    try:
        a, b = regexes("ab")
        enforcer.update([], [sequence(0, a), sequence(1, b)])
        masks_of(enforcer, 0, 1)
        os.kill(enforcer._process.pid, signal.SIGSTOP)
        at_work = map(matchers.digest_of, (a, b))
        os.pwrite(enforcer._at_work, constraints.AT_WORK.pack(*at_work), 0)
        enforcer._link.settimeout(0.01)
        assert masks_of(enforcer, 0, 1).failed == {1}
    finally:
        enforcer.close()


def test_tokens_beyond_the_model_are_none_of_a_grammar_either(tmp_path: Path) -> None:
    """The process reads the same vocabulary as frontends do."""
    for name in BUNDLED_MODEL_DIR.glob("*.json"):
        shutil.copy(name, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    said = json.loads(path.read_text()) if path.exists() else {}
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    beyond = {"content": "<|beyond|>", "special": True, **flags}
    path.write_text(json.dumps({**said, "added_tokens_decoder": {"5000": beyond}}))
    enforcer = constraints.RowConstraints(tmp_path, 4096)
    try:
        enforcer.update([], [sequence(0, regexes("a")[0])])
        process = enforcer._process
        assert not masks_of(enforcer, 0).failed
        assert enforcer._process is process
    finally:
        enforcer.close()


def test_what_rows_drew_does_not_wait_for_their_grammars(tokenizer: Tokenizer) -> None:
    """A process that ends in a step has none of them yet in its successor."""
    made = Text(tokenizer, lambda constraint: 0)
    made.may_go_on.clear()
    made.begin(*regexes("ab"))
    told = threading.Thread(target=made.advance, args=([0, 1], [5, 5]), daemon=True)
    told.start()
    told.join(60.0)
    made.may_go_on.set()
    assert not told.is_alive()


def test_a_process_that_breaks_down_does_not_compile_on(tokenizer: Tokenizer) -> None:
    """Its worker waits for it to end."""
    enforcer = constraints.RowConstraints(BUNDLED_MODEL_DIR, 4096)
    try:
        schemas = [{"type": "integer", "multipleOf": 9_900 + number} for number in range(24)]
        large = [JsonSchemaConstraint(schema=json.dumps(schema)) for schema in schemas]
        enforcer.update([], [sequence(number, one) for number, one in enumerate(large)])

        def compiled() -> bytes:
            at_work: tuple[bytes, bytes] = constraints.AT_WORK.unpack(
                os.pread(enforcer._at_work, 32, 0)
            )
            return at_work[0]

        while compiled() == matchers.NOTHING:
            assert enforcer._process.poll() is None
            time.sleep(0.001)
        enforcer._link.sendall(constraints.HEADER.pack(1) + b"\xc1")  # no request
        assert enforcer._process.wait(60.0) == 1
        assert compiled() in map(matchers.digest_of, large[:-1]), "it was at one of the first"
    finally:
        enforcer.close()


def test_a_compilation_s_time_is_its_own(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """Masks of others, which may take much, are none of it."""
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(matchers, "MAX_COMPILE_S", 0.2)
    made = Text(tokenizer, lambda constraint: 0)
    made.may_go_on.clear()
    made.begin(*regexes("a"))
    while made._compiling == matchers.NOTHING:
        time.sleep(0.001)
    until_s = time.thread_time() + 0.5
    while time.thread_time() < until_s:
        pass
    made.check_time()
    assert not ends
    made._compiling_since_s -= 1.0  # as if it had computed so long
    made.check_time()
    assert ends == [1]
    made.may_go_on.set()


def test_rows_begin_as_soon_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """What is compiled takes less than was kept for it: no row has to come or go."""
    monkeypatch.setattr(matchers, "MAX_COMPILED_BYTES", 10)
    monkeypatch.setattr(matchers, "MAX_USED_BYTES", 20)
    made = Text(tokenizer, lambda constraint: 1)
    made.may_go_on.clear()
    made.begin(*regexes("abc"), is_real_time=True)
    assert list(made._waiting) == [2]
    made.may_go_on.set()
    made.cached()
    assert not made.masks([0, 1]).unready and not made._waiting
    assert made.are_ready(0, 1, 2)


def test_grammars_leave_a_worker_s_memory_as_it_is(tokenizer: Tokenizer) -> None:
    """However large they are, and however many: so is their process's, but for what it may keep."""
    own = psutil.Process()
    enforcer = constraints.RowConstraints(BUNDLED_MODEL_DIR, 4096)
    try:
        enforcer.update([], [sequence(0, regexes("a")[0])])
        masks_of(enforcer, 0)
        process = psutil.Process(enforcer._process.pid)
        before, theirs = own.memory_info().rss, process.memory_info().rss
        for number in range(40):
            schema = {"type": "integer", "multipleOf": 9_900 + number}
            large = JsonSchemaConstraint(schema=json.dumps(schema))
            regex = RegexConstraint(pattern=f"a{{19{number:03}}}")
            enforcer.update([], [sequence(1, large), sequence(2, regex)])
            masks_of(enforcer, 1, 2)
            most = matchers.MAX_KEPT_BYTES + 2 * MAX_COMPILED_BYTES
            assert process.memory_info().rss - theirs <= most
        assert own.memory_info().rss - before <= 32 * MiB
    finally:
        enforcer.close()


def test_a_grammar_that_fails_ends_its_own_row_alone(
    runner: ModelRunner, tokenizer: Tokenizer
) -> None:
    """No frontend would have sent it; neighbours draw the tokens that they draw without it."""
    good = [make_request(1, CONSTRAINTS[0], tokenizer), make_request(2, None, tokenizer)]
    bad = make_request(0, GrammarConstraint(grammar="start: nothing"), tokenizer)
    alone, _ = run(runner, good)
    beside, _ = run(runner, [bad, *good])
    for key, outcome in beside.outcomes.items():
        if key.request_id == bad.request_id:
            assert outcome.error is ErrorCode.CONSTRAINT_FAILED
        else:
            assert outcome.token_ids == alone.outcomes[key].token_ids
