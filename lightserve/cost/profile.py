"""Profiles of workers' step times, and the directory in which they are kept (versioned JSON).

A profile belongs to one model, type, device and way to run: its key. One that cannot be read,
is of another version or of another key is as good as none.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import tempfile
from pathlib import Path

import msgspec

from lightserve.messages.step_cost import StepCoefficients

SCHEMA_VERSION = 2
MAX_MEDIAN_ERROR = 0.35
"""A profile that is further off than this in the median, on shapes that it was not fitted to, was
measured amid other work: the router had better learn while it serves."""
_MAX_BYTES = 1 << 20

log = logging.getLogger(__name__)


class ProfileKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What step times depend on besides shapes."""

    model_hash: str
    """Of the model's config.json."""
    dtype: str
    device: str
    tp: int
    num_threads: int
    kernels: str

    @property
    def digest(self) -> str:
        """Hash of all of it: the name of the file."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class StepProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured, in a file of its own."""

    schema_version: int
    lightserve_version: str
    model: str
    """Its name, for people."""
    key: ProfileKey
    coefficients: StepCoefficients
    kv_bytes_per_token: int
    """Of all layers, on all ranks."""
    num_samples: int
    median_error: float
    """Relative, of shapes that were not fitted."""
    p95_error: float


class _Versioned(msgspec.Struct, frozen=True):
    """What files of all versions have."""

    schema_version: int


def cache_dir() -> Path:
    """Return where profiles are kept: XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path there is to be ignored, says the XDG base directory specification.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "lightserve" / "profiles"


def cached_path(key: ProfileKey, directory: Path | None = None) -> Path:
    """Return the file of a key's profile."""
    return (directory or cache_dir()) / f"{key.digest}.json"


def load_profile(path: Path, key: ProfileKey) -> StepProfile | None:
    """Return a key's profile; None, with a warning if there is such a file, if it is no use."""
    try:
        profile = read_profile(path)
        reason = _refusal(profile.key, key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = str(error)
    if reason:
        log.warning("profile %s is ignored: %s", path, reason)
        return None
    return profile


def read_profile(path: Path) -> StepProfile:
    """Return the profile in a file, whatever it belongs to. Raises OSError, ValueError."""
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    try:
        version = msgspec.json.decode(data, type=_Versioned).schema_version
        if version != SCHEMA_VERSION:
            raise ValueError(f"schema version {version}, not {SCHEMA_VERSION}")
        profile = msgspec.json.decode(data, type=StepProfile)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
    values = msgspec.structs.astuple(profile.coefficients)
    if not all(math.isfinite(value) and value >= 0 for value in values) or sum(values) == 0:
        raise ValueError("coefficients that no worker has")
    return profile


def save_profile(profile: StepProfile, path: Path) -> None:
    """Write a profile; readers see the old file or the new one, whole. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _refusal(its: ProfileKey, key: ProfileKey) -> str:
    """Return why a profile does not serve, or nothing."""
    for name in ProfileKey.__struct_fields__:
        theirs, ours = getattr(its, name), getattr(key, name)
        if theirs != ours:
            return f"its {name} is {theirs!r}, this server's is {ours!r}"
    return ""
