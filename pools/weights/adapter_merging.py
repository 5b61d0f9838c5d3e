"""Merges an adapter into its base block by block, in float32 (float64 for float64), rounded to the base's types.

The result has all files of the base, written again: engines read every tensor of a file, and nearly every adapter
changes tensors in each. DoRA's norms are of the base with the product added, as in PEFT (`tuners/lora/dora.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np

from pools.weights.adapters.changes import Change, changed_config, changes_of
from pools.weights.formats import BYTES, Tensor, read_safetensors_header, safetensors_header
from pools.weights.making import Making
from pools.weights.merging import BLOCK_BYTES, Block, Read, numbers_in, on_this_machine, reading, write_weights
from resources.errors import CheckpointError
from resources.storage import storage

_CACHED_NUMBERS = 2**17  # processed at once, with as many of the product: they fit into the cache of a core
_MULTIPLIED = 2**18  # OpenBLAS computes up to so many multiplications in the calling thread (interface/gemm.c)


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
    first: int  # byte of the source
    length: int
    row: int
    matrix: _Matrix | None  # None for bytes that are copied


def write_merged(making: Making) -> None:
    """Writes the weights that an adapter makes of its base."""
    with ExitStack() as held:
        base = on_this_machine(making.folder.inputs[0], making.hold_copy, held)
        changes = changes_of(replace(making.folder, inputs=(base,)))
        if {**base.config, **changed_config(base, changes)} != making.folder.config:
            raise CheckpointError(
                expected=f"safetensors of {making.folder.uri} and its base, since the adapter changes the vocabulary",
                found=f"it or {base.uri} in another format",
                remedy="save both as safetensors",
            )
        read = reading(held)
        shards = {name: read_safetensors_header(base.files[name]) for name in base.weight_files}
        added = changes.keys() - {name for shard in shards.values() for name in shard}
        shards[base.weight_files[-1]] |= {name: changes[name].source for name in sorted(added)}
        for file, tensors in shards.items():
            write_changed(
                making, file, {name: changes.get(name, Change(tensors[name], tensors[name])) for name in tensors}, read
            )


def write_changed(making: Making, file: str, changes: Mapping[str, Change], read: Read) -> None:
    """Writes a file with the tensors that changes make, by their names; `read` is that of `reading`."""
    in_order = dict(sorted(changes.items(), key=lambda item: item[1].source.span))
    header, places = safetensors_header({name: (each.tensor, _bytes_of(each)) for name, each in in_order.items()})
    parts = (part for name, each in in_order.items() for part in _parts(each, places[name], read))
    write_weights(making, file, header, parts, partial(_Merger, read))


def _bytes_of(change: Change) -> int:
    tensor, (start, end) = change.tensor, change.source.span
    return end - start if tensor == change.source else prod(tensor.shape) * BYTES[tensor.dtype]


def _parts(change: Change, place: int, read: Read) -> Iterator[_Part]:
    source, tensor = change.source, change.tensor
    rows, columns = (tensor.shape or (1,))[0], prod(tensor.shape[1:])
    from_bytes, to_bytes = columns * BYTES.get(source.dtype, 0), columns * BYTES.get(tensor.dtype, 0)  # of a row
    matrix = None
    if tensor == source and change.low_rank is None and change.rows is None:
        rows, from_bytes, to_bytes = source.span[1] - source.span[0], 1, 1
    elif rows * columns:
        matrix = _matrix(change, columns)
    step = max(1, BLOCK_BYTES // max(from_bytes, to_bytes, 1))

    def parts(matrix: _Matrix | None) -> Iterator[_Part]:
        for row in range(0, rows, step):
            count = min(step, rows - row)
            at, first = place + row * to_bytes, row * from_bytes
            yield _Part(at, count * to_bytes, source, first, count * from_bytes, row, matrix)

    if matrix and matrix.magnitude is not None and change.low_rank and change.low_rank.transposed:
        merger, squares = _Merger(read), np.zeros(columns)
        for part in parts(matrix):
            for _, wide in merger.sums(part, matrix):
                squares += np.einsum("ij,ij->j", wide, wide, dtype=np.float64)
        factors = (matrix.magnitude / np.sqrt(squares)).astype(matrix.number)
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
    return numbers_in(raw, tensor.dtype).astype(number).reshape(tensor.shape)


class _Merger:
    # of a thread: returns the bytes of a part in the result

    def __init__(self, read: Read) -> None:
        self._read = read
        self._from, self._to = np.empty((2, BLOCK_BYTES), np.uint8)
        self._room = np.empty((2, 0, 0), np.float32)

    def __call__(self, part: _Part) -> memoryview:
        if (matrix := part.matrix) is None:
            return self._bytes_of(part).data
        if len(self._to) < part.size:
            self._to = np.empty(part.size, np.uint8)
        made, width = self._to[: part.size], matrix.columns * BYTES[matrix.dtype]
        with np.errstate(all="ignore"):  # infinity and NaN are kept
            for row, wide in self.sums(part, matrix):
                if matrix.magnitude is not None:
                    norms = np.sqrt(np.einsum("ij,ij->i", wide, wide))
                    wide *= (matrix.magnitude[row : row + len(wide)] / norms)[:, None]
                if matrix.factors is not None:
                    wide *= matrix.factors
                for number in matrix.replaced.keys() & range(row, row + len(wide)):
                    wide[number - row] = matrix.replaced[number]
                at = (row - part.row) * width
                rounded = numbers_in(made[at : at + len(wide) * width], matrix.dtype)
                np.copyto(rounded, wide.reshape(-1), casting="unsafe")
        return made.data

    def sums(self, part: _Part, matrix: _Matrix) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the base's rows with the product added, some at a time, and the number of the first."""
        width = matrix.columns * BYTES[part.source.dtype]
        raw, step = self._bytes_of(part), max(1, _CACHED_NUMBERS // matrix.columns)
        if self._room.shape != (shape := (2, step, matrix.columns)) or self._room.dtype != matrix.number:
            self._room = np.empty(shape, matrix.number)
        for row in range(0, part.length // width, step):
            held = raw[row * width : (row + step) * width]
            wide, added = self._room[:, : len(held) // width]
            np.copyto(wide.reshape(-1), numbers_in(held, part.source.dtype))
            if matrix.product is not None:
                left, right = matrix.product
                left = left[part.row + row :][: len(wide)]
                few = max(1, _MULTIPLIED // left.size)
                for at in range(0, matrix.columns, few):
                    np.matmul(left, right[:, at : at + few], out=added[:, at : at + few])
                np.add(wide, added, out=wide)
            yield part.row + row, wide

    def _bytes_of(self, part: _Part) -> np.ndarray:
        if len(self._from) < part.length:
            self._from = np.empty(part.length, np.uint8)
        held = self._from[: part.length]
        self._read(part.source, part.first, held.data)
        return held
