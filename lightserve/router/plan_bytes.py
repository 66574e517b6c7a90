"""How large a step's plan is on the wire, as far as it is known before the plan is made.

What requests that begin or resume bring along (their tokens, slots and parameters) is the part
that nothing else bounds: a prompt whose prefix is cached computes one token and carries all of it.
A plan takes newcomers up to `MAX_NEWCOMER_BYTES`, or a larger one beside a few. The rest of a plan
fits into `REST_BYTES`: rows, slots of new tokens, and what is taken from others for these tokens.
What is taken for newcomers is at most a token for each of theirs, and one victim more than enough.
"""

from __future__ import annotations

from lightserve.messages.router_worker import MAX_PLAN_BYTES
from lightserve.router.request import Request

MAX_NEWCOMER_BYTES = 4 * 1024 * 1024
"""Of those that begin in one step, but for a large one beside a few: also a bound on the time that
the router and the workers spend on them between two steps, in the router up to 20 ms."""
ROW_BYTES = 40
"""A `PlanRow` and the `SlotRange` of its new tokens, without these."""
FEW_NEWCOMER_BYTES = 512 * 1024
"""Beside so much one of any size may begin: where small ones come with every step it would never
have a step for itself."""
SEQUENCE_BYTES = 256
"""The same of a newcomer, with its `AddSequence` and its second range, and all parameters of one
number each."""
SLOT_BYTES = TOKEN_BYTES = 4
COPY_BYTES = 8
"""A token that is copied: its slot in the pool, and that on the host."""
REST_BYTES = 32 * 1024 * 1024
"""`ROW_BYTES` for 65,536 rows, slots and copies of 1,048,576 new tokens, copies ahead."""


def newcomer_bytes(request: Request) -> int:
    """Return what a waiting request takes at most if it begins or resumes in a step.

    For one that stays paused and loads beside the step, more than enough.
    """
    num_known = request.num_known_tokens
    return (
        SEQUENCE_BYTES
        + request.parameters.num_plan_bytes
        + (TOKEN_BYTES + SLOT_BYTES) * num_known
        + COPY_BYTES * request.num_loaded_by_start
    )


def most_tokens_in_plans(request: Request, max_model_len: int) -> int:
    """Return how many tokens a request may have so that a plan can hold it all its life.

    With all its KV on the host, room made for all of it, and a victim that loses all; beside the
    few that it may begin with, and what is taken for these.
    """
    room = MAX_PLAN_BYTES - REST_BYTES - COPY_BYTES * max_model_len - 2 * FEW_NEWCOMER_BYTES
    room -= SEQUENCE_BYTES + request.parameters.num_plan_bytes
    return max(0, room // (TOKEN_BYTES + SLOT_BYTES + 2 * COPY_BYTES))
