"""Triton's interpreter as these tests need it; compiled kernels know nothing of this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton.language as tl
from support.grids import Run
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_patch_lang = interpreter._patch_lang


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 makes indices of arrays with one element, which numpy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


class _Scope(NamedTuple):
    """What a launch has changed in triton.language, until its end."""

    restore: Callable[[], None]


_patched: set[int] = set()
"""The modules of triton.language that the launch that runs now has changed."""


def _patch_lang_once(function: Any) -> _Scope:
    """Change each module once a launch: the interpreter would at each call of a function."""
    modules = {id(part) for part in function.__globals__.values() if part is tl or part is tl.core}
    if modules <= _patched:
        return _Scope(lambda: None)
    is_launch = not _patched
    _patched.update(modules)
    scope = _patch_lang(function)

    def restore() -> None:
        scope.restore()
        if is_launch:
            _patched.clear()

    return _Scope(restore)


_find_numpy_type = interpreter._get_np_dtype
_numpy_types: dict[Any, Any] = {}


def _numpy_type(dtype: Any) -> Any:
    """Look the type up: the interpreter makes a table of all types each time."""
    element = dtype.scalar
    if isinstance(element, tl.pointer_type):  # has no hash
        return _find_numpy_type(element)
    if element not in _numpy_types:
        _numpy_types[element] = _find_numpy_type(element)
    return _numpy_types[element]


interpreter._patch_lang_tensor = _patch_tensor_and_index
interpreter._patch_lang = _patch_lang_once
interpreter._get_np_dtype = _numpy_type
if not Run.is_long:
    # A fourth of the time; no sum of small places leaves 32 bits.
    options = interpreter.interpreter_builder.options
    object.__setattr__(options, "sanitize_overflow", False)
