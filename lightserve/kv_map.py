"""Draws the KV pool: a cell per slot, in rows of blocks with gaps between them.

    slot 0  ████████ ████████ ████████        a strip is a block, a row is several of them
    slot 24 ████████ ████████ ████░░░░

Over MAX_CELLS slots, a cell stands for one or more whole blocks and has the mean colour of their
slots. The cells are pixels of an image that is drawn one to one, so that none is blurred or lost.
Needs matplotlib, the optional extra `plots`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightserve.chat_client import refusal_text, unreachable_text
from lightserve.errors import ConfigError, KVMapError
from lightserve.types import SlotKind

# Asks a server for the map of its KV pool: GET /debug/kv, as docs/api.md describes it.

MAX_SLOTS, MAX_BLOCK_SIZE = 2**31 - 1, 1024
_NO_MAP = "GET /debug/kv gave no KV map: is this a lightserve server of the same version?"


@dataclass(frozen=True, kw_only=True)
class PoolMap:
    """A server's KV pool at one moment; figures as in docs/api.md."""

    address: str
    """Host and port of the server."""
    kinds: npt.NDArray[np.uint8]
    """`SlotKind`s, uint8 [num_slots], at least one."""
    block_size: int
    counts: Mapping[SlotKind, int]
    """Slots of each kind."""
    num_free_blocks: int
    num_shared_blocks: int
    mean_run_length: float
    num_host_slots: int
    num_used_host_slots: int

    @property
    def num_slots(self) -> int:
        """Size of the pool."""
        return len(self.kinds)

    def summary(self) -> str:
        """Return in words how many slots there are, and of which kinds."""
        kinds = [f"{count:,} {LABELS[kind]}" for kind, count in self.counts.items() if count]
        return f"{self.num_slots:,} slots: {', '.join(kinds)}"


class _Answer(msgspec.Struct, frozen=True):
    """What is read of the answer."""

    num_slots: int
    block_size: int
    num_free_blocks: int
    num_shared_blocks: int
    mean_run_length: float
    num_host_slots: int
    num_used_host_slots: int
    kinds: list[str]
    slots: list[tuple[int, int]] | None


def fetch_map(
    url: str,
    *,
    api_key: str = "",
    timeout_s: float = 60.0,
    transport: httpx.BaseTransport | None = None,
) -> PoolMap:
    """Return the map of the server at `url`, with or without /v1.

    Raises:
        ConfigError: `url` is none.
        KVMapError: no answer, a refusal, or something that is no map.
    """
    base = _base_url(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
            transport=transport,
        ) as http:
            response = http.get(f"{base}/debug/kv")
    except httpx.HTTPError as error:
        raise KVMapError(unreachable_text(base, error)) from error
    if response.status_code != 200:
        raise KVMapError(refusal_text(response))
    return _read(response.content, base.netloc.decode("ascii"))


def _base_url(url: str) -> httpx.URL:
    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise ConfigError(f"URL {url!r}: {error}") from error
    if base.scheme not in ("http", "https") or not base.host:
        raise ConfigError(f"URL must begin with http:// or https:// and name a host, got {url!r}")
    return base


def _read(body: bytes, address: str) -> PoolMap:
    """Return the map in an answer. Raises KVMapError."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KVMapError(f"{_NO_MAP} ({error})") from error
    if answer.kinds != [kind.name.lower() for kind in SlotKind]:
        raise KVMapError(f"{_NO_MAP} (its kinds of slots are other ones)")
    if answer.slots is None:
        raise KVMapError("the server's KV pool is too large and too fragmented for a map")
    kinds = _expand(answer)
    return PoolMap(
        address=address,
        kinds=kinds,
        block_size=answer.block_size,
        counts={kind: int(np.count_nonzero(kinds == kind)) for kind in SlotKind},
        num_free_blocks=answer.num_free_blocks,
        num_shared_blocks=answer.num_shared_blocks,
        mean_run_length=answer.mean_run_length,
        num_host_slots=answer.num_host_slots,
        num_used_host_slots=answer.num_used_host_slots,
    )


def _expand(answer: _Answer) -> npt.NDArray[np.uint8]:
    """Return what each slot is; nothing large is made of an answer that contradicts itself."""
    assert answer.slots is not None
    lengths = [length for _, length in answer.slots]
    is_map = (
        0 < answer.num_slots <= MAX_SLOTS
        and 0 < answer.block_size <= MAX_BLOCK_SIZE
        and sum(lengths) == answer.num_slots
        and min(lengths) > 0
        and all(0 <= kind < len(SlotKind) for kind, _ in answer.slots)
    )
    if not is_map:
        raise KVMapError(f"{_NO_MAP} (its slots and their number do not fit together)")
    return np.repeat(np.array([kind for kind, _ in answer.slots], dtype=np.uint8), lengths)


Pixels = npt.NDArray[np.uint8]

MAX_CELLS = 500_000
MAX_WIDTH, MAX_HEIGHT = 1600, 1500
"""Of the cells together, pixels."""
MAX_CELL = 14
"""Edge of a cell, pixels."""
MIN_LINED_CELL = 6
"""From this size on there is a line between cells."""
DPI = 100
_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _MARGIN_BOTTOM = 110, 30, 80, 60
_MIN_WIDTH = 1100
"""Pixels, so that the legend has room."""
_MAX_LABELS = 16

# Okabe and Ito's palette, which colour-blind people can tell apart.
COLOURS: dict[SlotKind, tuple[int, int, int]] = {
    SlotKind.FREE: (226, 226, 226),
    SlotKind.RT: (213, 94, 0),
    SlotKind.BE: (0, 114, 178),
    SlotKind.CACHED: (240, 228, 66),
    SlotKind.CHECKPOINTED: (86, 180, 233),
}
LABELS: dict[SlotKind, str] = {
    SlotKind.FREE: "free",
    SlotKind.RT: "real-time",
    SlotKind.BE: "best-effort",
    SlotKind.CACHED: "cached",
    SlotKind.CHECKPOINTED: "checkpointed",
}


@dataclass(frozen=True)
class Grid:
    """Where cells are; lengths in pixels."""

    num_cells: int
    slots_per_cell: int
    cells_per_strip: int
    strips_per_row: int
    cell: int
    """Width of a cell, with the line behind it."""
    gap: int
    """Between strips and between rows."""

    @property
    def num_rows(self) -> int:
        """Rows of strips."""
        return -(-self.num_cells // self.cells_per_row)

    @property
    def cells_per_row(self) -> int:
        """Cells of a full row."""
        return self.cells_per_strip * self.strips_per_row

    @property
    def cell_height(self) -> int:
        """Height of a cell; the thinnest are taller than wide, to be seen between the gaps."""
        return max(2, self.cell)

    @property
    def pitch(self) -> int:
        """From one row to the next."""
        return self.cell_height + self.gap


def choose_grid(num_slots: int, block_size: int) -> Grid:
    """Return the grid with the largest cells with which the pool is still a picture."""
    slots_per_cell, cells_per_strip = 1, block_size
    if num_slots > MAX_CELLS:
        num_blocks = -(-num_slots // block_size)
        slots_per_cell, cells_per_strip = block_size * -(-num_blocks // MAX_CELLS), 1
    num_cells = -(-num_slots // slots_per_cell)
    num_strips = -(-num_cells // cells_per_strip)
    for cell in range(MAX_CELL, 0, -1):
        gap = max(1, cell // 4) if cells_per_strip > 1 or cell > 3 else 0
        strip = cells_per_strip * cell + gap
        strips_per_row = min(num_strips, max(1, (MAX_WIDTH + gap) // strip))
        grid = Grid(num_cells, slots_per_cell, cells_per_strip, strips_per_row, cell, gap)
        if grid.num_rows * grid.pitch <= MAX_HEIGHT and strips_per_row * strip - gap <= MAX_WIDTH:
            break
    return grid


def render(kinds: npt.NDArray[np.uint8], grid: Grid) -> Pixels:
    """Return the cells as an image, uint8 [height, width, 3]; white where there is no slot."""
    rows, strips, cells = grid.num_rows, grid.strips_per_row, grid.cells_per_strip
    padded = np.full((rows * grid.cells_per_row, 3), 255, dtype=np.uint8)
    padded[: grid.num_cells] = _cell_colours(kinds, grid.slots_per_cell)
    strip = cells * grid.cell
    canvas = np.full((rows, grid.pitch, strips, strip + grid.gap, 3), 255, dtype=np.uint8)
    wide = padded.reshape(rows, 1, strips, cells, 3).repeat(grid.cell, axis=3)
    if grid.cell >= MIN_LINED_CELL:
        wide[:, :, :, grid.cell - 1 :: grid.cell] = 255
    canvas[:, : grid.cell_height, :, :strip] = wide  # [rows, cell_height, strips, strip, 3]
    return canvas.reshape(rows * grid.pitch, strips * (strip + grid.gap), 3)


def _cell_colours(kinds: npt.NDArray[np.uint8], slots_per_cell: int) -> Pixels:
    """Return the colour of each cell, uint8 [num_cells, 3]."""
    palette = np.array([COLOURS[kind] for kind in SlotKind], dtype=np.uint8)
    if slots_per_cell == 1:
        return palette[kinds]
    starts = np.arange(0, len(kinds), slots_per_cell)
    counts = [np.add.reduceat(kinds == kind, starts, dtype=np.int64) for kind in SlotKind]
    shares = np.stack(counts, axis=1) / np.diff(starts, append=len(kinds))[:, None]
    return np.rint(shares @ palette).astype(np.uint8)


def draw_map(pool: PoolMap, path: Path) -> None:
    """Write the picture in the format that the name ends with.

    Raises:
        KVMapError: the file cannot be written.
    """
    grid = choose_grid(pool.num_slots, pool.block_size)
    figure = _figure(pool, grid, render(pool.kinds, grid))
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise KVMapError(f"{path} cannot be written: {error.strerror or error}") from error


def _figure(pool: PoolMap, grid: Grid, pixels: Pixels) -> Figure:
    """Return the picture, in which a pixel of the cells is a pixel."""
    height, width = pixels.shape[:2]
    full_width = max(_MIN_WIDTH, width + _MARGIN_LEFT + _MARGIN_RIGHT)
    full_height = height + _MARGIN_TOP + _MARGIN_BOTTOM
    figure = Figure(figsize=(full_width / DPI, full_height / DPI), dpi=DPI)
    FigureCanvasAgg(figure)
    left, bottom = _MARGIN_LEFT / full_width, _MARGIN_BOTTOM / full_height
    axes = figure.add_axes((left, bottom, width / full_width, height / full_height))
    axes.imshow(pixels, interpolation="none", aspect="auto")
    axes.spines[:].set_visible(False)
    axes.set_xticks([])
    labelled = range(0, grid.num_rows, -(-grid.num_rows // _MAX_LABELS))
    axes.set_yticks(
        [row * grid.pitch + (grid.cell_height - 1) / 2 for row in labelled],
        [f"{row * grid.cells_per_row * grid.slots_per_cell:,}" for row in labelled],
    )
    axes.set_ylabel("first slot of the row")
    figure.suptitle(_title(pool, grid), x=0.5, y=1 - 12 / full_height, fontsize=11)
    patches: list[Artist] = []
    for kind, count in pool.counts.items():
        red, green, blue = (value / 255 for value in COLOURS[kind])
        label = f"{LABELS[kind]} {count:,} ({count / pool.num_slots:.1%})"
        patches.append(Patch(facecolor=(red, green, blue), label=label))
    figure.legend(handles=patches, loc="lower center", ncols=len(patches), frameon=False)
    return figure


def _title(pool: PoolMap, grid: Grid) -> str:
    num_blocks = -(-pool.num_slots // pool.block_size)
    cell = "a cell is a slot"
    if grid.slots_per_cell > 1:
        cell = f"a cell is {grid.slots_per_cell:,} slots, in their mean colour"
    return (
        f"KV pool of {pool.address}: {pool.num_slots:,} slots in {num_blocks:,} blocks of"
        f" {pool.block_size}; {cell}\n"
        f"{pool.num_free_blocks:,} blocks free, {pool.num_shared_blocks:,} used by both classes;"
        f" mean run {pool.mean_run_length:,.1f} slots;"
        f" host {pool.num_used_host_slots:,} of {pool.num_host_slots:,} slots"
    )
