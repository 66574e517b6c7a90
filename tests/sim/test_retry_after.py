"""`Retry-After` against the wait that comes, at three backlogs of both classes."""

from __future__ import annotations

import pytest

from bench.scheduling.retry_after import BE, RT, Scene, play
from lightserve.types import RequestClass


@pytest.mark.parametrize(("request_class", "backlogs"), [(RT, (40, 80, 160)), (BE, (20, 50, 100))])
def test_it_is_within_half_of_the_wait(
    request_class: RequestClass, backlogs: tuple[int, ...]
) -> None:
    """Of a request that would have been let in, and of the client that comes when it is told to."""
    waits = [play(Scene(request_class, n, scale=0.1, warm_s=15.0)) for n in backlogs]
    assert all(waited.is_within_half for waited in waits), waits
    assert waits[0].measured_s > 1.5 and waits[2].measured_s > 4 * waits[0].measured_s


def test_what_was_seen_corrects_it() -> None:
    """The same queue, filled again while it drains: the prediction becomes better."""
    first = play(Scene(BE, 60, "cold", scale=0.1))
    later = play(Scene(BE, 60, "later", scale=0.1, warm_s=15.0))
    off = [abs(waited.predicted_s / waited.measured_s - 1) for waited in (first, later)]
    assert later.is_within_half and off[1] < 0.5 * off[0]
