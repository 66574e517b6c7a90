"""What happened to requests' KV, counted per class since boot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class KVCounters:
    """Counters of one request class; tokens are those of its own requests."""

    num_pauses: int = 0
    """Times that a running request lost its row or memory to another."""
    num_evictions: int = 0
    """Times that a request, running or paused, lost KV to another."""
    taken_tokens: int = 0
    """Tokens whose slots went to another request, and which are on the host."""
    saved_tokens: int = 0
    """Those of them that had to be copied in the step that took them."""
    ahead_tokens: int = 0
    """Tokens that were copied to the host before anybody needed their slots."""
    loaded_tokens: int = 0
    """Tokens that came back from the host."""
    lost_tokens: int = 0
    """Tokens whose KV was given up, and has to be computed again unless it is found as cache."""
