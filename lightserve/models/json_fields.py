"""Typed, checked reading of JSON objects: every complaint names the file and the key. Torch-free.

A `JsonFields` wraps one object of a file; its getters return a value of the asked type within the
asked limits, or raise `ModelLoadError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from lightserve.errors import ModelLoadError

T = TypeVar("T")
MAX_JSON_BYTES = 64 * 1024 * 1024
"""No configuration or shard index is nearly as long."""

MAX_INT = 2**31 - 1
"""Sizes, ids and lengths are 32-bit everywhere else."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises ModelLoadError naming the file."""
    value = _read_json(path)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, got {_describe(value)}")
    return value


def read_json_objects(path: Path) -> list[dict[str, Any]]:
    """Return the list of JSON objects in `path`. Raises ModelLoadError naming the file."""
    value = _read_json(path)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ModelLoadError(f"{path}: must hold a list of JSON objects, got {_describe(value)}")
    return value


def _read_json(path: Path) -> Any:
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{path}: {size} bytes, more than {MAX_JSON_BYTES}")
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path}: no such file") from error
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from error


class JsonFields:
    """One JSON object of a file. A key that is absent and one that is null count as the same."""

    def __init__(
        self,
        path: Path,
        values: dict[str, Any],
        *,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`defaults`: values of keys that are absent or null, where a getter is given none.

        `names`: the file's names of keys that getters are given by others.
        """
        self.path = path
        self._values = values
        self._prefix = prefix
        self._defaults = defaults or {}
        self._names = names or {}

    def with_defaults(
        self, defaults: Mapping[str, Any], names: Mapping[str, str] | None = None
    ) -> JsonFields:
        """Return the same object with values for absent keys, which `has` does not see, and with
        names of its own for some keys."""
        return JsonFields(
            self.path, self._values, prefix=self._prefix, defaults=defaults, names=names
        )

    def default(self, key: str) -> Any:
        """Return the value that stands for an absent key; None: it is required."""
        return self._defaults.get(key)

    def error(self, key: str, complaint: str) -> ModelLoadError:
        """Return the error that names file, key and complaint."""
        return ModelLoadError(f"{self.path}: key {self._prefix + self._name(key)!r} {complaint}")

    def _name(self, key: str) -> str:
        return self._names.get(key, key)

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(self._name(key)) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key is there with the value null."""
        return self._values.get(self._name(key), self) is None

    def integer(
        self, key: str, *, default: int | None = None, low: int = 1, high: int = MAX_INT
    ) -> int:
        """Return an integer between `low` and `high`; without a default the key is required."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, got {_describe(value)}")
        if not low <= value <= high:
            raise self.error(key, f"must be between {low} and {high}, got {value}")
        return value

    def even(self, key: str, *, default: int | None = None) -> int:
        """Return an even integer."""
        if (found := self.integer(key, default=default)) % 2:
            raise self.error(key, f"must be even, got {found}")
        return found

    def num_kv_heads(
        self, num_heads: int, *, key: str = "num_key_value_heads", default: int | None = None
    ) -> int:
        """Return a number of KV heads, which divides that of query heads; null: the same number."""
        found = self.integer(key, default=num_heads if self.is_null(key) else default)
        if num_heads % found:
            raise self.error(key, f"must divide num_attention_heads {num_heads}, got {found}")
        return found

    def number(self, key: str, *, default: float | None = None, above: float = 0.0) -> float:
        """Return a finite number greater than `above`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, got {_describe(value)}")
        if not math.isfinite(value) or value <= above:
            raise self.error(key, f"must be finite and greater than {above}, got {value}")
        return float(value)

    def optional_number(self, key: str, *, above: float = 0.0) -> float | None:
        """Return a finite number greater than `above`, or None when the key is absent."""
        return self.number(key, above=above) if self.has(key) else None

    def boolean(self, key: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {_describe(value)}")
        return value

    def string(self, key: str, *, default: str | None = None) -> str:
        """Return a string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, got {_describe(value)}")
        return value

    def only(self, key: str, *known: Any) -> Any:
        """Return a value, one of `known`, the first of which stands for an absent or null key."""
        value = self._values.get(self._name(key))
        value = known[0] if value is None else value
        if not any(value == one and (value is True) == (one is True) for one in known):
            names = " or ".join(map(_quoted, known))
            raise self.error(key, f"must be {names}, got {_quoted(value)}")
        return value

    def choice(self, key: str, known: Mapping[str, T], default: str | None = None) -> T:
        """Return that which a name stands for."""
        name = self.string(key, default=default)
        if name not in known:
            raise self.error(key, f"must be one of {', '.join(known)}, got {name!r}")
        return known[name]

    def array(self, key: str) -> list[Any]:
        """Return a list."""
        value = self._get(key, None)
        if not isinstance(value, list):
            raise self.error(key, f"must be a list, got {_describe(value)}")
        return value

    def child(self, key: str) -> JsonFields:
        """Return the object under a key."""
        value = self._get(key, None)
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, got {_describe(value)}")
        return JsonFields(self.path, value, prefix=f"{self._prefix}{key}.")

    def items(self) -> list[tuple[str, Any]]:
        """Return all keys with their raw values."""
        return list(self._values.items())

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(self._name(key))
        if value is not None:
            return value
        if default is None:
            default = self._defaults.get(key)
        if default is None:
            raise self.error(key, "is null" if self.is_null(key) else "is missing")
        return default


def _quoted(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, str) else _describe(value)


def _describe(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
