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

from lightserve.config import ServeConfig
from lightserve.cost.model import StepModel, StepShape
from lightserve.messages.common import GraphSizes, StepCoefficients
from lightserve.messages.images import EncoderWork

log = logging.getLogger(__name__)

SCHEMA_VERSION = 2
MAX_MEDIAN_ERROR = 0.35
"""A profile that is further off than this in the median, on shapes that it was not fitted to, was
measured amid other work: the router had better learn while it serves."""
MAX_CROWDING = 0.25
"""Share of the cores of the measured threads that other processes may have had."""
SLOWER = 1.1
"""A profile whose steps take this many times as long as a cached one's was measured amid other
work: that never makes steps faster."""
_GOOD_ERROR = 0.15
"""A cached profile that is off by more may be too fast by chance: a better fit takes its place."""
_REFERENCE_STEPS = (
    [(200, 1)],
    [(200, 1)] * 8,
    [(200, 1)] * 32,
    [(0, 64)],
    [(0, 512)],
    [(200, 1)] * 8 + [(512, 256)],
)
"""By which two profiles are compared: first position and number of tokens of each row."""
_MAX_BYTES = 1 << 20


class ProfileKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The facts that step times depend on, besides shapes."""

    model_hash: str
    """Hash of the model's config.json."""
    dtype: str
    device: str
    tp: int
    num_threads: int
    kernels: str

    @property
    def device_type(self) -> str:
        """Say "cpu" or "cuda": of a GPU alone `DeviceFacts.summary` says which CUDA it has."""
        return "cuda" if ", CUDA " in self.device else "cpu"

    @property
    def digest(self) -> str:
        """Hash of all of it: the name of the file."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class StepProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured step times, in a file of their own."""

    schema_version: int
    lightserve_version: str
    model: str
    """Its name, for people."""
    key: ProfileKey
    coefficients: StepCoefficients
    kv_bytes_per_token: int
    """KV bytes of all layers, on all ranks."""
    num_samples: int
    median_error: float
    """Relative, of shapes that were not fitted."""
    p95_error: float
    crowding: float = 0.0
    """Share of the cores needed that other processes had meanwhile, 0 where that is unknown."""
    mixed_sizes: tuple[int, ...] = ()
    """To which the worker padded steps, see `GraphSizes`: the coefficients are of padded steps."""
    decode_sizes: tuple[int, ...] = ()
    encoder: EncoderWork | None = None
    """The work of the model's encoder of images; None: it has none, or it was not measured."""

    @property
    def graph_sizes(self) -> GraphSizes:
        """To which the worker padded steps."""
        return GraphSizes(self.decode_sizes, self.mixed_sizes)

    @property
    def noise(self) -> str:
        """Why it is not to be planned with, or nothing."""
        if self.median_error > MAX_MEDIAN_ERROR:
            return (
                f"too much else runs here: the profile is off by {self.median_error:.0%} in the"
                f" median, {MAX_MEDIAN_ERROR:.0%} is the most to plan with"
            )
        if self.crowding > MAX_CROWDING:
            return (
                f"too much else runs here: other processes had {self.crowding:.0%} of the cores"
                f" that were measured, {MAX_CROWDING:.0%} is the most to plan with"
            )
        return ""


class _Versioned(msgspec.Struct, frozen=True):
    """The common part of files of all versions."""

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


def slowness(profile: StepProfile, than: StepProfile) -> float:
    """Return how many times as long a profile says that steps take, the geometric mean of some."""
    new, old = (StepModel(one.coefficients, one.graph_sizes) for one in (profile, than))
    ratios = []
    for rows in _REFERENCE_STEPS:
        shape = StepShape()
        for start, num_tokens in rows:
            shape = shape.plus(start, num_tokens)
        ratios.append(math.log(max(1e-9, new.seconds(shape)) / max(1e-9, old.seconds(shape))))
    return math.exp(sum(ratios) / len(ratios))


def is_worse(profile: StepProfile, than: StepProfile) -> bool:
    """Whether a cached profile of the same key is to be kept rather than this new one."""
    is_trusted = than.median_error <= max(_GOOD_ERROR, profile.median_error)
    same_code = profile.lightserve_version == than.lightserve_version
    return same_code and is_trusted and slowness(profile, than) > SLOWER


def save_profile(profile: StepProfile, path: Path) -> None:
    """Write a profile; readers see the old file or the new one, whole. Raises OSError."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(profile)) + b"\n")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file of the cache; readers see the old one or the new one, whole. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def hash_of_model(path: Path) -> str:
    """Return what names a model's files in the cache: a hash of its config.json. Raises OSError."""
    return hashlib.sha256((path / "config.json").read_bytes()).hexdigest()[:16]


def _refusal(its: ProfileKey, key: ProfileKey) -> str:
    """Return why a profile does not serve, or nothing."""
    for name in ProfileKey.__struct_fields__:
        theirs, ours = getattr(its, name), getattr(key, name)
        if theirs != ours:
            return f"its {name} is {theirs!r}, this server's is {ours!r}"
    return ""


def tokens_of_step(
    config: ServeConfig, device_type: str, coefficients: StepCoefficients | None
) -> int:
    """Return the token budget of a step, which the router is told.

    On a CPU with a profile: as many tokens as make what every step takes, however few it has, a
    small part of it. More would gain little, and all rows of a step wait for its end.
    """
    most = config.max_tokens_of_step(device_type)
    if config.max_num_batched_tokens or device_type != "cpu" or coefficients is None:
        return most
    worth_s = StepModel(coefficients).worthwhile_s
    if worth_s >= coefficients.per_new_s * most:
        return most
    return min(most, max(config.max_num_seqs, math.ceil(worth_s / coefficients.per_new_s)))


# What `lightserve profile` and the worker processes that it starts tell each other.


class ProfileJob(msgspec.Struct, frozen=True):
    """Task of one rank."""

    config: ServeConfig
    rank: int
    store_path: str
    """Where the ranks meet."""
    seconds: float


class ProfileNews(msgspec.Struct, frozen=True):
    """One line of rank 0."""

    share: float = 0.0
    """Share of the time, 0 … 1."""
    profile: StepProfile | None = None
    """At the end."""
    error: str = ""
    """Why there will be none."""
