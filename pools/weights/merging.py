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
from pools.weights.formats import Tensor, read_safetensors_header
from pools.weights.layouts import KEPT, inspect_checkpoint, require_alike
from pools.weights.merges import merge_of
from pools.weights.model_files import ModelFolder, digest_model_folder, inspect_model_folder, read_tensors, served_files
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
_UPPER = np.uint32(0xFFFF0000)
_HALF = np.uint32(16)
_ODD = np.uint32(1)
_BELOW_HALF = np.uint32(0x7FFF)
_NAN = np.uint32(0x7FC00000)
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
"""Width in bytes of each averaged type, by its name in safetensors."""
TYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
"""Those of them that numpy has."""
_SYNCED_BYTES = 2**27  # otherwise the disk writes everything at the end, which then takes long
_MOST_THREADS = 8  # beyond that, memory is the bottleneck


class Averager:
    """Averages blocks of at most `BLOCK_BYTES`, equal to the last bit to torch's sums in float32.

    `weights` None is the plain mean. Use an instance per thread.
    """

    def __init__(self, count: int, weights: Sequence[float] | None) -> None:
        self._count = count
        self._weights = weights
        self._raw = np.zeros(BLOCK_BYTES, np.uint8)
        self._wide = np.zeros(2 * _CACHED_BYTES, np.uint8)
        self._total = np.zeros(2 * BLOCK_BYTES, np.uint8)

    def average(self, dtype: str, size: int, read: Callable[[int, memoryview], None]) -> memoryview:
        """Returns the average of a block of `size` bytes, which is valid until the next call.

        `dtype` is BF16, F16, F32 or F64; `read` reads a checkpoint's part, given its number, into a buffer.
        """
        raw = self._raw[: size + size % 4]  # bfloat16 is processed in pairs
        raw[size:] = 0
        parts = [
            (raw[at : at + _CACHED_BYTES], self._total[2 * at : 2 * (at + _CACHED_BYTES)])
            for at in range(0, len(raw), _CACHED_BYTES)
        ]
        with np.errstate(all="ignore"):  # infinity and NaN are kept
            for number in range(self._count):
                read(number, raw[:size].data)
                for held, room in parts:
                    self._add(number, self._widened(dtype, held), room)
            for held, room in parts:
                self._narrow(dtype, room, held)
        return raw[:size].data

    def _add(self, number: int, values: np.ndarray, room: np.ndarray) -> None:
        if self._weights is not None:
            np.multiply(values, values.dtype.type(self._weights[number]), out=values)
        total = room.view(values.dtype)[: values.size]
        if number == 0:
            np.copyto(total, values)
        else:
            np.add(total, values, out=total)

    def _widened(self, dtype: str, raw: np.ndarray) -> np.ndarray:
        if dtype != "BF16":
            numbers = raw.view(TYPES[dtype])
            if dtype != "F16":
                return numbers
            wide = self._wide.view(np.float32)[: numbers.size]
            np.copyto(wide, numbers)
            return wide
        pairs = raw.view(np.uint32)
        bits = self._wide.view(np.uint32)[: 2 * pairs.size]
        np.left_shift(pairs, _HALF, out=bits[: pairs.size])
        np.bitwise_and(pairs, _UPPER, out=bits[pairs.size :])
        return bits.view(np.float32)

    def _narrow(self, dtype: str, room: np.ndarray, raw: np.ndarray) -> None:
        kind = np.float64 if dtype == "F64" else np.float32
        total = room.view(kind)[: len(raw) // BYTES[dtype]]
        if self._weights is None:
            np.divide(total, kind(self._count), out=total)
        if dtype != "BF16":
            np.copyto(raw.view(TYPES[dtype]), total, casting="same_kind")
            return
        missing = np.isnan(total)
        bits = total.view(np.uint32)
        added = self._wide.view(np.uint32)[: bits.size]
        np.right_shift(bits, _HALF, out=added)
        np.bitwise_and(added, _ODD, out=added)
        np.add(added, _BELOW_HALF, out=added)
        np.add(bits, added, out=bits)
        if missing.any():
            bits[missing] = _NAN
        pairs = raw.view(np.uint32)
        lower, upper = bits[: pairs.size], bits[pairs.size :]
        np.right_shift(lower, _HALF, out=lower)
        np.bitwise_and(upper, _UPPER, out=upper)
        np.bitwise_or(lower, upper, out=pairs)


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
            if target.is_file() and name in last.weight_files:  # of inputs with these digests, by an earlier call
                count(source.size)
            elif name in last.weight_files:
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
    """Bytes of a file of weights, from `at`."""

    at: int
    size: int


@dataclass(frozen=True)
class _Averaged(Block):
    tensor: str
    dtype: str
    # file descriptor and offset of each input
    sources: tuple[tuple[int, int], ...]


Written = TypeVar("Written", bound=Block)


def write_weights(
    target: Path,
    header: bytes,
    blocks: Iterable[Written],
    begin: Callable[[], Callable[[Written], bytes | memoryview]],
    *,
    stopped: Callable[[], bool],
    on_bytes: Callable[[int], None],
    require_unchanged: Callable[[], None] = lambda: None,
) -> None:
    """Writes a safetensors file that appears when it is whole: a header, and blocks, computed on several threads.

    Each thread computes by a function from `begin`. `on_bytes` is called with the bytes of each part. Raises
    `CopyStopped` if `stopped` returns True, and what `require_unchanged` raises before the file appears.
    """
    unfinished = target.with_name(f"{target.name}.partial")
    with storage.reported(str(target), "write"), unfinished.open("w+b") as output:
        output.write(header)
        output.flush()
        on_bytes(len(header))

        def write(compute: Callable[[Written], bytes | memoryview], block: Written) -> None:
            if stopped():
                raise CopyStopped
            if os.pwrite(output.fileno(), compute(block), block.at) != block.size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a full disk or quota writes only a part
            first, end = block.at - len(header), block.at - len(header) + block.size
            if first // _SYNCED_BYTES != end // _SYNCED_BYTES:
                os.fsync(output.fileno())
            on_bytes(block.size)

        on_threads(blocks, lambda: partial(write, begin()), count=thread_count(), ending=threading.Event())
        require_unchanged()
        os.fsync(output.fileno())
        unfinished.rename(target)


def read_ahead(file: int, at: int, size: int) -> None:
    """Has the disk read what the next blocks are from: `size` bytes, a block for each thread behind `at`."""
    if sys.platform == "linux":
        os.posix_fadvise(file, at + thread_count() * BLOCK_BYTES, size, os.POSIX_FADV_WILLNEED)


def open_files(held: ExitStack) -> Callable[[Tensor], int]:
    """Returns a function that opens a tensor's local file, once for all, until `held` closes; its descriptor."""
    opened: dict[str, int] = {}

    def file_of(tensor: Tensor) -> int:
        if tensor.uri not in opened:
            file = held.enter_context(os.fdopen(open_within(storage.local_path(tensor.uri)), "rb"))
            opened[tensor.uri] = file.fileno()
        return opened[tensor.uri]

    return file_of


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
    with ExitStack() as held:
        file_of = open_files(held)

        def blocks() -> Iterator[_Averaged]:
            for name, tensor in sorted(written.items(), key=lambda item: item[1].span):
                start, end = tensor.span
                sources = [(file_of(each[name]), each[name].span[0]) for each in tensors]
                for at in range(start, end, BLOCK_BYTES):
                    places = tuple((file, begin + at - start) for file, begin in sources)
                    yield _Averaged(at, min(BLOCK_BYTES, end - at), name, tensor.dtype, places)

        write_weights(
            target,
            storage.read_bytes(last.place, start=0, end=header_bytes),
            blocks(),
            lambda: partial(_averaged, Averager(len(tensors), weights)),
            stopped=stopped,
            on_bytes=on_bytes,
            require_unchanged=require_unchanged,
        )


def _averaged(averager: Averager, block: _Averaged) -> memoryview | bytes:
    for file, start in block.sources:
        read_ahead(file, start, block.size)

    def read(number: int, buffer: memoryview | bytearray) -> None:
        file, start = block.sources[number]
        if os.preadv(file, [buffer], start) != len(buffer):
            raise OSError(f"the file of {block.tensor} ends within it")

    if block.dtype not in KEPT:
        return averager.average(block.dtype, block.size, read)
    contents = set()
    for number in range(len(block.sources)):
        content = bytearray(block.size)
        read(number, content)
        contents.add(bytes(content))
    if len(contents) > 1:
        raise CheckpointError(
            expected=f"the same {block.dtype} numbers of {block.tensor} in every checkpoint of a merge",
            found="others in one of them; only floating-point numbers are averaged",
            remedy="merge checkpoints of the same model, not quantised",
        )
    return contents.pop()


def thread_count() -> int:
    """Returns the number of averaging threads: more than cores, since each waits for the disk at times."""
    return min(_MOST_THREADS, 2 * (os.cpu_count() or 1))
