"""`lightserve kv-map`: what is read, what is drawn, and what is an error of one line."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from support.fake_router import frontend
from support.grids import choose, more_when_long

from lightserve import kv_map
from lightserve.cli import main as cli_main
from lightserve.errors import ConfigError, KVMapError
from lightserve.kv_map import (
    COLOURS,
    MAX_CELLS,
    MAX_HEIGHT,
    MAX_WIDTH,
    PoolMap,
    choose_grid,
    draw_map,
    fetch_map,
    render,
)
from lightserve.types import SlotKind

URL = "http://127.0.0.1:8000"
PNG, SVG, PDF = b"\x89PNG\r\n\x1a\n", b"<?xml", b"%PDF-"
Handler = Callable[[httpx.Request], httpx.Response]


def _answer() -> dict[str, Any]:
    """What a frontend says of the pool of `support.fake_router`."""

    async def scenario() -> dict[str, Any]:
        async with frontend() as setup:
            answer: dict[str, Any] = (await setup.http.get("/debug/kv")).json()
            return answer

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    return _answer()


def _fetch(handler: Handler, url: str = URL, **options: Any) -> PoolMap:
    return fetch_map(url, transport=httpx.MockTransport(handler), **options)


def _gives(body: object) -> Handler:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return lambda _request: httpx.Response(200, content=content)


def _pool(kinds: list[int] | np.ndarray[Any, Any], block_size: int) -> PoolMap:
    array = np.asarray(kinds, dtype=np.uint8)
    return PoolMap(
        address="server:80",
        kinds=array,
        block_size=block_size,
        counts={kind: int(np.count_nonzero(array == kind)) for kind in SlotKind},
        num_free_blocks=0,
        num_shared_blocks=0,
        mean_run_length=0.0,
        num_host_slots=0,
        num_used_host_slots=0,
    )


def test_what_a_frontend_says_is_read(answer: dict[str, Any]) -> None:
    requests: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, json=answer)

    for url in (URL, f"{URL}/", f"{URL}/v1"):
        pool = _fetch(handler, url, api_key="k1")
        assert pool.kinds.tolist() == [1, 1, 3, 0, 1, 4, 2, 2]
        assert [pool.counts[kind] for kind in SlotKind] == list(answer["counts"].values())
        assert (pool.address, pool.block_size) == ("127.0.0.1:8000", 4)
        assert (pool.mean_run_length, pool.num_shared_blocks) == (2.0, 1)
        assert (pool.num_used_host_slots, pool.num_host_slots) == (7, 10)
        assert str(requests[-1].url) == f"{URL}/debug/kv"
        assert requests[-1].headers["authorization"] == "Bearer k1"


@pytest.mark.parametrize("url", ["", "server:80", "ftp://server", "http://", "http://a:b", "/x"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        fetch_map(url)


def test_refusals_and_silence() -> None:
    def unreachable(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    error = {"error": {"message": "this path needs the key of an operator"}}
    for handler, expected in [
        (unreachable, f"{URL}: refused"),
        (lambda _: httpx.Response(403, json=error), "HTTP 403: this path needs the key of an oper"),
        (lambda _: httpx.Response(404, text="<h1>no</h1>"), "HTTP 404: <h1>no</h1>"),
        (lambda _: httpx.Response(302, headers={"location": "http://other"}), "HTTP 302"),
    ]:
        with pytest.raises(KVMapError) as raised:
            _fetch(handler)
        assert str(raised.value).startswith(expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_slots": 9},
        {"num_slots": 0, "slots": []},
        {"num_slots": 0},
        {"slots": [[1, 4], [5, 4]]},
        {"slots": [[1, 4], [-1, 4]]},
        {"slots": [[1, 9], [1, -1]]},
        {"slots": [[1, 8], [1, 0]]},
        {"slots": [[1, 10**18]], "num_slots": 10**18},
        {"slots": [[1]]},
        {"block_size": 0},
        {"block_size": 10**9},
        {"kinds": ["free", "rt"]},
        {"kinds": None},
        {"slots": "x"},
    ],
)
def test_what_is_no_map(changes: dict[str, Any], answer: dict[str, Any]) -> None:
    with pytest.raises(KVMapError, match="gave no KV map"):
        _fetch(_gives(answer | changes))


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"\xff\xfe", b'"' + b"\xff" * 9 + b'"'])
def test_what_is_no_json_of_ours(body: bytes) -> None:
    with pytest.raises(KVMapError, match="gave no KV map"):
        _fetch(_gives(body))


def test_a_pool_without_a_map(answer: dict[str, Any]) -> None:
    with pytest.raises(KVMapError, match="too large and too fragmented"):
        _fetch(_gives(answer | {"slots": None}))


@more_when_long
@settings(max_examples=choose(15, 40), deadline=None)
@given(
    kinds=st.lists(st.sampled_from(SlotKind), min_size=1, max_size=300),
    block_size=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_every_slot_is_a_cell_of_its_colour(kinds: list[SlotKind], block_size: int) -> None:
    grid = choose_grid(len(kinds), block_size)
    pixels = render(np.array(kinds, dtype=np.uint8), grid)
    strip = block_size * grid.cell + grid.gap
    seen = np.zeros(pixels.shape[:2], dtype=bool)
    for slot, kind in enumerate(kinds):
        block, place = divmod(slot, block_size)
        row, column = divmod(block, grid.strips_per_row)
        top, left = row * grid.pitch, column * strip + place * grid.cell
        cell = (slice(top, top + grid.cell_height), slice(left, left + grid.cell - 1))
        assert (pixels[cell] == COLOURS[kind]).all()
        seen[cell] = True
    assert (pixels[~seen] == 255).all()  # lines, gaps, and what is behind the last slot


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    "num_slots", [1, 15, 1000, 4097, 50_000, MAX_CELLS, MAX_CELLS + 1, 4_000_000, 2**31 - 1]
)
def test_any_pool_is_a_picture_that_can_be_seen(num_slots: int, block_size: int) -> None:
    grid = choose_grid(num_slots, block_size)
    width = grid.strips_per_row * (grid.cells_per_strip * grid.cell + grid.gap)
    assert width <= MAX_WIDTH + grid.gap
    assert grid.num_rows * grid.pitch <= MAX_HEIGHT
    assert grid.num_cells <= MAX_CELLS
    assert grid.num_cells * grid.slots_per_cell >= num_slots
    assert (grid.num_cells - 1) * grid.slots_per_cell < num_slots
    if num_slots <= MAX_CELLS:
        assert grid.slots_per_cell == 1
        assert grid.cells_per_strip == block_size
    else:
        assert grid.slots_per_cell % block_size == 0


def test_cells_of_several_slots_have_their_mean_colour() -> None:
    kinds = np.full(MAX_CELLS + 1, SlotKind.FREE, dtype=np.uint8)
    kinds[0:3] = SlotKind.RT
    kinds[-1] = SlotKind.BE  # alone in the last cell
    grid = choose_grid(len(kinds), 2)
    assert grid.slots_per_cell == 2
    pixels = render(kinds, grid)[:: grid.pitch, :: grid.cell + grid.gap]
    rt, free = np.array(COLOURS[SlotKind.RT]), np.array(COLOURS[SlotKind.FREE])
    assert pixels[0, 0].tolist() == rt.tolist()
    assert pixels[0, 1].tolist() == np.rint((rt + free) / 2).tolist()
    assert pixels[0, 2].tolist() == free.tolist()
    last = grid.num_cells - 1
    at = divmod(last, grid.strips_per_row)
    assert pixels[at].tolist() == list(COLOURS[SlotKind.BE])


def test_the_file_shows_the_cells_one_to_one(tmp_path: Path) -> None:
    """Nothing is scaled: the picture contains the rendered cells, pixel by pixel."""
    kinds = np.random.default_rng(0).integers(0, 5, 3000)
    draw_map(_pool(kinds, 16), tmp_path / "kv.png")
    cells = render(kinds.astype(np.uint8), choose_grid(3000, 16))
    drawn = np.rint(imread(tmp_path / "kv.png")[:, :, :3] * 255).astype(np.uint8)
    assert drawn.shape[0] > cells.shape[0] and drawn.shape[1] > cells.shape[1]
    for kind in SlotKind:
        shown = (drawn == COLOURS[kind]).all(axis=2).sum()
        cells_of_kind = (cells == COLOURS[kind]).all(axis=2).sum()
        assert cells_of_kind <= shown <= cells_of_kind + 600  # the legend's patch


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]) -> list[httpx.Request]:
    """Requests to a server that has a map for clients with the key."""
    requests: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        if request.headers.get("authorization") != "Bearer good-key":
            return httpx.Response(401, json={"error": {"message": "a valid API key is needed"}})
        return httpx.Response(200, json=answer)

    real = httpx.Client
    monkeypatch.setattr(
        kv_map.httpx,
        "Client",
        lambda **options: real(**{**options, "transport": httpx.MockTransport(handler)}),
    )
    monkeypatch.setenv("OPENAI_API_KEY", "good-key")
    return requests


def _main(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        cli_main.main(["kv-map", *arguments])
    code = exit_info.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize(("name", "magic"), [("kv.png", PNG), ("a.SVG", SVG), ("b.pdf", PDF)])
def test_the_suffix_is_the_format(
    name: str, magic: bytes, server: list[httpx.Request], tmp_path: Path
) -> None:
    path = tmp_path / name
    assert _main(URL, "-o", str(path)) == 0
    assert path.read_bytes().startswith(magic)
    assert [str(request.url) for request in server] == [f"{URL}/debug/kv"]


def test_mistakes_are_one_line(
    server: list[httpx.Request], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("bad-key\n")
    good = ("-o", str(tmp_path / "kv.png"))
    for arguments, code, expected in [
        (("ftp://x", *good), 2, "URL must begin with http"),
        ((URL, "-o", str(tmp_path / "kv.gif")), 2, "--output must end with .png, .svg, .pdf"),
        ((URL, *good, "--api-key-file", str(tmp_path / "none")), 2, "--api-key-file"),
        ((URL, *good, "--api-key-file", str(key_file)), 1, "HTTP 401: a valid API key is needed"),
        ((URL, *good, "--api-key-env", "NONE_SUCH"), 1, "HTTP 401"),
        ((URL, "-o", str(tmp_path / "no" / "kv.png")), 1, "cannot be written: No such file"),
    ]:
        assert _main(*arguments) == code, arguments
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("lightserve: error: ") and expected in err
    assert not (tmp_path / "kv.png").exists()


def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "lightserve.kv_map")
    monkeypatch.setitem(sys.modules, "matplotlib.artist", None)
    assert _main(URL, "-o", str(tmp_path / "kv.png")) == 2
    error = capsys.readouterr().err
    command = f"{shlex.quote(sys.executable)} -m pip install 'matplotlib>="
    assert f"matplotlib is missing: {command}" in error and "httpx" in error
    assert "lightserve[" not in error


def test_the_command_imports_nothing_heavy_before_it_runs() -> None:
    script = (
        "import sys, lightserve.cli.main, lightserve.cli.kv_map\n"
        "heavy = {'matplotlib', 'httpx', 'numpy'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
