"""Print what clients need, as pyproject.toml declares it: one requirement per line.

    python requirements/clients.py pyproject.toml [EXTRA ...]

That is what the extras name (by default `bench`, for `lightserve bench`) and, of the server's own
dependencies, the few that clients share; installing the package itself would bring torch.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

SHARED = {"click", "msgspec", "numpy"}


def requirements(pyproject: str, extras: Sequence[str] = ("bench",)) -> list[str]:
    """Return the requirements in a text of pyproject.toml, each once."""
    project = tomllib.loads(pyproject)["project"]
    shared = [
        requirement
        for requirement in project["dependencies"]
        if re.split(r"[^A-Za-z0-9_.-]", requirement)[0] in SHARED
    ]
    of_extras = [line for extra in extras for line in project["optional-dependencies"][extra]]
    return list(dict.fromkeys([*shared, *of_extras]))


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]).read_text(), sys.argv[2:] or ("bench",))))
