"""YAML files of options for `--config`, and where each effective value comes from.

A file is one flat mapping from option names, as on the command line without the leading dashes
(`max-model-len` and `max_model_len` are the same), to plain values. Nothing in it is guessed or
converted: a wrong type, an unknown or repeated name, an alias or a tag is an error that names the
line. The command line stands over the file, the file over the defaults. Relative paths in it are
relative to the working directory, as those of flags are.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import yaml

from lightserve.config.fields import check_limits
from lightserve.config.scheduling import preset_values
from lightserve.errors import ConfigError, read_named_file

_TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


class Origin(StrEnum):
    """Where the value of an option comes from."""

    DEFAULT = "default"
    PRESET = "preset"
    FILE = "file"
    FLAG = "flag"


class EffectiveValues(NamedTuple):
    """A value for every option, and the origin of each."""

    values: dict[str, Any]
    origins: dict[str, Origin]


def merge(
    values: Mapping[str, Any],
    *,
    given: Collection[str],
    from_file: Mapping[str, Any],
    preset: str | None = None,
) -> EffectiveValues:
    """Lay a preset's options under a file's, both under those `given` on the command line.

    `values` has all of these, and the defaults of all others.
    """
    file_values = {name: value for name, value in from_file.items() if name not in given}
    merged = {**values, **file_values}
    from_preset = preset_values(preset, given={*given, *from_file}, values=merged)
    origins = dict.fromkeys(values, Origin.DEFAULT)
    for names, origin in (
        (from_preset, Origin.PRESET),
        (from_file, Origin.FILE),
        (given, Origin.FLAG),
    ):
        origins |= {name: origin for name in names if name in values}
    return EffectiveValues(merged | from_preset, origins)


def log_configuration(log: logging.Logger, config: Any, origins: Mapping[str, Origin]) -> None:
    """Log every field of a configuration, one record per origin, flags first; defaults for debug.

    Keys and certificates are paths in a configuration, never their contents.
    """
    names = [spec.name for spec in dataclasses.fields(config)]
    for origin in (Origin.FLAG, Origin.FILE, Origin.PRESET, Origin.DEFAULT):
        values = {
            name: getattr(config, name)
            for name in names
            if origins.get(name, Origin.DEFAULT) is origin
        }
        if values:
            words = " ".join(f"{name}={value!r}" for name, value in values.items())
            fields = {"origin": str(origin), "configuration": values}
            level = logging.DEBUG if origin is Origin.DEFAULT else logging.INFO
            log.log(level, "configuration by %s: %s", origin, words, extra={"fields": fields})


def read_config_file(path: Path, config_type: type[Any]) -> dict[str, Any]:
    """Return the options in a YAML file by field name of `config_type`.

    Raises:
        ConfigError: the file cannot be read or is not such a mapping; a name is unknown or
            repeated; a value has another type or is outside its limits.
    """
    specs = {spec.name: spec for spec in dataclasses.fields(config_type)}
    types = get_type_hints(config_type)
    options: dict[str, Any] = {}
    loader = yaml.SafeLoader(_read(path))
    try:
        for key, node in _pairs(loader, path):
            where = f"--config {path}, line {node.start_mark.line + 1}"
            name = key.replace("-", "_")
            if name not in specs:
                raise ConfigError(f"{where}: no such option {key!r}")
            if name in options:
                raise ConfigError(f"{where}: {key!r} is given twice")
            options[name] = _value(loader, node, types[name], f"{where}: {key}", specs[name])
            try:
                check_limits(specs[name], options[name])
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"--config {path} is not valid YAML: {text[:200]}") from error
    finally:
        loader.dispose()
    return options


def _read(path: Path) -> str:
    text = read_named_file("--config", path)
    try:
        yaml.reader.Reader(text)  # complains of control characters
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: has control characters") from error
    return text


def _pairs(loader: yaml.SafeLoader, path: Path) -> list[tuple[str, yaml.ScalarNode]]:
    """Return names and values of the one mapping in a document, before they are converted."""
    root = loader.get_single_node()
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"--config {path}: must be a mapping of options, got a {_kind(root)}")
    pairs = []
    for key, value in root.value:
        where = f"--config {path}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{where}: names of options are strings, got a {_kind(key)}")
        if not isinstance(value, yaml.ScalarNode):
            raise ConfigError(f"{where}: {key.value} must be a plain value, got a {_kind(value)}")
        pairs.append((key.value, value))
    return pairs


def _kind(node: yaml.Node) -> str:
    """Return what YAML calls a node: a scalar, sequence or mapping."""
    return type(node).__name__.removesuffix("Node").lower()


def _value(
    loader: yaml.SafeLoader,
    node: yaml.ScalarNode,
    kind: type,
    where: str,
    spec: dataclasses.Field[Any],
) -> Any:
    """Return a value if it has the type `kind`; an integer is a number as well."""
    value: object = loader.construct_object(node)
    zero_word: str = spec.metadata["zero_word"]
    if zero_word and value == zero_word:
        return 0
    if type(value) is int:
        value = _decimal(node.value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        words = _TYPE_NAMES[kind] + (f" or {zero_word}" if zero_word else "")
        raise ConfigError(f"{where} must be {words}, got {node.value[:80]!r}")
    return value


def _decimal(text: str) -> int | None:
    """Return an integer as Python writes it: YAML would read 1:30 as 90 and 010 as 8."""
    try:
        return int(text, 0)
    except ValueError:
        return None
