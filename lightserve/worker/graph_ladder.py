"""The batch sizes that decodes are captured for.

A step of L rows runs as the smallest captured size that has room, so a ladder trades rows computed
for nothing against graphs to capture and to keep. What a padding row costs: attention to one
token, and its share of the products, which up to about 180 rows of bfloat16 wait for the weights
anyway (an H200's operations per byte). So the steps may grow with the size; bench/README.md has
the figures.

    1 2 4 8 16 24 32 … 64 80 96 … 256 288 320 … 512 576 640 …
"""

from __future__ import annotations

MAX_ROWS = 512
"""Largest size unless --cuda-graph-max-seqs says otherwise: beyond it a step takes long enough for
the host to launch the next one's kernels one by one."""
_STEPS = ((64, 8), (256, 16), (512, 32))
"""(up to this size, distance of a size to the next), from 8 on."""
_LAST_STEP = 64


def ladder(max_rows: int) -> tuple[int, ...]:
    """Return the sizes to capture, rising, the last of which is `max_rows` (at least 1)."""
    sizes, size = [], 1
    while size < max_rows:
        sizes.append(size)
        size = _next(size)
    return (*sizes, max_rows)


def _next(size: int) -> int:
    if size < 8:
        return 2 * size
    return size + next((step for end, step in _STEPS if size < end), _LAST_STEP)
