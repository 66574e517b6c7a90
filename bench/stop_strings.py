"""Forced tokens that split characters and stop strings across tokens, many cases.

    python bench/stop_strings.py [--cases 10000]

Each case is an output (parts of characters and invalid bytes among its tokens), up to four stop
strings, a way of cutting it into deltas and of lagging behind. Checked: deltas joined equal the
whole text up to the stop string, usage and end are exact, the router is told once where it ended.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, settings

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.stop_streams import CASES, Case, StopStreams, expected_of


def main() -> None:
    """Run; the first case that fails ends it with an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    args = parser.parse_args()
    streams = StopStreams()
    kinds: Counter[str] = Counter()

    @settings(
        max_examples=args.cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(CASES)
    def check(case: Case) -> None:
        kinds["cases"] += 1
        kinds["ended by a stop string"] += expected_of(case).stop is not None
        streams.check(case)

    start_s = time.perf_counter()
    check()
    print(f"{dict(kinds)}, all as they must be, in {time.perf_counter() - start_s:.0f} s")


if __name__ == "__main__":
    main()
