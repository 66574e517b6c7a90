"""A pass's operations, noted once and run by one call of the native core.

The layers run once on tensors whose contents mean nothing. Their calls of native kernels are noted
instead of made: which function of the core, with which arguments. An argument is an address in a
weight or a KV pool, which stays as it is; a place in a pass's inputs or in a buffer that the layers
made; a number of rows; the number of threads; or a number that never changes. So nothing is said
twice about what a layer does, and the core computes what it would one by one.

    noted     linear(x + 0, rows T, 0x7f..weight, …, buffer 3 + 0, threads)
    run       places = [T, R, L, K, threads, address of x, …, addresses of buffers]: patch, call

All that torch is asked for meanwhile goes through `Notes`: making tensors, looking at them in
another shape, choosing rows by lists of tokens, and operations on single numbers that are rounded
once, which the core does to torch's bit (sums, products, copies, ReLU). Anything else ends the
attempt, and a second one with other numbers of rows has to give the same notes, or a choice by the
number of rows would stay what it was the first time.

With several ranks the calls are cut where their results are added: so many calls of the core, with
the sums between them.
"""

from __future__ import annotations

import ctypes
import math
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightserve.kernels.cpu.core import Core, Element, Noted
from lightserve.kernels.interface import AttentionBatch, NotRecordableError, PassInputs, Summing
from lightserve.kernels.weights import KeptInputs

_TOKENS, _ROWS, *_LISTED, _THREADS, _FIRST_INPUT = range(6)
"""Places whose values count; those behind them are addresses: inputs, output, buffers."""
_SIZES = ((67, 41, 23, 13), (19, 7, 5, 3))
"""Tokens, rows, tokens that go on and tokens whose inputs are kept of the passes that are noted: no
two alike."""
_ALIGNMENT = 64
_CALL_BYTES = 3 * 8
"""Bytes of a call as the core has it."""

_ATEN = torch.ops.aten
_MAKING = {_ATEN.empty.memory_format, _ATEN.new_empty.default}
_VIEWING = {
    _ATEN.view.default,
    _ATEN._unsafe_view.default,
    _ATEN._reshape_alias.default,
    _ATEN.reshape.default,
    _ATEN.alias.default,
    _ATEN.slice.Tensor,
    _ATEN.chunk.default,
    _ATEN.split.Tensor,
    _ATEN.split_with_sizes.default,
    _ATEN.unsqueeze.default,
    _ATEN.squeeze.dim,
}
_ELEMENTS: Mapping[Any, Element] = {
    _ATEN.add.Tensor: Element.SUM,
    _ATEN.add_.Tensor: Element.SUM,
    _ATEN.mul.Tensor: Element.PRODUCT,
    _ATEN.mul_.Tensor: Element.PRODUCT,
    _ATEN.copy_.default: Element.COPY,
    _ATEN.clone.default: Element.COPY,
    _ATEN.contiguous.default: Element.COPY,
    _ATEN.relu.default: Element.RELU,
}
"""Operations on tensors [rows, …] of one type and shape; a product's second may be a number."""


class _Place(NamedTuple):
    """An argument that differs from pass to pass: a place's value, and an offset."""

    place: int
    """One of the above, or `_FIRST_INPUT` and the number of a region."""
    offset: int = 0


class _Call(NamedTuple):
    function: int
    words: tuple[int | _Place, ...]
    rows: int
    """The place that counts its rows."""


class _Sum(NamedTuple):
    """A sum over ranks, of a whole tensor that the layers made."""

    words: tuple[_Place, ...]
    """Its place."""
    rows: int
    """The place that counts its rows."""
    shape: tuple[int, ...]
    """Shape of a row."""
    dtype: torch.dtype
    """Type of its numbers."""


class _Region(NamedTuple):
    """Memory of an input, or of a tensor that the layers made."""

    number: int
    start: int
    end: int
    counter: int
    """The place that counts its rows."""
    row_bytes: int


class Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The calls that layers make of the core and of torch."""

    def __init__(
        self, core: Core, level: int, inputs: PassInputs, sizes: tuple[int, int, int, int]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call | _Sum] = []
        self.made: list[_Region] = []
        self.core, self._level = core, level
        self._counts = dict(zip(sizes, (_TOKENS, _ROWS, *_LISTED), strict=True))
        self._regions: list[_Region] = []
        self._kept: list[object] = [inputs]
        """So that no address is another one's later on."""
        self._lists = [own.data_ptr() for own in _lists(inputs) if own is not None]
        extents = _extents(inputs)
        for number, (address, num_bytes) in enumerate(extents):
            self._add(_Region(number, address, address + num_bytes, _TOKENS, 0))
        self._num_inputs = len(extents)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See `TorchDispatchMode`: nothing here is compiled. To tell its compiler so, torch would
        import it: a second, and a hundred megabytes. A torch that does not ask (2.11 to 2.13 do)
        imports it, and all else stays as it is.
        """
        return False

    def note(self, noted: Noted, arguments: Sequence[Any]) -> int:
        """Note a call; say that its arguments were good."""
        words: list[int | _Place] = []
        rows = _TOKENS
        for letter, value in zip(noted.arguments, arguments, strict=True):
            if letter == "n":
                rows = self._count(value)
                words.append(_Place(rows))
            elif letter == "t":
                words.append(_Place(_THREADS))
            elif letter == "p":
                words.append(self._word(value))
            elif letter == "f":
                words.append(struct.unpack("<q", struct.pack("<fi", value, 0))[0])
            else:
                words.append(int(value))
        self.calls.append(_Call(noted.by_words, tuple(words), rows))
        return 1

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """See `TorchDispatchMode`."""
        if func in _VIEWING:
            return self._view(args[0], func(*args, **kwargs or {}))
        if func in _MAKING:
            return self._keep(func(*args, **kwargs or {}))
        if func is _ATEN.index_select.default:
            return self._gather(*args)
        if func is _ATEN.contiguous.default and args[0].is_contiguous():
            return args[0]
        if func in _ELEMENTS:
            return self._elements(func, args, kwargs or {})
        raise NotRecordableError(f"they ask torch for {func}")

    def _view(self, source: Tensor, viewed: Any) -> Any:
        """Return a view of `source` in another shape; a copy is refused."""
        own = source.untyped_storage().data_ptr()
        for one in viewed if isinstance(viewed, (list, tuple)) else [viewed]:
            if one.untyped_storage().data_ptr() != own:
                raise NotRecordableError("they copy a tensor into another shape")
        return viewed

    def region_of(self, address: int) -> _Region | None:
        """Return the region that has a byte at `address`."""
        index = bisect_right(self._regions, address, key=lambda region: region.start) - 1
        if index >= 0 and address < self._regions[index].end:
            return self._regions[index]
        return None

    def _gather(self, source: Tensor, dim: int, index: Tensor) -> Tensor:
        if dim != 0 or index.data_ptr() not in self._lists or not _has_rows(source):
            raise NotRecordableError("they look up rows by other than the wanted or kept tokens")
        out = self._keep(source.new_empty(len(index), *source.shape[1:]))
        size, stride = source.element_size(), source.stride(0)
        self.note(
            self.core.gather,
            (
                *(source.data_ptr(), len(source), stride * size, source[0].numel() * size),
                *(index.data_ptr(), len(index), out.data_ptr()),
            ),
        )
        return out

    def _elements(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Note an operation on single numbers; see `_ELEMENTS`."""
        element, source, factor = _ELEMENTS[func], args[0], 0.0
        b: Any = None
        if func is _ATEN.copy_.default:
            source = args[1]
        elif len(args) > 1:
            b = args[1]
        if element is Element.PRODUCT and isinstance(b, (int, float)):
            element, b, factor = Element.SCALED, None, float(b)
        operations = {torch.float32: self.core.f32, torch.bfloat16: self.core.bf16}
        tensors = [source, *([] if b is None else [b]), args[0]]
        if (
            kwargs.keys() - {"memory_format"}
            or kwargs.get("memory_format") not in (None, torch.contiguous_format)
            or not all(isinstance(one, Tensor) and _has_rows(one) for one in tensors)
            or len({(one.dtype, one.shape) for one in tensors}) > 1
            or source.dtype not in operations
        ):
            raise NotRecordableError(f"they ask torch for {func} of other than rows")
        is_in_place = func.__name__.split(".")[0].endswith("_")
        out = args[0] if is_in_place else self._keep(torch.empty(source.shape, dtype=source.dtype))
        self.note(
            operations[source.dtype].noted["elements"],
            (
                element,
                *(source.data_ptr(), source.stride(0)),
                *((None, 0) if b is None else (b.data_ptr(), b.stride(0))),
                *(factor, len(source), source[0].numel()),
                *(out.data_ptr(), out.stride(0)),
                *(self._level, 0),
            ),
        )
        return out

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Note that `x` is added over the ranks, in place."""
        region = self.region_of(x.data_ptr())
        is_whole = region is not None and x.nbytes == region.end - region.start
        if region is None or region.number < self._num_inputs or not is_whole:
            raise NotRecordableError("they add a part of a tensor over the ranks")
        place = _Place(_FIRST_INPUT + region.number)
        self.calls.append(_Sum((place,), region.counter, tuple(x.shape[1:]), x.dtype))
        return x

    def _keep(self, tensor: Tensor) -> Tensor:
        """Take a tensor that was made into the regions."""
        if tensor.dim() == 0 or not tensor.is_contiguous() or not tensor.numel():
            raise NotRecordableError(f"they make a tensor of shape {list(tensor.shape)}")
        start, count = tensor.data_ptr(), self._count(len(tensor))
        number = self._num_inputs + len(self.made)
        row_bytes = tensor.nbytes // len(tensor)
        region = _Region(number, start, start + tensor.nbytes, count, row_bytes)
        self.made.append(region)
        self._add(region)
        self._kept.append(tensor)
        return tensor

    def _add(self, region: _Region) -> None:
        if region.end > region.start:
            index = bisect_right(self._regions, region.start, key=lambda other: other.start)
            self._regions.insert(index, region)

    def _count(self, value: int) -> int:
        if value not in self._counts:
            raise NotRecordableError(f"{value} rows are neither tokens nor sequences")
        return self._counts[value]

    def _word(self, address: int | None) -> int | _Place:
        if address is None:
            return 0
        region = self.region_of(address)
        if region is None:
            return address
        return _Place(_FIRST_INPUT + region.number, address - region.start)


def _has_rows(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and len(tensor) > 0 and tensor[0].is_contiguous()


_one_at_a_time = Lock()


@contextmanager
def _noting(core: Core, notes: Notes, ranks: Summing | None) -> Iterator[None]:
    """Have this thread's calls of the core noted meanwhile, whichever kernels make them.

    So are its sums over `ranks`, which no other thread uses.
    """
    own = get_ident()

    def instead(name: str, call: Callable[..., int], noted: Noted | None) -> Callable[..., int]:
        def function(*arguments: Any) -> int:
            if get_ident() != own:
                return call(*arguments)
            if noted is None:
                raise NotRecordableError(f"they ask the core for {name!r}")
            return notes.note(noted, arguments)

        return function

    with _one_at_a_time:
        before = [(operations, dict(vars(operations))) for operations in (core.f32, core.bf16)]
        if ranks is not None:
            vars(ranks)["all_reduce"] = notes.sum_over_ranks
        try:
            for operations, functions in before:
                for name, call in functions.items():
                    if callable(call):
                        noted = operations.noted.get(name)
                        setattr(operations, name, instead(name, call, noted))
            yield
        finally:
            for operations, functions in before:
                vars(operations).update(functions)
            if ranks is not None:
                del vars(ranks)["all_reduce"]


class RowNumbers(NamedTuple):
    """The rows of a batch as the core reads them."""

    numbers: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    """[count, 4]: row of the table, new tokens, context, first new token."""
    address: int
    num_rows: int


def row_numbers(batch: AttentionBatch) -> RowNumbers:
    """Return a batch's rows that have new tokens."""
    rows: RowNumbers | None = batch.prepared.get(RowNumbers)
    if rows is None:
        numbers = np.empty((len(batch.host_rows), 4), dtype=np.int64)
        numbers[:, 0] = batch.host_rows
        numbers[:, 1] = q_lens = np.array(batch.host_q_lens, dtype=np.int64)
        numbers[:, 2] = batch.host_context_lens
        numbers[:, 3] = np.cumsum(q_lens) - q_lens
        if not q_lens.all():
            numbers = numbers[q_lens > 0]
        rows = RowNumbers(numbers, numbers.ctypes.data, len(numbers))
        batch.prepared[RowNumbers] = rows
    return rows


def _lists(inputs: PassInputs) -> tuple[Tensor | None, Tensor | None]:
    """Return the lists of tokens that rows are looked up by: the wanted, and the kept ones."""
    kept = inputs.batch.kept
    return inputs.logit_rows, None if kept is None else kept.tokens


def _input_tensors(inputs: PassInputs) -> Iterator[Tensor]:
    """Return them in the order of their places; the rows' numbers stand behind them."""
    batch = inputs.batch
    if inputs.logit_rows is not None:
        yield inputs.logit_rows
    yield inputs.x
    yield from inputs.tables
    yield from (batch.positions, batch.slot_mapping, batch.req_to_slot)
    yield from (batch.rows, batch.cu_seqlens_q, batch.context_lens)
    if batch.state_slots is not None:
        yield batch.state_slots
    if batch.kept is not None:
        yield from batch.kept


def input_addresses(inputs: PassInputs) -> list[int]:
    """Return where a pass's inputs are."""
    addresses = [tensor.data_ptr() for tensor in _input_tensors(inputs)]
    runs = inputs.batch.prompt_runs()
    return [*addresses, row_numbers(inputs.batch).address, runs.ctypes.data]


def _extents(inputs: PassInputs) -> list[tuple[int, int]]:
    """Return address and bytes of each."""
    extents = [(tensor.data_ptr(), tensor.nbytes) for tensor in _input_tensors(inputs)]
    rows, runs = row_numbers(inputs.batch), inputs.batch.prompt_runs()
    return [*extents, (rows.address, rows.numbers.nbytes), (runs.ctypes.data, runs.nbytes)]


def _example(like: PassInputs, sizes: tuple[int, int, int, int]) -> PassInputs:
    """Return inputs of other numbers of rows; only their addresses and shapes mean anything."""
    num_tokens, num_rows, num_chosen, num_kept = sizes
    batch = like.batch

    def vector(size: int, of: Tensor) -> Tensor:
        return of.new_zeros(size)

    last = num_tokens - num_rows + 1
    wanted = None if like.logit_rows is None else like.logit_rows.new_zeros(num_chosen)
    kept = batch.kept
    if kept is not None:
        own, rates = (part.new_zeros(num_kept, part.shape[1]) for part in kept[1:3])
        tokens = vector(num_kept, kept.tokens)
        kept = KeptInputs(torch.empty_like(kept.is_held), own, rates, tokens)
    return PassInputs(
        like.x.new_zeros(num_tokens, like.x.shape[1]),
        AttentionBatch(
            positions=vector(num_tokens, batch.positions),
            slot_mapping=vector(num_tokens, batch.slot_mapping),
            req_to_slot=torch.empty_like(batch.req_to_slot),
            rows=vector(num_rows, batch.rows),
            cu_seqlens_q=vector(num_rows + 1, batch.cu_seqlens_q),
            context_lens=vector(num_rows, batch.context_lens),
            host_rows=[0] * num_rows,
            host_q_lens=[1] * (num_rows - 1) + [last],
            host_context_lens=[last] * num_rows,
            state_slots=None if batch.state_slots is None else torch.empty_like(batch.state_slots),
            kept=kept,
        ),
        tuple(table.new_zeros(num_tokens, table.shape[1]) for table in like.tables),
        wanted,
    )


class _Noted(NamedTuple):
    """Everything on which two attempts have to agree."""

    calls: list[_Call | _Sum]
    buffers: list[tuple[int, int]]
    """Place that counts the rows of each tensor that was made, and a row's bytes."""
    output: int
    """Number of the tensor that is returned."""
    shape: tuple[int, ...]
    """Shape of a row of it."""
    dtype: torch.dtype
    """Type of its numbers."""


@torch.inference_mode()
def _note(
    notes: Notes, layers: Callable[[PassInputs], Tensor], inputs: PassInputs, ranks: Summing | None
) -> _Noted:
    with _noting(notes.core, notes, ranks), notes:
        output = layers(inputs)
    region = notes.region_of(output.data_ptr())
    num_inputs = notes._num_inputs
    if region is None or region.number < num_inputs or not output.is_contiguous():
        raise NotRecordableError("they return a tensor that they did not make")
    if output.nbytes != region.end - region.start:
        raise NotRecordableError("they return a part of a tensor")
    buffers = [(made.counter, made.row_bytes) for made in notes.made]
    number = region.number - num_inputs
    return _Noted(notes.calls, buffers, number, tuple(output.shape[1:]), output.dtype)


class _Arena:
    """Memory that buffers whose lives do not overlap have one after the other."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.row_bytes = 0
        self.last_use = -1


def _arenas(noted: _Noted, first_buffer: int) -> tuple[list[_Arena], dict[int, int]]:
    """Return arenas, and which of them each buffer but the output has."""
    lives: dict[int, list[int]] = {}
    for number, call in enumerate(noted.calls):
        for word in call.words:
            if isinstance(word, _Place) and word.place >= first_buffer:
                lives.setdefault(word.place - first_buffer, []).append(number)
    arenas: list[_Arena] = []
    arena_of: dict[int, int] = {}
    for buffer, uses in sorted(lives.items(), key=lambda item: item[1][0]):
        if buffer == noted.output:
            continue
        count, row_bytes = noted.buffers[buffer]
        free = [a for a in arenas if a.count == count and a.last_use < uses[0]]
        if not free:
            free = [_Arena(count)]
            arenas += free
        arena = min(free, key=lambda a: abs(a.row_bytes - row_bytes))
        arena.row_bytes = max(arena.row_bytes, row_bytes)
        arena.last_use = uses[-1]
        arena_of[buffer] = arenas.index(arena)
    return arenas, arena_of


class Program:
    """The calls of a pass."""

    def __init__(
        self,
        core: Core,
        noted: _Noted,
        num_inputs: int,
        layers: Callable[[PassInputs], Tensor],
        ranks: Summing | None,
    ) -> None:
        self._layers = layers  # which own the weights and pools whose addresses are noted
        self._ranks = ranks
        first_buffer = _FIRST_INPUT + num_inputs
        self._arenas, arena_of = _arenas(noted, first_buffer)
        self._output = noted.buffers[noted.output][0], noted.shape, noted.dtype
        place_of = {buffer: first_buffer + 1 + arena for buffer, arena in arena_of.items()}
        place_of[noted.output] = first_buffer
        calls, words, patches = list[tuple[int, int, int]](), list[int](), []
        self._sums: list[tuple[int, _Sum]] = []
        """Each with the number of calls before it, and its place among those of a pass."""
        for call in noted.calls:
            if isinstance(call, _Sum):
                place = place_of[call.words[0].place - first_buffer]
                self._sums.append((len(calls), call._replace(words=(_Place(place),))))
                continue
            calls.append((call.function, len(words), call.rows))
            for word in call.words:
                if isinstance(word, _Place):
                    place, offset = word
                    place = place_of[place - first_buffer] if place >= first_buffer else place
                    patches.append((len(words), place, offset))
                words.append(0 if isinstance(word, _Place) else word)
        self._calls, self._words = _numbers(calls), _numbers(words)
        self._patches = _numbers(patches)
        self._core_run = core.library.core_run
        self._num_calls, self._num_patches = len(calls), len(patches)
        self._addresses = [part.ctypes.data for part in (self._calls, self._words, self._patches)]
        self._places = (ctypes.c_int64 * (first_buffer + 1 + len(self._arenas)))()

    def __call__(self, inputs: PassInputs) -> Tensor:
        """Run them; see `Kernels.record`."""
        lengths = (0 if own is None else len(own) for own in _lists(inputs))
        counts = (len(inputs.x), row_numbers(inputs.batch).num_rows, *lengths)
        count, shape, dtype = self._output
        output = torch.empty(counts[count], *shape, dtype=dtype)
        sizes = [
            -(-arena.row_bytes * counts[arena.count] // _ALIGNMENT) * _ALIGNMENT
            for arena in self._arenas
        ]
        memory = torch.empty(sum(sizes) + _ALIGNMENT, dtype=torch.uint8)
        address = -(-memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        places = [*counts, torch.get_num_threads(), *input_addresses(inputs), output.data_ptr()]
        for size in sizes:
            places.append(address)
            address += size
        for number, place in enumerate(places):
            self._places[number] = place
        done = 0
        for end, total in self._sums:
            self._run(inputs, done, end)
            self._add_over_ranks(total, counts[total.rows], output, memory)
            done = end
        self._run(inputs, done, self._num_calls)
        return output

    def _add_over_ranks(self, total: _Sum, count: int, output: Tensor, memory: Tensor) -> None:
        assert self._ranks is not None
        address = self._places[total.words[0].place]
        if address != output.data_ptr():
            start = address - memory.data_ptr()
            num_bytes = count * math.prod(total.shape) * total.dtype.itemsize
            part = memory[start : start + num_bytes].view(total.dtype).view(count, *total.shape)
        else:
            part = output
        result = self._ranks.all_reduce(part)
        if result.data_ptr() != part.data_ptr():
            part.copy_(result)

    def _run(self, inputs: PassInputs, first: int, end: int) -> None:
        """Make calls of the core; places are those of the first call."""
        calls, words, patches = self._addresses
        num_patches = 0 if first else self._num_patches
        failed = self._core_run(
            calls + first * _CALL_BYTES, end - first, words, patches, num_patches, self._places
        )
        if failed >= 0:
            raise IndexError(_what_failed(inputs, first + failed))


def _numbers(values: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    unsigned = np.array(values, dtype=object)
    return np.ascontiguousarray(unsigned.astype(np.int64))


def _what_failed(inputs: PassInputs, call: int) -> str:
    slots, chosen = inputs.batch.slot_mapping.tolist(), inputs.logit_rows
    tokens = "all" if chosen is None else chosen.tolist()
    return f"call {call} of the core: a slot of {slots} or a token of {tokens} is none"


def record(
    core: Core,
    layers: Callable[[PassInputs], Tensor],
    like: PassInputs,
    *,
    level: int,
    ranks: Summing | None,
) -> Program:
    """See `Kernels.record`; `level`: instructions of the calls that `Notes` adds."""
    examples = [_example(like, sizes) for sizes in _SIZES]
    attempts = [
        _note(Notes(core, level, example, sizes), layers, example, ranks)
        for example, sizes in zip(examples, _SIZES, strict=True)
    ]
    if attempts[0] != attempts[1]:
        raise NotRecordableError("their operations depend on the number of rows")
    return Program(core, attempts[0], len(input_addresses(like)), layers, ranks)
