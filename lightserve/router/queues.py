"""Names of the queue and the rows for those who look for them here."""

from __future__ import annotations

from lightserve.router.queue import Backlog as Backlog  # noqa: PLC0414
from lightserve.router.queue import WaitingQueue as WaitingQueue  # noqa: PLC0414
from lightserve.router.rows import RowTable as RowTable  # noqa: PLC0414
