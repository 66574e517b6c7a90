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
from lightserve.channels import Codec
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
from lightserve.messages.common import Int32Array
from lightserve.messages.frontend_router import (
    MAX_SLOTS_BYTES,
    ClassSlots,
    DescribeKV,
    FrontendMessage,
    KVMap,
    KVPool,
    PackedKinds,
    RouterMessage,
    pack_kinds,
    unpack_kinds,
)
from lightserve.router.kv.kv_map import SlotUser, describe_pool, slot_kinds
from lightserve.types import RequestClass, SlotKind

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
    name: str,
    magic: bytes,
    server: list[httpx.Request],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    assert _main(URL, "-o", str(path)) == 0
    assert path.read_bytes().startswith(magic)
    assert capsys.readouterr().out.startswith(f"{path}: ")
    assert [str(request.url) for request in server] == [f"{URL}/debug/kv"]


def test_kinds_without_slots_are_not_told() -> None:
    assert (
        _pool([0] * 1997 + [3, 3, 1], 16).summary()
        == "2,000 slots: 1,997 free, 1 real-time, 2 cached"
    )


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


# The map of the KV pool: kinds and figures against a slot-by-slot count, and their encoding.

RT, BE = RequestClass


def _slots(*slots: int) -> Int32Array:
    return np.array(slots, dtype=np.int32)


@st.composite
def pools(draw: st.DrawFn) -> tuple[int, list[SlotUser], list[Int32Array]]:
    """Any pool, whether the book-keeping could come to it or not."""
    num_slots = draw(st.integers(1, 40))
    some = st.lists(st.integers(0, num_slots - 1), unique=True).map(lambda s: _slots(*s))
    positions = st.tuples(st.integers(0, 45), st.integers(0, 45)).map(
        lambda pair: range(min(pair), max(pair))
    )
    user = st.builds(SlotUser, some, st.sampled_from(RequestClass), positions)
    return num_slots, draw(st.lists(user, max_size=5)), draw(st.lists(some, max_size=3))


def _kind_of(slot: int, users: list[SlotUser], cached: list[Int32Array]) -> SlotKind:
    mine = [user for user in users if slot in user.slots]
    if not mine:
        return SlotKind.CACHED if any(slot in held for held in cached) else SlotKind.FREE
    if len(mine) == 1 and list(mine[0].slots).index(slot) in mine[0].saved:
        return SlotKind.CHECKPOINTED
    return SlotKind.RT if any(user.request_class is RT for user in mine) else SlotKind.BE


def _run_lengths(slots: list[int]) -> list[int]:
    """Walk along a request's slots; a run ends where the next slot is not its next one."""
    lengths: list[int] = []
    step = 0
    for i, slot in enumerate(slots):
        before = slot - slots[i - 1] if i else 0
        if before in (1, -1) and step in (0, before):
            lengths[-1] += 1
            step = before
        else:
            lengths.append(1)
            step = 0
    return lengths


@given(pool=pools(), block_size=st.sampled_from([1, 2, 4, 16]))
def test_every_slot_and_figure_is_what_a_count_says(
    pool: tuple[int, list[SlotUser], list[Int32Array]], block_size: int
) -> None:
    num_slots, users, cached = pool
    expected = [_kind_of(slot, users, cached) for slot in range(num_slots)]
    assert slot_kinds(num_slots, users, cached).tolist() == expected
    described = describe_pool(num_slots, users, cached, block_size=block_size)
    assert described.slots is not None
    runs = unpack_kinds(described.slots)
    assert np.repeat(*runs).tolist() == expected
    assert described.num_slots_of_kind == [expected.count(kind) for kind in SlotKind]

    by_class = {
        kind: {s for u in users if u.request_class is kind for s in u.slots} for kind in (RT, BE)
    }
    by_class[BE] -= by_class[RT]
    for request_class, slots in by_class.items():
        assert described.classes[request_class] == ClassSlots(
            sum(user.request_class is request_class and len(user.slots) > 0 for user in users),
            len(slots),
            sum(expected[slot] is SlotKind.CHECKPOINTED for slot in slots),
        )
    blocks = [range(num_slots)[i : i + block_size] for i in range(0, num_slots, block_size)]
    assert described.num_free_blocks == sum(
        all(expected[slot] is SlotKind.FREE for slot in block) for block in blocks
    )
    assert described.num_shared_blocks == sum(
        all(by_class[kind].intersection(block) for kind in (RT, BE)) for block in blocks
    )
    lengths = [length for user in users for length in _run_lengths(user.slots.tolist())]
    assert described.mean_run_length == (sum(lengths) / len(lengths) if lengths else 0.0)


def test_a_small_pool_in_full() -> None:
    """Two blocks of 4: a real-time request up from 0, a paused best-effort one down from 7."""
    users = [SlotUser(_slots(0, 1, 4), RT), SlotUser(_slots(7, 6, 5), BE, range(2, 9))]
    described = describe_pool(
        8, users, [_slots(0, 2)], block_size=4, num_host_slots=10, num_used_host_slots=7
    )
    assert described == KVPool(
        num_slots=8,
        block_size=4,
        num_slots_of_kind=[1, 3, 2, 1, 1],
        classes={RT: ClassSlots(1, 3, 0), BE: ClassSlots(1, 3, 1)},
        num_free_blocks=0,
        num_shared_blocks=1,
        mean_run_length=2.0,
        num_host_slots=10,
        num_used_host_slots=7,
        slots=PackedKinds(bytes([1, 1, 3, 0, 1, 4, 2, 2]), b""),
    )


@given(kinds=st.lists(st.tuples(st.sampled_from(SlotKind), st.integers(1, 30)), max_size=20))
def test_packing_keeps_every_slot(kinds: list[tuple[SlotKind, int]]) -> None:
    slots = np.repeat(
        np.array([kind for kind, _ in kinds], dtype=np.uint8), [length for _, length in kinds]
    )
    packed = pack_kinds(slots)
    assert packed is not None
    assert len(packed.kinds) + len(packed.lengths) <= len(slots)
    assert np.repeat(*unpack_kinds(packed)).tolist() == slots.tolist()


def test_the_largest_pools_fit_into_a_frame() -> None:
    codec = Codec[RouterMessage, RouterMessage](send_type=RouterMessage, recv_type=RouterMessage)
    alternating = np.tile(
        np.array([SlotKind.RT, SlotKind.BE], dtype=np.uint8), MAX_SLOTS_BYTES // 2
    )
    one_kind = np.zeros(100_000_000, dtype=np.uint8)
    template = describe_pool(0, [], [], block_size=1)
    for kinds, num_runs in ((alternating, len(alternating)), (one_kind, 1)):
        packed = pack_kinds(kinds)
        assert packed is not None
        values = {name: getattr(template, name) for name in template.__struct_fields__}
        message = KVMap(query_id=1, pool=KVPool(**{**values, "slots": packed}))
        received = codec.decode(codec.encode(message))
        assert isinstance(received, KVMap)
        assert received.pool is not None and received.pool.slots is not None
        runs = unpack_kinds(received.pool.slots)
        assert (len(runs.kinds), int(runs.lengths.sum())) == (num_runs, len(kinds))
    assert pack_kinds(np.append(alternating, alternating[:1])) is None


def test_a_map_whose_parts_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match="2 runs with 1 lengths"):
        unpack_kinds(PackedKinds(b"\0\1", b"\1\0\0\0"))


def test_the_question_and_the_answer_belong_to_the_link() -> None:
    assert isinstance(DescribeKV(query_id=1), FrontendMessage)
    assert isinstance(KVMap(query_id=1, pool=None), RouterMessage)
