"""Merges an adapter into its base block by block, in float32 (float64 for float64), rounded to the base's types.

The result has all files of the base, written again: engines read every tensor of a file, and nearly every adapter
changes tensors in each. DoRA's norms are of the base with the product added, as in PEFT (`tuners/lora/dora.py`).
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from pools.weights.adapters.changes import Change, changed_config, changes_of
from pools.weights.converting import write_index
from pools.weights.formats import Tensor, read_safetensors_header
from pools.weights.making import Making
from pools.weights.merging import (
    BLOCK_BYTES,
    BYTES,
    TYPES,
    Block,
    on_this_machine,
    open_files,
    read_ahead,
    write_weights,
)
from resources.errors import CheckpointError
from resources.storage import storage

_CACHED_NUMBERS = 2**15  # processed at once, with as many of the product: they fit into the cache of a core


@dataclass(frozen=True)
class _Matrix:
    dtype: str
    columns: int
    number: type[np.float32] | type[np.float64]
    product: tuple[np.ndarray, np.ndarray] | None  # left, with the rows, and right, with the columns
    magnitude: np.ndarray | None  # the norm of each row after the sum
    factors: np.ndarray | None  # of each column after the sum
    replaced: Mapping[int, np.ndarray]


@dataclass(frozen=True)
class _Part(Block):
    source: Tensor
    file: int | None  # None if it is in a store
    start: int
    length: int
    matrix: _Matrix | None = None
    row: int = 0

    def read(self, buffer: memoryview) -> None:
        if self.file is None:
            buffer[:] = storage.read_bytes(self.source.uri, start=self.start, end=self.start + self.length)
            return
        read_ahead(self.file, self.start, self.length)
        if os.preadv(self.file, [buffer], self.start) != self.length:
            raise OSError(f"the file {self.source.uri} ends within a tensor")


def merge_adapter(making: Making) -> None:
    """Writes the weights that an adapter makes of its base."""
    with ExitStack() as held:
        base = on_this_machine(making.folder.inputs[0], making.hold_copy, held)
        changes = changes_of(replace(making.folder, inputs=(base,)))
        if {**base.config, **changed_config(base, changes)} != making.folder.config:
            raise CheckpointError(
                expected=f"a base in safetensors for an adapter that changes its vocabulary: {making.folder.uri}",
                found=f"{base.uri} in another format",
                remedy="save the base as safetensors",
            )
        held.enter_context(_products_on_their_own_thread())
        file_of = open_files(held)
        shards = {name: read_safetensors_header(base.files[name]) for name in base.weight_files}
        added = changes.keys() - {name for shard in shards.values() for name in shard}
        shards[base.weight_files[-1]] |= {name: changes[name].source for name in sorted(added)}
        for file, tensors in shards.items():
            target = making.content / file
            if target.is_file():  # of these inputs, by an earlier call
                making.on_bytes(target.stat().st_size)
                continue
            in_order = sorted(tensors.items(), key=lambda item: item[1].span)
            shard = {name: changes.get(name, Change(tensor, tensor)) for name, tensor in in_order}
            header, places = _header(shard)
            parts = (part for name in shard for part in _parts(shard[name], places[name], file_of))
            write_weights(target, header, parts, _Merger, stopped=making.stopped, on_bytes=making.on_bytes)
        write_index(making, base.weight_files)


def _header(shard: Mapping[str, Change]) -> tuple[bytes, dict[str, int]]:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    end = 0
    for name, change in shard.items():
        tensor, (start, stop) = change.tensor, change.source.span
        size = stop - start if tensor == change.source else prod(tensor.shape) * BYTES[tensor.dtype]
        places[name], end = end, end + size
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [places[name], end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + at for name, at in places.items()}


def _parts(change: Change, place: int, file_of: Callable[[Tensor], int]) -> Iterator[_Part]:
    source, tensor = change.source, change.tensor
    file = file_of(source) if storage.is_local(source.uri) else None
    start, end = source.span
    if tensor == source and change.low_rank is None and change.rows is None:
        for at in range(start, end, BLOCK_BYTES):
            size = min(BLOCK_BYTES, end - at)
            yield _Part(place + at - start, size, source, file, at, size)
        return
    rows, columns = (tensor.shape or (1,))[0], prod(tensor.shape[1:])
    read, written = columns * BYTES[source.dtype], columns * BYTES[tensor.dtype]
    step = max(1, BLOCK_BYTES // max(read, written))

    def parts(matrix: _Matrix) -> Iterator[_Part]:
        for row in range(0, rows, step):
            count = min(step, rows - row)
            at = place + row * written
            yield _Part(at, count * written, source, file, start + row * read, count * read, matrix, row)

    matrix = _matrix(change, columns)
    if change.low_rank and change.low_rank.transposed and matrix.magnitude is not None:
        norms, sums = _Merger(), np.zeros(columns)
        for part in parts(replace(matrix, magnitude=None)):
            for _, wide, _ in norms.sums(part):
                sums += np.einsum("ij,ij->j", wide, wide, dtype=np.float64)
        factors = (matrix.magnitude / np.sqrt(sums)).astype(matrix.number)
        matrix = replace(matrix, magnitude=None, factors=factors)
    yield from parts(matrix)


def _matrix(change: Change, columns: int) -> _Matrix:
    number = np.float64 if change.tensor.dtype == "F64" else np.float32
    product = magnitude = None
    if (low_rank := change.low_rank) is not None:
        first, second = (_array(tensor, number) for tensor in (low_rank.first, low_rank.second))
        left, right = (first.T, second.T) if low_rank.transposed else (second, first)
        product = np.ascontiguousarray(left * number(low_rank.scaling)), np.ascontiguousarray(right)
        magnitude = None if low_rank.magnitude is None else _array(low_rank.magnitude, number)
    new = () if change.rows is None else _array(change.rows, number)
    replaced = dict(zip(change.numbers, new, strict=True))
    return _Matrix(change.tensor.dtype, columns, number, product, magnitude, None, replaced)


def _array(tensor: Tensor, number: type[np.float32] | type[np.float64]) -> np.ndarray:
    raw = np.frombuffer(storage.read_bytes(tensor.uri, start=tensor.span[0], end=tensor.span[1]), np.uint8)
    wide = np.empty(prod(tensor.shape), number)
    _widen(tensor.dtype, raw, wide)
    return wide.reshape(tensor.shape)


class _Merger:
    # of a thread: reads a part, and returns its bytes in the result

    def __init__(self) -> None:
        self._read = np.empty(BLOCK_BYTES, np.uint8)
        self._written = np.empty(BLOCK_BYTES, np.uint8)

    def __call__(self, part: _Part) -> memoryview:
        if part.matrix is None:
            return self._raw(part).data
        matrix = part.matrix
        if len(self._written) < part.size:
            self._written = np.empty(part.size, np.uint8)
        written = self._written[: part.size]
        width = matrix.columns * BYTES[matrix.dtype]
        for row, wide, spare in self.sums(part):
            if matrix.magnitude is not None:
                norms = np.sqrt(np.einsum("ij,ij->i", wide, wide))
                wide *= (matrix.magnitude[row : row + len(wide)] / norms)[:, None]
            if matrix.factors is not None:
                wide *= matrix.factors
            for number in matrix.replaced.keys() & range(row, row + len(wide)):
                wide[number - row] = matrix.replaced[number]
            at = (row - part.row) * width
            _narrow(matrix.dtype, wide.reshape(-1), spare.reshape(-1), written[at : at + len(wide) * width])
        return written.data

    def sums(self, part: _Part) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields the base's rows with the product added, some at a time: the number of the first, they, and room
        for as many numbers."""
        matrix = part.matrix
        assert matrix is not None
        width = matrix.columns * BYTES[part.source.dtype]
        raw, step = self._raw(part), max(1, _CACHED_NUMBERS // matrix.columns)
        room = np.empty((2, step, matrix.columns), matrix.number)
        for at in range(0, part.length // width, step):
            count = min(step, part.length // width - at)
            wide, added = room[:, :count]
            _widen(part.source.dtype, raw[at * width : (at + count) * width], wide.reshape(-1))
            if matrix.product is not None:
                left, right = matrix.product
                first = part.row + at
                wide += np.matmul(left[first : first + count], right, out=added)
            yield part.row + at, wide, added

    def _raw(self, part: _Part) -> np.ndarray:
        if len(self._read) < part.length:
            self._read = np.empty(part.length, np.uint8)
        part.read(self._read[: part.length].data)
        return self._read[: part.length]


def _widen(dtype: str, raw: np.ndarray, wide: np.ndarray) -> None:
    if dtype != "BF16":
        np.copyto(wide, raw.view(TYPES[dtype]))
        return
    upper = raw.view(np.uint16)
    if wide.dtype == np.float64:
        wide[:] = (upper.astype(np.uint32) << 16).view(np.float32)
        return
    bits = wide.view(np.uint32)
    np.copyto(bits, upper)
    np.left_shift(bits, np.uint32(16), out=bits)


def _narrow(dtype: str, wide: np.ndarray, spare: np.ndarray, raw: np.ndarray) -> None:
    with np.errstate(all="ignore"):  # infinity and NaN are kept
        if dtype != "BF16":
            np.copyto(raw.view(TYPES[dtype]), wide, casting="same_kind")
            return
        missing = np.isnan(wide)
        bits, odd = wide.view(np.uint32), spare.view(np.uint32)  # rounds to the nearest, and to even
        np.right_shift(bits, np.uint32(16), out=odd)
        np.bitwise_and(odd, np.uint32(1), out=odd)
        np.add(odd, np.uint32(0x7FFF), out=odd)
        np.add(bits, odd, out=bits)
        np.right_shift(bits, np.uint32(16), out=bits)
        np.copyto(raw.view(np.uint16), bits, casting="same_kind")
        if missing.any():
            raw.view(np.uint16)[missing] = 0x7FC0


@contextmanager
def _products_on_their_own_thread() -> Iterator[None]:
    # OpenBLAS would start threads for each product of a block, 30 times slower where cores are busy
    libraries = (Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas64*")
    blas = next(map(ctypes.CDLL, map(str, libraries)), None)
    count = blas.scipy_openblas_get_num_threads64_() if blas else 0
    try:
        if blas:
            blas.scipy_openblas_set_num_threads64_(1)
        yield
    finally:
        if blas:
            blas.scipy_openblas_set_num_threads64_(count)
