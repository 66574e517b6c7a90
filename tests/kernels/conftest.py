"""Triton 3.6's interpreter makes indices of arrays with one element, which numpy 2.4 refuses.

Later versions of Triton do as is done here. Compiled kernels know nothing of this.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor_and_index
