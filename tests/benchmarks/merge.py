"""Measures how fast a merged checkpoint, or an adapter on its base, is computed while it is staged, against reading the
checkpoints, or the base, once.

    make bench NAME=merge
    python tests/benchmarks/merge.py [--checkpoints 5] [--megabytes 1000] [--dtypes BF16,F16,F32] [--rounds 3]

Checkpoints have random weights in a single file each. A round reads all of their weights with as many threads as
averaging has, and then stages their mean: read, averaged and written. For an adapter, of rank 16 on every tensor, the
base is read, changed and written. Digests are known before, as from planning. Before each of both, disks are synced,
and the files dropped from the page cache; `cached` is both again with the files in it. Figures are GB of the
checkpoints, or of the base, per second, medians of the rounds. `peak_megabytes` is the memory that staging adds to its
process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.side_by_side import BENCH, Comparison, print_comparisons, say

from fakes.models import write_checkpoint
from pools.weights import merging
from pools.weights.layouts import inspect_checkpoint
from pools.weights.merges import Merge
from pools.weights.model_files import ModelDigests, digest_model_folder
from pools.weights.staging import Staging

BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_TENSORS = 8
_COLUMNS = 4096
_RANK = 16
_READ_BYTES = 4 * 2**20
_ROOM_BYTES = 10**12
_fork = multiprocessing.get_context("fork")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--checkpoints", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--dtypes", default="BF16,F16,F32")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    BENCH.mkdir(exist_ok=True)
    comparisons: list[Comparison] = []
    for dtype in options.dtypes.split(","):
        with tempfile.TemporaryDirectory(prefix="merge-", dir=BENCH) as scratch:
            comparisons += measured(Path(scratch), dtype, options)
    print_comparisons("GB/s of the checkpoints in a mean, and of the base of an adapter", comparisons)


def measured(scratch: Path, dtype: str, options: argparse.Namespace) -> list[Comparison]:
    """Returns rates for checkpoints of a dtype and for an adapter, with the files on the disk and in the page cache."""
    rows = options.megabytes * 10**6 // (_TENSORS * _COLUMNS * BYTES[dtype])
    folders = [random_checkpoint(scratch / f"step-{step}", dtype, rows, step) for step in range(options.checkpoints)]
    adapter = random_adapter(scratch / "adapter", folders[0], rows)
    mean = str(Merge.of_folders("mean", list(map(str, folders))))
    time.sleep(4)  # digests are remembered only of files unchanged for some seconds
    return [
        *compared(scratch, f"merge.{dtype}", mean, folders, options),
        *compared(scratch, f"adapter.{dtype}", str(adapter), folders[:1], options),
    ]


def compared(
    scratch: Path, name: str, uri: str, folders: Sequence[Path], options: argparse.Namespace
) -> list[Comparison]:
    """Returns rates of staging a checkpoint against reading the weights of folders."""
    files = [folder / "model.safetensors" for folder in folders]
    gigabytes = sum(file.stat().st_size for file in files) / 1e9
    digests = digest_model_folder(inspect_checkpoint(uri))
    staged = scratch / "staged"
    facts = {
        "checkpoints": len(folders),
        "megabytes": options.megabytes,
        "threads": merging.thread_count(),
        "peak_megabytes": round(peak_bytes(lambda: seconds_to_stage(staged, uri, digests, [])) / 1e6),
    }
    comparisons = []
    for kind, forgotten in ((name, files), (f"{name}.cached", [])):
        ours, theirs = [], []
        for _ in range(options.rounds):
            theirs.append(gigabytes / seconds_of(lambda: read(files), forgotten))
            shutil.rmtree(staged)
            ours.append(gigabytes / seconds_to_stage(staged, uri, digests, forgotten))
            say(f"{kind}: merged {ours[-1]:.2f} GB/s, read {theirs[-1]:.2f} GB/s")
        comparisons.append(Comparison(kind, "GB/s", median(ours), median(theirs), better="more", facts=facts))
    return comparisons


def random_checkpoint(folder: Path, dtype: str, rows: int, seed: int) -> Path:
    """Writes a checkpoint with a weights file of several tensors."""
    write_checkpoint(folder)
    size = rows * _COLUMNS * BYTES[dtype]
    header = {
        f"layer.{number}.weight": {
            **{"dtype": dtype, "shape": [rows, _COLUMNS]},
            "data_offsets": [number * size, (number + 1) * size],
        }
        for number in range(_TENSORS)
    }
    encoded = json.dumps(header).encode()
    generator = np.random.default_rng(seed)
    kinds = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _ in range(_TENSORS):
            numbers = generator.standard_normal(rows * _COLUMNS, dtype=np.float32)
            is_half = dtype == "BF16"
            held = (numbers.view(np.uint32) >> 16).astype(np.uint16) if is_half else numbers.astype(kinds[dtype])
            file.write(held.tobytes())
    return folder


def random_adapter(folder: Path, base: Path, rows: int) -> Path:
    """Writes an adapter in float32 that changes every tensor of a base."""
    folder.mkdir()
    config = {"peft_type": "LORA", "lora_alpha": _RANK, "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(0)
    header, content = {}, b""
    for number in range(_TENSORS):
        for part, shape in (("A", (_RANK, _COLUMNS)), ("B", (rows, _RANK))):
            numbers = generator.standard_normal(shape, dtype=np.float32).tobytes()
            place = [len(content), len(content) + len(numbers)]
            name = f"base_model.model.layer.{number}.lora_{part}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": place}
            content += numbers
    encoded = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + content)
    return folder


def seconds_of(work: Callable[[], object], forgotten: Sequence[Path]) -> float:
    """Returns wall seconds of some work, after dropping files from the page cache."""
    os.sync()
    for file in forgotten:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.monotonic()
    work()
    return time.monotonic() - began


def read(files: Sequence[Path]) -> None:
    """Reads files once, with as many threads as averaging has."""
    threads = merging.thread_count()
    ranges = [(file, at) for file in files for at in range(0, file.stat().st_size, _READ_BYTES)]

    def run(number: int) -> None:
        buffer = memoryview(bytearray(_READ_BYTES))
        opened = {file: os.open(file, os.O_RDONLY) for file in files}
        for file, at in ranges[number::threads]:
            os.preadv(opened[file], [buffer], at)
        for descriptor in opened.values():
            os.close(descriptor)

    readers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()


def seconds_to_stage(folder: Path, uri: str, digests: ModelDigests, forgotten: Sequence[Path]) -> float:
    with Staging(folder, max_bytes=_ROOM_BYTES) as staging:
        return seconds_of(lambda: staging.stage(uri, digests).release(), forgotten)


def peak_bytes(work: Callable[[], object]) -> int:
    """Returns the memory that some work adds at its peak, in a process of its own."""
    ours, theirs = _fork.Pipe(duplex=False)

    def run() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
        before = resident_bytes("VmRSS")
        work()
        theirs.send(resident_bytes("VmHWM") - before)

    child = _fork.Process(target=run)
    child.start()
    child.join()
    return ours.recv()


def resident_bytes(field: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
