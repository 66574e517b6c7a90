"""Constraints through the real core and the real model: every output satisfies its own, whatever
else runs beside it, and recomputation changes no token."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Iterator

import jsonschema
import msgspec
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from support.processes import wait_for

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
from lightserve.router.events import FromFrontend
from lightserve.router.from_submit import QueueLimits
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies import POLICIES
from lightserve.router.request import Request
from lightserve.router.scheduler import Scheduler
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.structured import compile_matcher, kept_bytes, model_vocabulary
from lightserve.tokenization.tokenizer import Tokenizer
from lightserve.types import (
    FinishReason,
    FrontendId,
    RequestClass,
    RequestId,
    RowId,
    SamplingParams,
)
from lightserve.worker import constraints
from lightserve.worker.engine import build_runner
from lightserve.worker.model_runner import ModelRunner

NUM_SLOTS, MAX_LEN, MAX_TOKENS = 2400, 512, 240
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
    simulation = Simulation(core, RunnerWorker(runner), lambda plan: 0.01, num_slots=num_slots)
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
    num_compiled_at: list[int] = []

    def compile_late(constraint: Constraint, vocabulary: LLTokenizer) -> LLMatcher:
        wait_for(lambda: len(steps) >= 20, "twenty steps")
        num_compiled_at.append(len(steps))
        return compile_matcher(constraint, vocabulary)

    def execute(plan: StepPlan) -> StepResult:
        steps.append(real_execute(plan))
        return steps[-1]

    real_execute = runner.execute
    with monkeypatch.context() as patch:
        patch.setattr(constraints, "compile_matcher", compile_late)
        patch.setattr(runner, "execute", execute)
        late, _ = run(runner, short + free, num_slots=num_slots)
    assert len(num_compiled_at) >= len(slow) and min(num_compiled_at) >= 20
    at_once, core = run(runner, short + free, num_slots=num_slots)
    for key, outcome in at_once.outcomes.items():
        assert late.outcomes[key].token_ids == outcome.token_ids
        assert len(outcome.token_ids) >= 9
    assert (core.num_preemptions > 0) == (num_slots < NUM_SLOTS)
    unready = [row for step in steps[:20] for row in step.rows if not row.token_ids]
    assert len(unready) > len(slow) and all(row.error is None for row in unready)


def test_what_is_kept_of_grammars_is_bounded_by_their_size(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    compiled: list[Constraint] = []

    def noting(constraint: Constraint, vocabulary: LLTokenizer) -> LLMatcher:
        compiled.append(constraint)
        return compile_matcher(constraint, vocabulary)

    monkeypatch.setattr(constraints, "compile_matcher", noting)
    enforcer = constraints.RowConstraints(model_vocabulary(tokenizer, 4096))
    large = [RegexConstraint(pattern=letter * 8000) for letter in "abcdefghijklmnop"]
    small = [RegexConstraint(pattern=f"small {number}") for number in range(60)]
    for constraint in (*large, *small, large[-1], large[0], small[-1]):
        sequence = AddSequence(
            RowId(0),
            [TokenSegment(token_ids=pack_int32([1]))],
            SamplingParams(),
            num_prompt_tokens=1,
            eos_token_ids=[2],
            constraint=constraint,
        )
        enforcer.update([], [sequence])
        masks = enforcer.begin([RowId(0)])
        while masks is not None and masks().unready:
            enforcer.wait_for_any([RowId(0)])
            masks = enforcer.begin([RowId(0)])
        kept = sum(map(kept_bytes, enforcer._compiled))
        assert kept == enforcer._num_kept_bytes <= constraints.MAX_KEPT_BYTES
    assert compiled[len(large) + len(small) :] == [large[0]]  # the others were kept


def test_nothing_is_kept_for_rows_that_were_left(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """Neither compiled grammars nor compilations that wait."""
    compiled: list[Constraint] = []
    may_go_on = threading.Event()

    def slow(constraint: Constraint, vocabulary: LLTokenizer) -> LLMatcher:
        compiled.append(constraint)
        assert may_go_on.wait(60.0)
        return compile_matcher(constraint, vocabulary)

    monkeypatch.setattr(constraints, "compile_matcher", slow)
    enforcer = constraints.RowConstraints(model_vocabulary(tokenizer, 4096))
    rows = [RowId(number) for number in range(8)]
    sequences = [
        AddSequence(
            row,
            [TokenSegment(token_ids=pack_int32([1]))],
            SamplingParams(),
            num_prompt_tokens=1,
            eos_token_ids=[2],
            constraint=RegexConstraint(pattern=f"row {row}"),
        )
        for row in rows
    ]
    enforcer.update([], sequences)
    enforcer.update(rows[:-1], [])
    assert enforcer.among(rows) == {rows[-1]}
    enforcer.wait_for_any(rows[:1])
    may_go_on.set()
    enforcer._rows[rows[-1]].matcher.result(60.0)
    assert compiled == [sequences[0].constraint, sequences[-1].constraint]


def test_what_rows_are_under_at_once_is_bounded_by_its_size(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """More waits for its turn; rows under the same constraint share it, whatever else is kept."""
    compiled: list[Constraint] = []

    def noting(constraint: Constraint, vocabulary: LLTokenizer) -> LLMatcher:
        compiled.append(constraint)
        return compile_matcher(constraint, vocabulary)

    def are_ready(*rows: RowId) -> bool:
        enforcer.wait_for_any(rows)
        masks = enforcer.begin(rows)
        return masks is None or not masks().unready

    monkeypatch.setattr(constraints, "compile_matcher", noting)
    monkeypatch.setattr(constraints, "MAX_KEPT_BYTES", 0)
    monkeypatch.setattr(constraints, "MAX_USED_BYTES", 2000)
    enforcer = constraints.RowConstraints(model_vocabulary(tokenizer, 4096))
    a, b, c, d = (RegexConstraint(pattern=letter * 900) for letter in "abcd")
    sequences = [
        AddSequence(
            RowId(number),
            [TokenSegment(token_ids=pack_int32([1]))],
            SamplingParams(),
            num_prompt_tokens=1,
            eos_token_ids=[2],
            constraint=constraint,
            is_real_time=True,
        )
        for number, constraint in enumerate((a, b, a, b, c, d, a))
    ]
    rows = [sequence.row for sequence in sequences]
    enforcer.update([], sequences)
    wait_for(lambda: are_ready(*rows[:4]), "the first four")
    assert not any(are_ready(row) for row in rows[4:])
    enforcer.update([rows[1], rows[5]], [])  # one of two under b, and d, which waits
    assert not any(are_ready(row) for row in (rows[4], rows[6]))
    enforcer.update([rows[3]], [])
    wait_for(lambda: are_ready(rows[4], rows[6]), "c, and a behind it")
    assert compiled == [a, b, c]
    enforcer.update(rows, [])
    enforcer.update([], [sequences[5]])
    wait_for(lambda: are_ready(rows[5]), "d")
    assert list(enforcer._compiled) == [d]


def test_constraints_of_real_time_rows_go_before_those_of_best_effort_ones(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """These leave them some room, and those that wait have their turn later."""
    monkeypatch.setattr(constraints, "MAX_USED_BYTES", 4000)
    enforcer = constraints.RowConstraints(model_vocabulary(tokenizer, 4096))

    def sequence(number: int, *, is_real_time: bool = False) -> AddSequence:
        return AddSequence(
            RowId(number),
            [TokenSegment(token_ids=pack_int32([1]))],
            SamplingParams(),
            num_prompt_tokens=1,
            eos_token_ids=[2],
            constraint=RegexConstraint(pattern="abcdefgh"[number] * 900),
            is_real_time=is_real_time,
        )

    enforcer.update([], [sequence(number) for number in range(5)])
    assert list(enforcer._waiting) == [3, 4], "3000 bytes are theirs"
    enforcer.update([], [sequence(5, is_real_time=True), sequence(6, is_real_time=True)])
    assert list(enforcer._waiting) == [3, 4, 6]
    enforcer.update([RowId(0)], [])
    assert list(enforcer._waiting) == [3, 4]
    enforcer.update([RowId(5), RowId(6)], [])
    assert list(enforcer._waiting) == [4]


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
