"""What all kernels of `sampling` share: rows, weights, random numbers, keys.

All probabilities are weights exp((logit - largest) / temperature), float32, which are summed in
float64 beyond a chunk; a row's weights are never divided by their sum.

Keys are 64-bit integers that order tokens by rising logit, equal ones by falling id, so that all
are different and "the most probable tokens" has one meaning.

    63 ............. 32 31 ........... 0
     order of the logit  0xFFFFFFFF - id
"""

from __future__ import annotations

import triton
import triton.language as tl

_MIN_TEMPERATURE = tl.constexpr(1e-6)
BELOW_ONE = tl.constexpr(1 - 1e-15)


@triton.jit
def row_of(own_ptr, adjusted_ptr, source_ptr, row, stride, vocab_size, IS_ADJUSTED):
    """Return where a row's logits are, for `logits_at`: where the model's begin, where those that
    its options changed do, and a number that is negative if there are none."""
    own = own_ptr + row.to(tl.int64) * stride
    adjusted = adjusted_ptr
    source = -1
    if IS_ADJUSTED:
        source = tl.load(source_ptr + row)
        adjusted = adjusted_ptr + tl.maximum(source, 0).to(tl.int64) * vocab_size
    return own, adjusted, source


@triton.jit
def logits_at(own, adjusted, source, IS_ADJUSTED: tl.constexpr, tokens, vocab_size):
    """Return a row's logits, float32; minus infinity beyond the vocabulary.

    The model's are of its own type, changed ones float32; only one of the two is read.
    """
    if not IS_ADJUSTED:
        return tl.load(own + tokens, mask=tokens < vocab_size, other=-float("inf")).to(tl.float32)
    end = tl.where(source < 0, vocab_size, 0)
    x = tl.load(own + tokens, mask=tokens < end, other=-float("inf")).to(tl.float32)
    end = tl.where(source < 0, 0, vocab_size)
    changed = tl.load(adjusted + tokens, mask=tokens < end, other=-float("inf"))
    return tl.where(source < 0, x, changed)


@triton.jit
def weights_of(x, top, temperature):
    """Return the weights of logits, float32, in a row whose largest is `top`."""
    return tl.exp((x - top) / tl.maximum(temperature, _MIN_TEMPERATURE))


@triton.jit
def _mix(state):
    """The finaliser of SplitMix64, uint64; as in worker.sampling.random_draw."""
    state = state + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def uniform(states_ptr, positions_ptr, row):
    """Return a row's number in [0, 1), float64."""
    state = tl.load(states_ptr + row).to(tl.uint64)
    position = tl.load(positions_ptr + row).to(tl.uint64)
    return (_mix(state ^ position) >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def chunk_totals(largest, total_ptr, kept_ptr, at, there, top, temperature, min_p, HAS_KEPT):
    """Return each chunk's sum of weights without what min-p drops, float64 [BLOCK_C]."""
    totals = tl.load(total_ptr + at, mask=there, other=0.0)
    totals = tl.where(largest > -float("inf"), totals * weights_of(largest, top, temperature), 0.0)
    if HAS_KEPT:
        kept = tl.load(kept_ptr + at, mask=there, other=0.0)
        totals = tl.where(min_p > 0.0, kept, totals)
    return totals.to(tl.float64)


@triton.jit
def key_of(x, token):
    """Return the key, int64, of a logit and its token."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # there are two zeros
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))


@triton.jit
def logit_of(key):
    """Return a key's logit."""
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def token_of(key):
    """Return a key's token, int64."""
    return (0xFFFFFFFF - (key & 0xFFFFFFFF)).to(tl.int64)
