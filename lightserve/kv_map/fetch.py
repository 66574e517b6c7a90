"""Asks a server for the map of its KV pool: GET /debug/kv, as docs/api.md describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import httpx
import msgspec
import numpy as np
import numpy.typing as npt

from lightserve.chat.client import refusal_text, unreachable_text
from lightserve.errors import ConfigError, KVMapError
from lightserve.types import SlotKind

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
