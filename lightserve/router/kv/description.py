"""From the router's own state to the map of the KV pool that operators see."""

from __future__ import annotations

from collections.abc import Iterable

from lightserve.messages.kv_map import KVPool
from lightserve.router.kv.slot_map import SlotUser, describe_pool
from lightserve.router.kv.store import KVStore
from lightserve.router.request import Request


def describe_kv(requests: Iterable[Request], store: KVStore) -> KVPool:
    """Return what every slot is for.

    Args:
        requests: all that may hold slots: running, paused, and ended ones that a plan in flight
            still names; others do no harm.
        store: where they hold them.
    """
    nodes = () if store.tree is None else store.tree.nodes()
    return describe_pool(
        store.num_slots,
        [_user(request) for request in requests if request.slots is not None],
        [node.slots for node in nodes if node.slots is not None],
        block_size=store.options.block_size,
        num_host_slots=store.checkpoints.num_slots,
        num_used_host_slots=store.checkpoints.num_used,
    )


def _user(request: Request) -> SlotUser:
    host = request.host
    saved = range(0) if host is None else range(host.start, host.end)
    return SlotUser(request.held_slots, request.request_class, saved)
