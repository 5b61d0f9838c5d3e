"""Computes merged checkpoints block by block, from local files, into a folder with the layout of the last input.

For each number, in the order of the checkpoints: the first, plus the second, and so on, in float32 (for float64 in
float64), then divided by their count; for weighted averages each is multiplied by its weight instead. The result is
rounded to the type of the checkpoint. Tensors of integers must be the same in all.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from ml_dtypes import bfloat16

from pools.weights.formats import BYTES, INDEX_NAME, Tensor, read_safetensors_header
from pools.weights.layouts import KEPT, require_alike
from pools.weights.making import Making
from pools.weights.merges import merge_of
from pools.weights.model_files import ModelFolder, inspect_model_folder, read_tensors
from pools.weights.overrides import without_options
from resources.errors import CheckpointError
from resources.storage import storage
from resources.storage.bounded_folder import Hold
from resources.storage.file_copy import CopyStopped, on_threads
from resources.storage.regular_files import open_within
from resources.storage.storage import FileInfo

BLOCK_BYTES = 2**21
"""Bytes per read: for smaller reads, of several files in turn, a disk would behave as for random reads."""
_CACHED_BYTES = 2**17  # processed at once, with its float32 numbers: fits into the cache of a core
_MOST_THREADS = 8  # beyond that, memory is the bottleneck


def numbers_in(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the numbers in bytes of a safetensors dtype, which share their memory."""
    return raw.view({"BF16": bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype])


class Averager:
    """Averages blocks of at most `BLOCK_BYTES`, equal to the last bit to torch's sums in float32.

    `weights` None is the plain mean. Use an instance per thread.
    """

    def __init__(self, count: int, weights: Sequence[float] | None) -> None:
        self._count = count
        self._weights = weights
        self._raw = np.empty(BLOCK_BYTES, np.uint8)
        self._total = np.empty(2 * BLOCK_BYTES, np.uint8)
        self._spare = np.empty(2 * _CACHED_BYTES, np.uint8)

    def average(self, dtype: str, size: int, read: Callable[[int, memoryview], None]) -> memoryview:
        """Returns the average of a block of `size` bytes, which is valid until the next call.

        `dtype` is BF16, F16, F32 or F64; `read` reads a checkpoint's part, given its number, into a buffer.
        """
        kind = np.float64 if dtype == "F64" else np.float32
        raw = self._raw[:size].reshape(-1, BYTES[dtype])
        total, spare = self._total.view(kind)[: len(raw)], self._spare.view(kind)
        step = _CACHED_BYTES // BYTES[dtype]
        parts = [(raw[at : at + step].reshape(-1), total[at : at + step]) for at in range(0, len(raw), step)]
        with np.errstate(all="ignore"):  # infinity and NaN are kept
            for number in range(self._count):
                read(number, self._raw[:size].data)
                for held, sums in parts:
                    values = spare[: len(sums)] if number else sums
                    np.copyto(values, numbers_in(held, dtype))
                    if self._weights is not None:
                        np.multiply(values, kind(self._weights[number]), out=values)
                    if number:
                        np.add(sums, values, out=sums)
            for held, sums in parts:
                if self._weights is None:
                    np.divide(sums, kind(self._count), out=sums)
                np.copyto(numbers_in(held, dtype), sums, casting="unsafe")
        return self._raw[:size].data


def average_inputs(making: Making) -> None:
    """Writes the averages of a merged checkpoint's inputs."""
    merge = merge_of(making.folder.uri)
    assert merge is not None, "only merged checkpoints are averages"
    with ExitStack() as held:
        inputs = [on_this_machine(each, making.hold_copy, held) for each in making.folder.inputs]
        require_alike(inputs)
        files, tensors = inputs[-1].files, [read_tensors(each) for each in inputs]
        weights = None if merge.recipe == "mean" else merge.weights(len(inputs))
        for name in inputs[-1].weight_files:
            _write_average(making, files[name], tensors, weights)
        if INDEX_NAME in files:
            storage.write_bytes(str(making.content / INDEX_NAME), storage.read_bytes(files[INDEX_NAME].place))
            making.on_bytes(files[INDEX_NAME].size)


def on_this_machine(folder: ModelFolder, hold_copy: Callable[[ModelFolder], Hold], held: ExitStack) -> ModelFolder:
    """Returns a checkpoint in files of this machine: its own, or those of a copy that is held."""
    if storage.is_local(without_options(folder.uri)) and folder.made_by is None:
        return folder
    hold = hold_copy(folder)
    held.callback(hold.release)
    return inspect_model_folder(str(hold.path))


@dataclass(frozen=True)
class Block:
    """Bytes of a file of weights, from `at` bytes behind its header."""

    at: int
    size: int


@dataclass(frozen=True)
class _Averaged(Block):
    name: str
    first: int  # byte of the tensor
    tensors: tuple[Tensor, ...]


Written = TypeVar("Written", bound=Block)
Read = Callable[[Tensor, int, memoryview], None]
"""Reads a part of a tensor's content into a buffer, given its first byte."""


def write_weights(
    making: Making,
    name: str,
    header: bytes,
    blocks: Iterable[Written],
    begin: Callable[[], Callable[[Written], memoryview]],
) -> None:
    """Writes a safetensors file that appears when it is whole: a header, and blocks, computed on several threads.

    A file that is there already is left, as of the same inputs by an earlier call. Each thread computes by a function
    from `begin`.
    """
    target = making.content / name
    if target.is_file():
        making.on_bytes(target.stat().st_size)
        return
    unfinished = target.with_name(f"{name}.partial")
    with storage.reported(str(target), "write"), unfinished.open("w+b") as output:
        output.write(header)
        output.flush()
        making.on_bytes(len(header))

        def write(compute: Callable[[Written], memoryview], block: Written) -> None:
            if making.stopped():
                raise CopyStopped
            if os.pwrite(output.fileno(), compute(block), len(header) + block.at) != block.size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a full disk or quota writes only a part
            making.on_bytes(block.size)

        on_threads(blocks, lambda: partial(write, begin()), count=thread_count(), ending=threading.Event())
        making.require_unchanged()
        unfinished.rename(target)


def reading(held: ExitStack) -> Read:
    """Returns a function that reads tensors on several threads, and keeps local files open until `held` closes."""
    opened: dict[str, int] = {}
    opening = threading.Lock()

    def read(tensor: Tensor, first: int, buffer: memoryview) -> None:
        at = tensor.span[0] + first
        if not storage.is_local(tensor.uri):
            buffer[:] = storage.read_bytes(tensor.uri, start=at, end=at + len(buffer))
            return
        with opening:
            if tensor.uri not in opened:
                file = held.enter_context(os.fdopen(open_within(storage.local_path(tensor.uri)), "rb"))
                opened[tensor.uri] = file.fileno()
                if sys.platform == "linux":  # reads ahead, at half the processor time of POSIX_FADV_WILLNEED
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        if os.preadv(opened[tensor.uri], [buffer], at) != len(buffer):
            raise OSError(f"the file {tensor.uri} ends within a tensor")

    return read


def _write_average(
    making: Making, last: FileInfo, tensors: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None
) -> None:
    written = read_safetensors_header(last)
    header_bytes = min((tensor.span[0] for tensor in written.values()), default=last.size)

    def blocks() -> Iterator[_Averaged]:
        for name, tensor in sorted(written.items(), key=lambda item: item[1].span):
            (start, end), inputs = tensor.span, tuple(each[name] for each in tensors)
            for first in range(0, end - start, BLOCK_BYTES):
                size = min(BLOCK_BYTES, end - start - first)
                yield _Averaged(start - header_bytes + first, size, name, first, inputs)

    with ExitStack() as held:
        read = reading(held)
        write_weights(
            making,
            storage.basename(last.uri),
            storage.read_bytes(last.place, start=0, end=header_bytes),
            blocks(),
            lambda: partial(_averaged, Averager(len(tensors), weights), read),
        )


def _averaged(averager: Averager, read: Read, block: _Averaged) -> memoryview:
    def read_input(number: int, buffer: memoryview) -> None:
        read(block.tensors[number], block.first, buffer)

    if (dtype := block.tensors[0].dtype) not in KEPT:
        return averager.average(dtype, block.size, read_input)
    contents = [bytearray(block.size) for _ in block.tensors]
    for number, content in enumerate(contents):
        read_input(number, memoryview(content))
    if any(content != contents[0] for content in contents):
        raise CheckpointError(
            expected=f"the same {dtype} numbers of {block.name} in every checkpoint of a merge",
            found="others in one of them; only floating-point numbers are averaged",
            remedy="merge checkpoints of the same model, not quantised",
        )
    return memoryview(contents[0])


def thread_count() -> int:
    """Returns the number of averaging threads: more than cores, since each waits for the disk at times."""
    return min(_MOST_THREADS, 1 + (os.cpu_count() or 1))
