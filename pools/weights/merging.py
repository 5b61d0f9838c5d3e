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
from pathlib import Path
from typing import TypeVar

import numpy as np

from pools.weights.checkpoint_copy import Filling, changed_since_planned, counted, require_planned
from pools.weights.content import file_identity
from pools.weights.formats import BYTES, Tensor, read_safetensors_header
from pools.weights.layouts import KEPT, inspect_checkpoint, require_alike
from pools.weights.merges import merge_of
from pools.weights.model_files import ModelFolder, digest_model_folder, inspect_model_folder, read_tensors, served_files
from pools.weights.numbers import narrow, widen
from pools.weights.overrides import without_options
from resources.errors import CheckpointError, StorageError
from resources.storage import storage
from resources.storage.bounded_folder import Hold
from resources.storage.file_copy import CopyStopped, on_threads
from resources.storage.regular_files import open_within
from resources.storage.storage import FileInfo

BLOCK_BYTES = 2**21
"""Bytes per read: for smaller reads, of several files in turn, a disk would behave as for random reads."""
_CACHED_BYTES = 2**17  # processed at once, with its float32 numbers: fits into the cache of a core
_SYNCED_BYTES = 2**27  # otherwise the disk writes everything at the end, which then takes long
_MOST_THREADS = 8  # beyond that, memory is the bottleneck


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
                    widen(dtype, held, values)
                    if self._weights is not None:
                        np.multiply(values, kind(self._weights[number]), out=values)
                    if number:
                        np.add(sums, values, out=sums)
            for held, sums in parts:
                if self._weights is None:
                    np.divide(sums, kind(self._count), out=sums)
                narrow(dtype, sums, spare[: len(sums)], held)
        return self._raw[:size].data


def merge_checkpoints(filling: Filling, *, hold_copy: Callable[[ModelFolder], Hold]) -> Path:
    """Computes a merged checkpoint; returns the folder with the whole model.

    `uri` is its name, with the folders of its input checkpoints; `hold_copy` copies an input from its store, and holds
    the copy.
    """
    uri = filling.uri
    merge = merge_of(uri)
    assert merge is not None, "only merged checkpoints are computed"
    folder = inspect_checkpoint(uri)
    folder.require_complete(planned=True)
    read = _identities(folder)
    require_planned(uri, digest_model_folder(folder), filling.digests)

    def require_unchanged() -> None:
        if (now := _identities(folder)) != read:  # new links change times too, but not contents
            if digest_model_folder(inspect_checkpoint(uri)) != filling.digests:
                raise changed_since_planned(uri, "files of a checkpoint in it were written while it was computed")
            read[:] = now

    with ExitStack() as held:
        inputs = [on_this_machine(each, hold_copy, held) for each in folder.inputs]
        require_alike(inputs)
        last = inputs[-1]
        sources = served_files(last)
        total_bytes = sum(source.size for source in sources.values())
        filling.make_room(total_bytes)
        content = filling.partial / "content"
        content.mkdir(parents=True, exist_ok=True)
        for left in content.glob("*"):
            if left.name not in sources:
                left.unlink()
        count = counted(total_bytes, filling.on_progress)
        tensors = [read_tensors(each) for each in inputs]
        plain = merge.recipe == "mean"
        weights = None if plain else merge.weights(len(inputs))
        for name, source in sources.items():
            target = content / name
            if name in last.weight_files:
                try:
                    _write_average(source, target, tensors, weights, filling.stopped, count, require_unchanged)
                except (CheckpointError, StorageError):
                    require_unchanged()  # raises that error instead, if it is the cause
                    raise
            else:
                storage.write_bytes(str(target), storage.read_bytes(source.place))
                count(source.size)
        require_unchanged()
    inspect_model_folder(str(content)).require_complete()
    return content


def _identities(folder: ModelFolder) -> list[object]:
    files = [file.uri for each in folder.inputs if _is_here(each) for file in served_files(each).values()]
    with storage.reported(folder.uri, "look at"):
        return [file_identity(storage.local_path(uri)) for uri in files if storage.is_local(uri)]


def _is_here(folder: ModelFolder) -> bool:
    return storage.is_local(without_options(folder.uri))


def on_this_machine(folder: ModelFolder, hold_copy: Callable[[ModelFolder], Hold], held: ExitStack) -> ModelFolder:
    """Returns a checkpoint in files of this machine: its own, or those of a copy that is held."""
    if _is_here(folder) and folder.made_by is None:
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
    target: Path,
    header: bytes,
    blocks: Iterable[Written],
    begin: Callable[[], Callable[[Written], memoryview]],
    *,
    stopped: Callable[[], bool],
    on_bytes: Callable[[int], None],
    require_unchanged: Callable[[], None] = lambda: None,
) -> None:
    """Writes a safetensors file that appears when it is whole: a header, and blocks, computed on several threads.

    A file that is there already is left, as of the same inputs by an earlier call. Each thread computes by a function
    from `begin`. `on_bytes` is called with the bytes of each part. Raises `CopyStopped` if `stopped` returns True, and
    what `require_unchanged` raises before the file appears.
    """
    if target.is_file():
        on_bytes(target.stat().st_size)
        return
    unfinished = target.with_name(f"{target.name}.partial")
    with storage.reported(str(target), "write"), unfinished.open("w+b") as output:
        output.write(header)
        output.flush()
        on_bytes(len(header))

        def write(compute: Callable[[Written], memoryview], block: Written) -> None:
            if stopped():
                raise CopyStopped
            if os.pwrite(output.fileno(), compute(block), len(header) + block.at) != block.size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a full disk or quota writes only a part
            if block.at // _SYNCED_BYTES != (block.at + block.size) // _SYNCED_BYTES:
                os.fsync(output.fileno())
            on_bytes(block.size)

        on_threads(blocks, lambda: partial(write, begin()), count=thread_count(), ending=threading.Event())
        require_unchanged()
        os.fsync(output.fileno())
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
        if sys.platform == "linux":  # has the disk read what the next blocks are from, a block for each thread
            following = at + thread_count() * BLOCK_BYTES
            os.posix_fadvise(opened[tensor.uri], following, len(buffer), os.POSIX_FADV_WILLNEED)
        if os.preadv(opened[tensor.uri], [buffer], at) != len(buffer):
            raise OSError(f"the file {tensor.uri} ends within a tensor")

    return read


def _write_average(
    last: FileInfo,
    target: Path,
    tensors: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float] | None,
    stopped: Callable[[], bool],
    on_bytes: Callable[[int], None],
    require_unchanged: Callable[[], None],
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
            target,
            storage.read_bytes(last.place, start=0, end=header_bytes),
            blocks(),
            lambda: partial(_averaged, Averager(len(tensors), weights), read),
            stopped=stopped,
            on_bytes=on_bytes,
            require_unchanged=require_unchanged,
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
    return min(_MOST_THREADS, 2 * (os.cpu_count() or 1))
