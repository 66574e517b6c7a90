"""Measured configurations of kernels, kept beside the profiles of step times (versioned JSON).

One file per GPU model, Triton version and version of the kernels. One that cannot be read or is of
another version is as good as none: it is measured anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import msgspec

from lightserve import __version__
from lightserve.cost.profile import cache_dir

SCHEMA_VERSION = 1
_MAX_BYTES = 1 << 20

log = logging.getLogger(__name__)


class TuningKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What measured configurations belong to."""

    gpu: str
    triton_version: str
    kernel_version: int
    """Raised whenever a kernel changes so that others may be faster."""

    @property
    def digest(self) -> str:
        """Hash of all of it: the name of the file."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fastest configuration of one kind of work."""

    work: str
    """Kernel and shape class (see `tuning.Work.name`)."""
    config: dict[str, int]
    time_us: float
    """Geometric mean over what was measured."""
    default_time_us: float
    """Of the built-in configuration; 0: it does not run here."""


class TuningFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All choices for one key."""

    schema_version: int
    lightserve_version: str
    key: TuningKey
    choices: list[Choice]


def tuning_path(key: TuningKey, directory: Path | None = None) -> Path:
    """Return the file of a key."""
    return (directory or cache_dir().parent / "kernels") / f"{key.digest}.json"


def load_choices(path: Path, key: TuningKey) -> dict[str, Choice]:
    """Return a key's choices by work; none, with a warning if there is such a file, if no use."""
    try:
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(_MAX_BYTES + 1), type=TuningFile)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("measured kernel configurations %s are ignored: %s", path, error)
        return {}
    if found.schema_version != SCHEMA_VERSION or found.key != key:
        log.warning("measured kernel configurations %s are ignored: of %s", path, found.key)
        return {}
    return {choice.work: choice for choice in found.choices}


def save_choices(path: Path, key: TuningKey, choices: dict[str, Choice]) -> None:
    """Write a key's choices; readers see the old file or the new one, whole. Raises OSError."""
    content = TuningFile(SCHEMA_VERSION, __version__, key, list(choices.values()))
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
