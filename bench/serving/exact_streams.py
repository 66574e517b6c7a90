"""Exactness of streams: forced outputs whose characters and stop strings are cut anywhere.

    python -m bench.serving.exact_streams [--cases 10000]

Each case is answered six times: streamed and whole, with 0, 5 and 50 ms (of virtual time) between
router and frontend, news merged at will. Text, finish reason, log-probabilities, usage and what
the router is told must be what a naive search of the whole output says. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import time

from hypothesis import HealthCheck, given, settings
from support.forced_streams import (
    LAGS_S,
    ForcedCase,
    ForcedFrontend,
    forced_cases,
)

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.models.config import load_model_config


def main() -> None:
    """Run the cases and print how many there were."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=10_000)
    num_cases: int = parser.parse_args().cases
    start_s = time.monotonic()
    num_run = num_stopped = 0
    with ForcedFrontend() as forced:
        vocab_size = load_model_config(BUNDLED_MODEL_DIR).vocab_size

        @given(forced_cases(forced.tokenizer, vocab_size=vocab_size))
        @settings(
            max_examples=num_cases,
            deadline=None,
            database=None,
            suppress_health_check=[*HealthCheck],
        )
        def check(case: ForcedCase) -> None:
            nonlocal num_run, num_stopped
            num_stopped += forced.check(case)
            num_run += 1

        check()
    print(f"cases {num_run}, of these ended by a stop string {num_stopped}, different 0")
    print(f"answers {num_run * 2 * len(LAGS_S)}, seconds {time.monotonic() - start_s:.0f}")


if __name__ == "__main__":
    main()
