"""Events of the prefix cache in blocks, for prefix-aware gateways.

The cache knows single tokens; gateways know blocks of a fixed number of them, named by a hash of
all tokens up to their end. A block is there once the KV of its last token is, since a resident
node's parent is resident:

    root ── [0 … 39] ── [40 … 50]        blocks of 16: [0, 16), [16, 32) with the first node,
                                         [32, 48) with the second

The structs are vLLM's (`vllm.distributed.kv_events`), so that what reads its events reads these.
Pure: `Publisher` of `lightserve.router.kv_publisher` sends them.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np

from lightserve.messages.common import Int32Array
from lightserve.messages.images import text_tokens
from lightserve.router.kv.prefix_node import PrefixKey, PrefixNode, path_of

MEDIUM = "GPU"
"""Where blocks lie, in vLLM's words for the memory that the engine computes from, also on CPUs."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """The KV of consecutive blocks is there."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Hash of the block before the first; None: the blocks begin a prompt."""
    token_ids: list[int]
    """Tokens of all these blocks."""
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """For each block what besides its tokens its hash is made of: the salt of the API key, of the
    first block of a prompt."""


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Blocks that have left the cache."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """No block is there any more."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class BlockEvents:
    """Collects the events of one prefix tree, which calls it at each change."""

    def __init__(self, block_size: int) -> None:
        """`block_size`: tokens of a block."""
        self._block_size = block_size
        self._events: list[BlockEvent] = []

    def stored(self, key: PrefixKey, node: PrefixNode) -> None:
        """Note that a node has become resident."""
        tokens, first, hashes = self._blocks_of(key, node)
        if not hashes[first:]:
            return
        extra_keys: list[tuple[Any, ...] | None] | None = None
        if key and first == 0:
            extra_keys = [(key,), *[None] * (len(hashes) - 1)]
        size = self._block_size
        self._events.append(
            BlockStored(
                block_hashes=hashes[first:],
                parent_block_hash=hashes[first - 1] if first else None,
                token_ids=tokens[
                    first * self._block_size : len(hashes) * self._block_size
                ].tolist(),
                block_size=size,
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
                extra_keys=extra_keys,
            )
        )

    def removed(self, key: PrefixKey, node: PrefixNode) -> None:
        """Note that a node is not resident any more; nothing below it is."""
        _, first, hashes = self._blocks_of(key, node)
        if hashes[first:]:
            self._events.append(BlockRemoved(block_hashes=hashes[first:], medium=MEDIUM))

    def take(self) -> list[BlockEvent]:
        """Return what has happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _blocks_of(self, key: PrefixKey, node: PrefixNode) -> tuple[Int32Array, int, list[int]]:
        """Return tokens up to the end of a node, its first block, and the hashes of all.

        The first block is that which ends in the node first. Without one nothing is hashed.
        """
        path = list(path_of(node))[::-1]
        size = self._block_size
        end = sum(len(part.tokens) for part in path)
        first = (end - len(node.tokens)) // size
        if end // size == first:
            return node.tokens, 0, []
        tokens = np.concatenate([part.tokens for part in path])
        tokens = tokens[: text_tokens(tokens)]  # gateways do not know the ids of images
        return tokens, first, block_hashes(key, tokens, size)


def block_hashes(key: PrefixKey, tokens: Int32Array, block_size: int) -> list[int]:
    """Return the 64-bit hash of each whole block, int32 [n] tokens from a prompt's beginning.

    A block's hash is that of the block before and of its own tokens, so that it names the whole
    prefix; every server has the same.
    """
    hashes: list[int] = []
    before = hashlib.sha256(key.encode()).digest()
    whole = tokens[: len(tokens) // block_size * block_size].astype("<i4", copy=False)
    data = np.ascontiguousarray(whole).tobytes()
    for start in range(0, len(data), 4 * block_size):
        before = hashlib.sha256(before + data[start : start + 4 * block_size]).digest()
        hashes.append(int.from_bytes(before[:8], "big"))
    return hashes
