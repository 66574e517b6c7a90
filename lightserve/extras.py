"""Errors for packages of extras that are missing: each names a command that works.

It names the packages themselves: lightserve is on no index, and installing it once more without
`-e` would put a copy in the place of a checkout.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import shlex
import sys
from collections.abc import Iterator

from lightserve.errors import ConfigError


def need_packages(packages: tuple[str, ...], extra: str) -> None:
    """Raise ConfigError if one of an extra's packages, named as they are imported, is missing."""
    for package in packages:
        try:
            is_there = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:  # what it is part of
            is_there = False
        if not is_there:
            raise missing_extra(package, extra)


@contextlib.contextmanager
def packages_of(extra: str) -> Iterator[None]:
    """Import packages of an extra inside. Raises ConfigError: one is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_extra((error.name or "").partition(".")[0], extra) from error


def missing_extra(package: str, extra: str) -> ConfigError:
    """Return the error that names a package and installs all those of its extra."""
    try:
        declared = importlib.metadata.requires("lightserve") or []
    except importlib.metadata.PackageNotFoundError:
        declared = []  # run from its directory alone
    packages = []
    for line in declared:
        requirement, _, marker = line.partition(";")
        if marker.strip().replace('"', "'") == f"extra == '{extra}'":
            packages.append(requirement.strip())
    names = " ".join(shlex.quote(name) for name in packages or [package])
    return ConfigError(
        f"{package} is missing: {shlex.quote(sys.executable)} -m pip install {names}"
    )
