"""The steps that take the most memory beside weights and KV: run once, before the pool is sized.

They name positions that nobody has filled: tables are zero there, so every token is token 0 with
its KV in slot 0. What comes out means nothing; what it takes is what the real ones take.
"""

from __future__ import annotations

from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.router_worker import AddSequence, OutputKind, PlanRow, StepPlan
from lightserve.types import RowId, SamplingParams, StepId

EVERYTHING = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    num_logprobs=20,
)
"""Every option whose work grows with the vocabulary."""


def largest_steps(
    *, max_num_batched_tokens: int, max_num_seqs: int, context_len: int, num_kv_tokens: int
) -> list[StepPlan]:
    """Return the largest steps that a router would plan.

    Args:
        max_num_batched_tokens: new tokens of a step.
        max_num_seqs: rows of a step.
        context_len: longest sequence.
        num_kv_tokens: more than all sequences of a step hold, however large the pool will be.

    Returns:
        As many rows as there can be with as many tokens as there can be, spread evenly; as many
        decodes, of contexts as long as they can be; and one row with all the tokens, at the end
        of the longest context. All rows have logits and every option of sampling.
    """
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    each, rest = divmod(max_num_batched_tokens, num_rows)
    longest = max(1, min(context_len - 1, num_kv_tokens))
    shared = max(1, min(longest, num_kv_tokens // num_rows))
    prefills = [(0, min(longest, each + (row < rest))) for row in range(num_rows)]
    decodes = [(shared - 1, 1)] * num_rows
    chunk = min(longest, max_num_batched_tokens)
    return [_step(prefills), _step(decodes), _step([(longest - chunk, chunk)])]


def _step(rows: list[tuple[int, int]]) -> StepPlan:
    """Return a step of rows (first position, number of tokens), all of which sample."""
    known = [TokenSegment(token_ids=pack_int32([0]))]
    return StepPlan(
        step_id=StepId(0),
        sequences=[
            AddSequence(RowId(row), known, EVERYTHING, num_prompt_tokens=1, eos_token_ids=[])
            for row in range(len(rows))
        ],
        slot_ranges=[],
        rows=[
            PlanRow(RowId(row), start, count, OutputKind.SAMPLE)
            for row, (start, count) in enumerate(rows)
        ],
    )
