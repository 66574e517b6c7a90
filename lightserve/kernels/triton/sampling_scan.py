"""Kernels of `sampling` that read the logits in chunks; it says what each is for."""

from __future__ import annotations

import triton
import triton.language as tl

from lightserve.kernels.triton.launch import launched

# What all kernels of `sampling` share: rows, weights, random numbers, keys.
#
# All probabilities are weights exp((logit - largest) / temperature), float32, which are summed in
# float64 beyond a chunk; a row's weights are never divided by their sum.
#
# Keys are 64-bit integers that order tokens by rising logit, equal ones by falling id, so that all
# are different and "the most probable tokens" has one meaning.
#
#     63 ............. 32 31 ........... 0
#      order of the logit  0xFFFFFFFF - id

_MIN_TEMPERATURE = tl.constexpr(1e-6)
BELOW_ONE = tl.constexpr(1 - 1e-15)


@triton.jit
def row_of(own_ptr, adjusted_ptr, source_ptr, row, stride, vocab_size, IS_ADJUSTED):
    """Return where a row's logits are, for `logits_at`: where the model's begin, where those that
    its options changed do, a number that is negative if there are none, and the vocabulary's size.
    """
    own = own_ptr + row.to(tl.int64) * stride
    adjusted = adjusted_ptr
    source = -1
    if IS_ADJUSTED:
        source = tl.load(source_ptr + row)
        adjusted = adjusted_ptr + tl.maximum(source, 0).to(tl.int64) * vocab_size
    return own, adjusted, source, vocab_size


@triton.jit
def logits_at(logits, IS_ADJUSTED: tl.constexpr, tokens):
    """Return logits of a row as `row_of` has it, float32; minus infinity beyond the vocabulary.

    The model's are of its own type, changed ones float32; only one of the two is read.
    """
    own, adjusted, source, vocab_size = logits
    end = vocab_size
    if IS_ADJUSTED:
        end = tl.where(source < 0, vocab_size, 0)
    x = tl.load(own + tokens, mask=tokens < end, other=-float("inf")).to(tl.float32)
    if IS_ADJUSTED:
        end = tl.where(source < 0, 0, vocab_size)
        changed = tl.load(adjusted + tokens, mask=tokens < end, other=-float("inf"))
        x = tl.where(source < 0, x, changed)
    return x


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
    """Return each chunk's sum of weights without the tokens that min-p drops, float64 [BLOCK_C]."""
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


@launched
@triton.jit
def scan_kernel(
    own_ptr, adjusted_ptr, source_ptr, temperature_ptr, largest_ptr, first_ptr, total_ptr,
    finite_ptr, peaks_ptr, stride, vocab_size, num_chunks, IS_ADJUSTED: tl.constexpr,
    HAS_TOTALS: tl.constexpr, HAS_PEAKS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program per chunk and row: the only pass of greedy and plain sampling."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    logits = row_of(own_ptr, adjusted_ptr, source_ptr, row, stride, vocab_size, IS_ADJUSTED)
    num_groups: tl.constexpr = CHUNK // GROUP
    groups, members = tl.arange(0, num_groups), tl.arange(0, GROUP)
    tokens = chunk * CHUNK + groups[:, None] * GROUP + members[None, :]
    x = logits_at(logits, IS_ADJUSTED, tokens)
    is_fine = (x < float("inf")) & ((x > -float("inf")) | (logits[2] >= 0) | (tokens >= vocab_size))
    peaks = tl.max(x, axis=1)
    largest = tl.max(peaks, axis=0)
    first = tl.min(tl.min(tl.where(x == largest, tokens, vocab_size), axis=1), axis=0)
    at = row * num_chunks + chunk
    tl.store(largest_ptr + at, largest)
    tl.store(first_ptr + at, first)
    tl.store(finite_ptr + at, tl.min(tl.min(is_fine.to(tl.int32), axis=1), axis=0))
    if HAS_TOTALS:
        # A chunk without any token that may be drawn has no largest to take off.
        top = tl.where(largest > -float("inf"), largest, 0.0)
        weights = weights_of(x, top, tl.load(temperature_ptr + row))
        tl.store(total_ptr + at, tl.sum(tl.sum(weights, axis=1), axis=0))
    if HAS_PEAKS:
        tl.store(peaks_ptr + at.to(tl.int64) * num_groups + groups, peaks)


@triton.jit
def _pick(weights, target, indices, END):
    """Return the first index at which the running sum of weights exceeds the target.

    Roundings of the running sum never choose an index of weight 0, nor one that is not there.
    """
    exceeds = (tl.cumsum(weights, axis=0) > target) & (weights > 0.0)
    last = tl.max(tl.where(weights > 0.0, indices, 0), axis=0)
    return tl.minimum(tl.min(tl.where(exceeds, indices, END), axis=0), last)


@launched
@triton.jit
def draw_kernel(
    own_ptr, adjusted_ptr, source_ptr, temperature_ptr, min_p_ptr, top_p_ptr, top_k_ptr, states_ptr,
    positions_ptr, largest_ptr, first_ptr, total_ptr, finite_ptr, kept_ptr, token_ptr,
    is_finite_ptr, stride, vocab_size, num_chunks, IS_ADJUSTED: tl.constexpr,
    HAS_KEPT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program per row: a chunk by the chunks' sums, then a token of it, read again."""
    row = tl.program_id(0)
    chunks = tl.arange(0, BLOCK_C)
    there = chunks < num_chunks
    at = row * num_chunks + chunks
    largest = tl.load(largest_ptr + at, mask=there, other=-float("inf"))
    first = tl.load(first_ptr + at, mask=there, other=vocab_size)
    is_fine = tl.min(tl.load(finite_ptr + at, mask=there, other=1), axis=0) != 0
    top = tl.max(largest, axis=0)
    is_fine = is_fine & (top > -float("inf"))
    token = tl.min(tl.where(largest == top, first, vocab_size), axis=0)
    temperature = tl.load(temperature_ptr + row)
    is_whole = (tl.load(top_k_ptr + row) == 0) & (tl.load(top_p_ptr + row) >= 1.0)
    if is_fine & (temperature > 0.0) & is_whole:
        min_p = tl.load(min_p_ptr + row)
        totals = chunk_totals(
            largest, total_ptr, kept_ptr, at, there, top, temperature, min_p, HAS_KEPT
        )
        everything = tl.sum(totals, axis=0)
        target = uniform(states_ptr, positions_ptr, row) * everything
        target = tl.minimum(target, everything * BELOW_ONE)
        chunk = _pick(totals, target, chunks, BLOCK_C)
        target -= tl.sum(tl.where(chunks < chunk, totals, 0.0), axis=0)
        logits = row_of(own_ptr, adjusted_ptr, source_ptr, row, stride, vocab_size, IS_ADJUSTED)
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        x = logits_at(logits, IS_ADJUSTED, tokens)
        weights = weights_of(x, top, temperature)
        weights = tl.where(weights >= min_p, weights, 0.0).to(tl.float64)
        token = _pick(weights, target, tokens, vocab_size)
    tl.store(token_ptr + row, tl.where(is_fine, token, 0).to(tl.int64))
    tl.store(is_finite_ptr + row, is_fine)


@launched
@triton.jit
def cut_kernel(
    temperature_ptr, top_p_ptr, top_k_ptr, largest_ptr, total_ptr, peaks_ptr, cut_ptr, number_ptr,
    vocab_size, num_chunks, num_groups, CANDIDATES: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """One program per row: a logit that enough tokens reach, but not too many.

    Any cut is right, as the tokens that it leaves are checked; these are meant to be enough mostly.
    top-k: at least k groups have a token that reaches it, hence at least k tokens do.
    top-p: fewer than CANDIDATES tokens can each have more than 1 / CANDIDATES of everything.
    """
    row = tl.program_id(0)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    cut = float("inf")
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0)):
        cut = -float("inf")
        if (top_k > 0) & (top_k < vocab_size):
            if top_k > CANDIDATES:
                cut = float("inf")
            elif vocab_size > CANDIDATES:
                groups = tl.arange(0, BLOCK_G)
                peaks = tl.load(
                    peaks_ptr + row.to(tl.int64) * num_groups + groups,
                    mask=groups < num_groups,
                    other=-float("inf"),
                )
                is_there = peaks > -float("inf")
                if tl.sum(is_there.to(tl.int32), axis=0) >= top_k:
                    low = tl.min(tl.where(is_there, peaks, float("inf")), axis=0)
                    high = tl.max(peaks, axis=0)
                    for _ in range(14):
                        middle = 0.5 * low + 0.5 * high
                        if tl.sum((peaks >= middle).to(tl.int32), axis=0) >= top_k:
                            low = middle
                        else:
                            high = middle
                    cut = low
        elif vocab_size > CANDIDATES:
            chunks = tl.arange(0, BLOCK_C)
            there = chunks < num_chunks
            at = row * num_chunks + chunks
            largest = tl.load(largest_ptr + at, mask=there, other=-float("inf"))
            top = tl.max(largest, axis=0)
            totals = tl.load(total_ptr + at, mask=there, other=0.0)
            weights = weights_of(largest, top, temperature)
            totals = tl.where(largest > -float("inf"), totals * weights, 0.0)
            cut = top + temperature * tl.log(tl.sum(totals, axis=0) * 1.001 / CANDIDATES)
    tl.store(cut_ptr + row, cut)
    tl.store(number_ptr + 2 * row, 0)


@launched
@triton.jit
def gather_kernel(
    own_ptr, adjusted_ptr, source_ptr, temperature_ptr, min_p_ptr, largest_ptr, cut_ptr, number_ptr,
    keys_ptr, kept_ptr, stride, vocab_size, num_chunks, IS_ADJUSTED: tl.constexpr,
    CANDIDATES: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program per chunk and row; reads the chunk only if something of it is wanted."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
    cut = tl.load(cut_ptr + row)
    at = row * num_chunks + chunk
    largest = tl.load(largest_ptr + at)
    sums = (min_p > 0.0) & (temperature > 0.0)
    if sums | (largest >= cut):
        chunks = tl.arange(0, BLOCK_C)
        there = chunks < num_chunks
        all_largest = tl.load(
            largest_ptr + row * num_chunks + chunks, mask=there, other=-float("inf")
        )
        top = tl.max(all_largest, axis=0)
        logits = row_of(own_ptr, adjusted_ptr, source_ptr, row, stride, vocab_size, IS_ADJUSTED)
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        x = logits_at(logits, IS_ADJUSTED, tokens)
        weights = weights_of(x, top, temperature)
        is_kept = (weights >= min_p) & (x > -float("inf"))
        if sums:
            tl.store(kept_ptr + at, tl.sum(tl.where(is_kept, weights, 0.0), axis=0))
        is_candidate = is_kept & (x >= cut)
        number = tl.sum(is_candidate.to(tl.int32), axis=0)
        if number > 0:
            # Places depend on which program is first; nothing that is done with keys does.
            base = tl.atomic_add(number_ptr + 2 * row, number)
            place = base + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
            tl.store(
                keys_ptr + row.to(tl.int64) * (2 * CANDIDATES) + place,
                key_of(x, tokens),
                mask=is_candidate & (place < CANDIDATES),
            )
