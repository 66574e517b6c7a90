"""Print what bench/load_test.py needs, as pyproject.toml declares it: one requirement per line.

That is the extra `bench` and, of the server's own dependencies, the few that the load client
shares; installing the package itself would bring torch.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

SHARED = {"click", "msgspec", "numpy"}


def requirements(pyproject: str) -> list[str]:
    """Return the requirements in a text of pyproject.toml."""
    project = tomllib.loads(pyproject)["project"]
    shared = [
        requirement
        for requirement in project["dependencies"]
        if re.split(r"[^A-Za-z0-9_.-]", requirement)[0] in SHARED
    ]
    return [*shared, *project["optional-dependencies"]["bench"]]


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]).read_text())))
