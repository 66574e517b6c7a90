"""What a server has to stand: wrong input, clients that leave, crowds, floods.

    python bench/abuse.py {input,parsing,storm,crowd,overload,schema,all}

Each starts a server of its own with the bundled model (`parsing` none), prints figures beside their
targets and the time it took, and ends with code 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping

from abuse_parts import bad_input, crowd, overload, parsing, schema, storm

PARTS: Mapping[str, Callable[[], bool]] = {
    "input": bad_input.run,
    "parsing": parsing.run,
    "storm": storm.run,
    "crowd": crowd.run,
    "overload": overload.run,
    "schema": schema.run,
}


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=[*PARTS, "all"])
    part = parser.parse_args().part
    missed = []
    for name in PARTS if part == "all" else [part]:
        start_s = time.monotonic()
        if not PARTS[name]():
            missed.append(name)
        print(f"  ({time.monotonic() - start_s:.0f} s)\n", flush=True)
    if missed:
        print("targets missed: " + ", ".join(missed), file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
