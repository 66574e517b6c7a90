"""What /debug/kv answers, for the OpenAPI schema; a test holds real answers against it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lightserve.frontend.json_body import StrictModel

_Count = Annotated[int, Field(ge=0)]


class KindCounts(StrictModel):
    """Slots of each kind; together all slots."""

    free: _Count
    rt: _Count
    be: _Count
    cached: _Count
    checkpointed: _Count


class ClassSlotsObject(StrictModel):
    """What the requests of one class have in the pool; slots of both classes are real-time's."""

    num_requests: _Count
    num_slots: _Count
    num_checkpointed_slots: _Count


class ClassesObject(StrictModel):
    """Every class."""

    rt: ClassSlotsObject
    be: ClassSlotsObject


class KVMapObject(StrictModel):
    """The answer of /debug/kv."""

    num_slots: int = Field(ge=1)
    block_size: int = Field(ge=1)
    counts: KindCounts
    classes: ClassesObject
    num_free_blocks: _Count
    num_shared_blocks: _Count
    mean_run_length: float = Field(ge=0)
    num_host_slots: _Count
    num_used_host_slots: _Count
    kinds: list[str]
    slots: list[tuple[Annotated[int, Field(ge=0, le=4)], Annotated[int, Field(ge=1)]]] | None
