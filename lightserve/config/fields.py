"""How one field of the configuration is declared and checked: flag, help text, limits, sizes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from enum import Flag, auto
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from lightserve.errors import ConfigError

_MEMORY_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
_MEMORY_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")
"""A name in ASCII, or an address."""
CLASS_PATH = "MODULE:CLASS"
"""Stands among the choices of an option that also takes a class from outside the package."""
_CLASS_PATTERN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Scope(Flag):
    """Where an option counts, beside the server that is given it."""

    SERVER = 0
    NODE = auto()
    """It may differ from one machine of a server to the next; all other options must agree."""
    SIMULATE = auto()
    """`lightserve simulate` has it as well."""
    PROFILE = auto()
    """Step times depend on it: `lightserve profile` has it as well."""


class Need(NamedTuple):
    """Values that another option must have, or else this one has no effect."""

    option: str
    allowed: tuple[Any, ...] = ()
    refused: tuple[Any, ...] = ()
    """Without allowed and refused values the option must be given."""
    words: str = ""
    """For the error, in place of the flag and the allowed values; {} is the value that it has."""

    def is_met(self, value: Any) -> bool:
        """Return whether the option's value is one of these."""
        if self.allowed or self.refused:
            return value not in self.refused and (not self.allowed or value in self.allowed)
        return bool(value)

    def complaint(self, value: Any) -> str:
        """Return what is needed, and the value there is."""
        flag = flag_name(self.option)
        if self.words:
            return self.words.format(value)
        if self.allowed:
            return f"{flag} {' or '.join(map(str, self.allowed))}, got {value!r}"
        return f"{flag}, got {value}" if self.refused else flag


GPU = Need("device", refused=("cpu",), words="a GPU, got --device {}")
GPU_KERNELS = (
    GPU,
    Need("attention_backend", ("auto", "triton"), words="--attention-backend triton, got {!r}"),
)


def option(
    default: Any,
    help_text: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    takes_class: bool = False,
    zero_word: str = "",
    section: str = "",
    scope: Scope = Scope.SERVER,
    needs: tuple[Need, ...] = (),
) -> Any:
    """Declare one configuration field; flag, help, documentation and checks follow from it.

    `low` and `high` are inclusive. `takes_class` allows MODULE:CLASS beside the choices, and
    `zero_word` stands for 0. A `section` is a part of help and documentation that begins with this
    option. Where its `needs` are not met an option has no effect, and is refused.
    """
    metadata = {
        "help": help_text,
        "low": low,
        "high": high,
        "choices": (*choices, CLASS_PATH) if takes_class else choices,
        "zero_word": zero_word,
        "section": section,
        "scope": scope,
        "needs": needs,
    }
    return field(default=default, metadata=metadata)


node_option = partial(option, scope=Scope.NODE)
simulate_option = partial(option, scope=Scope.SIMULATE)
profile_option = partial(option, scope=Scope.PROFILE)


def unmet_need(spec: dataclasses.Field[Any], values: Mapping[str, Any]) -> Need | None:
    """Return a need of an option that other options' values do not meet; None: there is none."""
    needs: tuple[Need, ...] = spec.metadata["needs"]
    return next((need for need in needs if not need.is_met(values[need.option])), None)


def check_needs(config: Any) -> None:
    """Raise ConfigError for an option that is given and has no effect beside the others."""
    values = vars(config)
    for spec in dataclasses.fields(config):
        if values[spec.name] != spec.default and (need := unmet_need(spec, values)) is not None:
            complaint = need.complaint(values[need.option])
            raise ConfigError(f"{flag_name(spec.name)} needs {complaint}")


def names_of(config_type: type[Any], scope: Scope) -> tuple[str, ...]:
    """Return the options of a configuration that have a scope."""
    specs = dataclasses.fields(config_type)
    return tuple(spec.name for spec in specs if scope in spec.metadata["scope"])


def parse_memory(text: str, flag: str) -> int:
    """Return the bytes that "512MiB", "4GiB", "2.5GB" or "1048576", given to `flag`, stand for.

    Raises:
        ConfigError: anything else.
    """
    match = _MEMORY_PATTERN.fullmatch(text.strip())
    if match is None or match[2].upper() not in _MEMORY_UNITS:
        raise ConfigError(f"{flag} must be auto or a size such as 512MiB, got {text!r}")
    return int(float(match[1]) * _MEMORY_UNITS[match[2].upper()])


def is_class_path(value: str) -> bool:
    """Return whether an option's value names a class: MODULE:CLASS."""
    return _CLASS_PATTERN.fullmatch(value) is not None


def flag_name(field_name: str) -> str:
    """Return the command-line flag of a configuration field."""
    return "--" + field_name.replace("_", "-")


def check_limits(spec: dataclasses.Field[Any], value: Any) -> None:
    """Raise ConfigError, with flag, limit and value, if a field's value is outside its limits."""
    low, high, choices = (spec.metadata[key] for key in ("low", "high", "choices"))
    flag = flag_name(spec.name)
    is_class = CLASS_PATH in choices and is_class_path(value)
    if choices and value not in choices and not is_class:
        raise ConfigError(f"{flag} must be one of {', '.join(choices)}, got {value!r}")
    if low is not None and not value >= low:
        raise ConfigError(f"{flag} must be at least {low}, got {value!r}")
    if high is not None and not value <= high:
        raise ConfigError(f"{flag} must be at most {high}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{flag} must be finite, got {value!r}")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{flag} must be UTF-8, got {value!r}") from None


def is_postgres(store: str) -> bool:
    """Return whether a batch store is PostgreSQL's, and no directory."""
    return store.startswith(("postgresql://", "postgres://"))


def is_plain_url(url: str) -> bool:
    """Return whether this is an HTTP address, perhaps with a path, and nothing besides."""
    try:
        parts = urlsplit(url)
        has_place = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    is_bare = not (parts.query or parts.fragment or "@" in parts.netloc)
    return parts.scheme in ("http", "https") and has_place and is_bare and url.isprintable()


def check_file_store(url: str) -> None:
    """Check where objects are to be. Raises ConfigError."""
    if not url:
        return
    try:
        parts = urlsplit(url)
        is_s3 = parts.scheme == "s3" and bool(parts.netloc)
        is_directory = parts.scheme == "file" and not parts.netloc and len(parts.path) > 1
    except ValueError:
        is_s3 = is_directory = False
    if not (is_s3 or is_directory):
        raise ConfigError(
            f"--file-store must be s3://BUCKET/PREFIX or file:///DIRECTORY, got {url!r}"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            "--file-store must be an address without credentials, which belong in the environment"
            " (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
        )


def has_password(url: str) -> bool:
    """Return whether a URL of PostgreSQL has a password."""
    parts = urlsplit(url)
    names = parse_qs(parts.query, keep_blank_values=True)
    return ":" in parts.netloc.rpartition("@")[0] or any("password" in n.lower() for n in names)


def parse_hosts(names: Iterable[str], flag: str) -> set[tuple[str, int | None]]:
    """Return hosts such as images.example or 10.0.0.5:8080, each with its port if it has one.

    Raises:
        ConfigError: one is none.
    """
    hosts: set[tuple[str, int | None]] = set()
    for name in names:
        try:
            parts = urlsplit(f"//{name}")
            host, port, is_host = parts.hostname, parts.port, parts.username is None
        except ValueError:  # a port that is none
            host, port, is_host = None, None, False
        if host is None or not is_host or parts.netloc != name or _HOST.fullmatch(host) is None:
            raise ConfigError(
                f"{flag} must have hosts such as images.example or 10.0.0.5:8080, got {name!r}"
            )
        hosts.add((host, port))
    return hosts
