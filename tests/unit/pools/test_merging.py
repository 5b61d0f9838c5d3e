"""Merged checkpoints as they are staged: numbers, refusals, and leftovers of changes and crashes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import signal
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.models import CONFIG, write_checkpoint
from fakes.polling import eventually
from fakes.stores import FolderStore, folder_store
from pools.weights.layouts import inspect_checkpoint
from pools.weights.merges import Merge
from pools.weights.merging import Averager
from pools.weights.model_files import ModelDigests, digest_model_folder, inspect_model_folder, read_tensors
from pools.weights.staging import Staging
from resources.errors import CheckpointChanged, CheckpointError, CheckpointGone, StorageError
from resources.process_marks import boot_id
from resources.storage import storage

WEIGHTS = "model.safetensors"
PARAMETERS = {"model.embed_tokens.weight": (33, 5), "model.norm.weight": (5,), "lm_head.weight": (33, 5)}
_fork = multiprocessing.get_context("fork")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[type[FolderStore]]:
    with folder_store(tmp_path / "reads") as store:
        yield store


def staging(tmp_path: Path, *, max_bytes: int = 10**9) -> Staging:
    return Staging(tmp_path / "staged", max_bytes=max_bytes, range_bytes=4096)


def named(folders: Sequence[str | Path], kind: Any = "mean", parameter: str = "") -> tuple[str, ModelDigests]:
    uri = str(Merge.of_folders(kind, list(map(str, folders)), parameter))
    return uri, digest_model_folder(inspect_checkpoint(uri))


def tensors(folder: str | Path) -> dict[str, np.ndarray]:
    by_name = read_tensors(inspect_model_folder(str(folder)))
    return {
        name: np.frombuffer(storage.read_bytes(t.uri, start=t.span[0], end=t.span[1]), np.float32).reshape(t.shape)
        for name, t in by_name.items()
    }


def write_tensors(path: Path, content: Mapping[str, tuple[str, Sequence[int], bytes]]) -> None:
    header, data = {}, b""
    for name, (dtype, shape, held) in content.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(held)]}
        data += held
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Returns the nearest bfloat16 of float32 numbers as bits, by distance; ties go to the even last bit."""
    bits = numbers.view(np.uint32)
    below = bits & np.uint32(0xFFFF0000)
    above = below + np.uint32(0x10000)
    exact = numbers.astype(np.float64)
    up = np.abs(above.view(np.float32).astype(np.float64) - exact)
    down = np.abs(exact - below.view(np.float32).astype(np.float64))
    odd = (below >> 16) & 1 == 1
    return np.where((up < down) | ((up == down) & odd), above, below) >> 16


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_average_of_bfloat16_is_the_float32_sum_in_order_rounded_to_the_nearest(data: st.DataObject) -> None:
    count, size = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 40))
    bits = [data.draw(st.lists(st.integers(0, 0x7EFF), min_size=size, max_size=size)) for _ in range(count)]
    signs = [data.draw(st.lists(st.sampled_from([0, 0x8000]), min_size=size, max_size=size)) for _ in range(count)]
    parts = [(np.array(b, np.uint16) | np.array(s, np.uint16)) for b, s in zip(bits, signs, strict=True)]
    weights = data.draw(st.sampled_from([None, [1 / 3, *[0.1] * (count - 1)]]))

    def read(number: int, buffer: memoryview) -> None:
        buffer[:] = parts[number].tobytes()

    got = np.frombuffer(bytes(Averager(count, weights).average("BF16", 2 * size, read)), np.uint16)
    wide = [(part.astype(np.uint32) << 16).view(np.float32) for part in parts]
    wide = [w * np.float32(weights[at]) for at, w in enumerate(wide)] if weights else wide
    total = wide[0]
    for other in wide[1:]:
        total = total + other
    total = total if weights else total / np.float32(count)
    assert got.tolist() == bfloat16(total).tolist()


@pytest.mark.parametrize("number", [0x7F80, 0xFF80, 0x7FC0, 0x7F81])
def test_average_with_what_is_no_finite_number_is_none_either(number: int) -> None:
    def read(_: int, buffer: memoryview) -> None:
        buffer[:] = struct.pack("<2H", number, 0x3F80)

    first, second = struct.unpack("<2H", Averager(3, None).average("BF16", 4, read))
    assert (first & 0x7F80, second) == (0x7F80, 0x3F80)
    assert (first & 0x7F > 0) == (number & 0x7F > 0)


@pytest.mark.parametrize("shards", [1, 2])
def test_merged_checkpoint_is_staged_like_its_last_input_with_averages(tmp_path: Path, shards: int) -> None:
    # The first checkpoint has its tensors in a single file, independent of the number of shards of the last.
    folders = [
        write_checkpoint(tmp_path / f"step-{step}", seed=step, parameters=PARAMETERS, shards=shards if step > 1 else 1)
        for step in (1, 2, 3)
    ]
    uri, digests = named(folders)
    progress: list[tuple[int, int]] = []
    with staging(tmp_path).stage(uri, digests, on_progress=lambda *bytes_: progress.append(bytes_)) as staged:
        files = {path.name: path for path in staged.path.iterdir()}
        assert files.keys() == {path.name for path in folders[-1].iterdir()}
        for name in files.keys() - {path.name for path in folders[-1].glob("*.safetensors")}:
            assert files[name].read_bytes() == (folders[-1] / name).read_bytes()
        each = [tensors(folder) for folder in folders]
        for name, got in tensors(staged.path).items():
            assert got.tobytes() == ((each[0][name] + each[1][name] + each[2][name]) / np.float32(3)).tobytes()
        assert progress[-1] == (sum(path.stat().st_size for path in files.values()),) * 2


def test_tensors_of_many_blocks_are_averaged_whole(tmp_path: Path) -> None:
    generator, counts = np.random.default_rng(0), {"F32": 700_001, "BF16": 1_200_001}
    wide = {dtype: generator.standard_normal((3, count), dtype=np.float32) for dtype, count in counts.items()}
    wide["BF16"] = (wide["BF16"].view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    folders = [write_checkpoint(tmp_path / f"step-{step}") for step in range(3)]
    for folder, whole, half in zip(folders, wide["F32"], wide["BF16"], strict=True):
        bits = (half.view(np.uint32) >> 16).astype(np.uint16)
        held = {"half": ("BF16", (len(half),), bits.tobytes()), "whole": ("F32", (len(whole),), whole.tobytes())}
        write_tensors(folder / WEIGHTS, held)
    with staging(tmp_path).stage(*named(folders)) as staged:
        content = (staged.path / WEIGHTS).read_bytes()
    means = {dtype: (parts[0] + parts[1] + parts[2]) / np.float32(3) for dtype, parts in wide.items()}
    expected = bfloat16(means["BF16"]).astype(np.uint16).tobytes() + means["F32"].tobytes()
    assert content[-len(expected) :] == expected


def test_weights_of_a_merge_are_those_of_its_kind(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / f"step-{step}", seed=step) for step in (1, 2)]
    first, second = map(tensors, folders)
    for kind, parameter, weights in (("interpolate", "0.3", (0.7, 0.3)), ("mean", "1+3", (0.25, 0.75))):
        with staging(tmp_path).stage(*named(folders, kind, parameter)) as staged:
            for name, got in tensors(staged.path).items():
                assert np.array_equal(got, first[name] * np.float32(weights[0]) + second[name] * np.float32(weights[1]))


def test_digest_of_a_merge_changes_with_recipe_and_checkpoints_and_only_with_them(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / f"step-{step}", seed=step) for step in (1, 2, 3)]
    mean = named(folders[:2])[1]
    others = [
        named(folders[1:])[1],
        named(folders[1::-1])[1],
        named(folders[:2], "ema", "0.9")[1],
        named(folders[:2], "ema", "0.8")[1],
    ]
    assert len({digests.checkpoint for digests in (mean, *others)}) == 5
    assert named(folders[:2], "wsm", "linear")[1] == mean
    folders[0].rename(tmp_path / "moved")
    assert named([tmp_path / "moved", folders[1]])[1] == mean
    assert mean.tokenizer == digest_model_folder(inspect_model_folder(str(folders[1]))).tokenizer


def test_merge_of_checkpoints_in_a_store_is_made_of_verified_copies_that_are_kept_and_used_again(
    tmp_path: Path, store: type[FolderStore]
) -> None:
    folders = [write_checkpoint(tmp_path / f"step-{step}", seed=step, parameters=PARAMETERS) for step in (1, 2, 3)]
    uris = [f"store:/{folder}" for folder in folders]
    with staging(tmp_path) as local:
        local.stage(uris[1], digest_model_folder(inspect_model_folder(uris[1]))).release()
        uri, digests = named(uris)
        [copy] = (tmp_path / "staged").glob(f"*/{WEIGHTS}")
        inode = copy.stat().st_ino
        with local.stage(uri, digests) as staged:
            assert np.array_equal(
                tensors(staged.path)["lm_head.weight"],
                sum(tensors(folder)["lm_head.weight"] for folder in folders) / np.float32(3),
            )
        assert copy.stat().st_ino == inode
        (folders[0] / WEIGHTS).unlink()
        with local.stage(uri, digests) as again:
            assert again.path == staged.path


def test_checkpoint_that_changes_after_planning_or_while_it_is_averaged_ends_it_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    folders = [write_checkpoint(tmp_path / f"step-{step}", seed=step, parameters=PARAMETERS) for step in (1, 2)]
    uri, digests = named(folders)
    content = (folders[0] / WEIGHTS).read_bytes()

    def spoil(*_: int) -> None:
        (folders[0] / WEIGHTS).write_bytes(content[:-1] + b"?")

    local = staging(tmp_path)
    with pytest.raises(CheckpointChanged, match="while it was computed"):
        local.stage(uri, digests, on_progress=spoil)
    assert not list((tmp_path / "staged").glob(f"*/content/{WEIGHTS}"))
    with pytest.raises(CheckpointChanged, match="since it was planned"):
        local.stage(uri, digests)
    (folders[0] / WEIGHTS).unlink()
    with pytest.raises(CheckpointGone, match="no weights"):
        local.stage(uri, digests)


def test_merge_that_does_not_fit_on_the_disk_is_none_and_is_made_whole_once_it_fits(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / f"step-{step}", seed=step, parameters=PARAMETERS) for step in (1, 2)]
    uri, digests = named(folders)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, ((folders[1] / WEIGHTS).stat().st_size - 1, hard)
    )  # the last write is partial
    try:
        with pytest.raises(StorageError, match="No space left"):
            staging(tmp_path).stage(uri, digests)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with staging(tmp_path).stage(uri, digests) as staged:
        assert (staged.path / WEIGHTS).stat().st_size == (folders[1] / WEIGHTS).stat().st_size


def test_killed_merge_goes_on_after_the_last_file_that_it_finished(tmp_path: Path) -> None:
    folders = [
        write_checkpoint(tmp_path / f"step-{step}", seed=step, parameters=PARAMETERS, shards=3) for step in (1, 2)
    ]
    uri, digests = named(folders)
    files = tmp_path / "staged" / f"{digests.checkpoint}.partial" / f"made-{boot_id()}"

    def work() -> None:
        def wait(*_: int) -> None:
            while len(list(files.glob("*.safetensors"))) == 2:
                signal.pause()

        staging(tmp_path).stage(uri, digests, on_progress=wait)

    child = _fork.Process(target=work)
    child.start()
    eventually(lambda: len(list(files.glob("*.safetensors"))) == 2)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    made = {path.name: path.stat().st_ino for path in files.glob("*.safetensors")}
    with staging(tmp_path).stage(uri, digests) as staged:
        assert {name: (staged.path / name).stat().st_ino for name in made} == made
        first, second = map(tensors, folders)
        for name, got in tensors(staged.path).items():
            assert np.array_equal(got, (first[name] + second[name]) / np.float32(2))


@pytest.mark.parametrize("synced", [True, False])
def test_merge_is_computed_again_after_a_restart_that_came_before_the_disk_had_it(
    synced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, digests = named([write_checkpoint(tmp_path / f"step-{step}", seed=step) for step in (1, 2)])
    note, sync = tmp_path / "staged" / f"{digests.checkpoint}.note", os.fsync
    writing, stopped = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        if threading.current_thread().name == "syncing":
            writing.set()
            assert synced or stopped.wait(30)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    with staging(tmp_path).stage(uri, digests) as staged:
        inode = (staged.path / WEIGHTS).stat().st_ino
        assert writing.wait(30)
        if synced:
            eventually(lambda: boot_id().encode() not in note.read_bytes())
        with staging(tmp_path).stage(uri, digests) as again:
            assert (again.path / WEIGHTS).stat().st_ino == inode
    monkeypatch.setattr("pools.weights.staging.boot_id", lambda: "restarted")
    with staging(tmp_path).stage(uri, digests) as again:
        assert ((again.path / WEIGHTS).stat().st_ino == inode) is synced
    stopped.set()


def test_merge_that_the_disk_could_not_keep_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, digests = named([write_checkpoint(tmp_path / f"step-{step}", seed=step) for step in (1, 2)])
    sync, is_staged = os.fsync, threading.Event()

    def broken(descriptor: int) -> None:
        if threading.current_thread().name == "syncing":
            assert is_staged.wait(30)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    def is_refused() -> bool:
        try:
            staged.verify()
        except StorageError as error:
            return "that the disk could not keep" in error.found
        return False

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        with staging(tmp_path).stage(uri, digests) as staged:
            is_staged.set()
            eventually(is_refused)
    with staging(tmp_path).stage(uri, digests) as again:
        again.verify()


def test_integers_must_be_the_same_and_are_kept_while_what_cannot_be_averaged_is_refused(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / f"step-{step}") for step in (1, 2)]

    def write(*numbers: int, dtype: str = "F16") -> tuple[str, ModelDigests]:
        for folder, number in zip(folders, numbers, strict=True):
            held = {"ids": ("I64", (1,), struct.pack("<q", number)), "half": (dtype, (3,), struct.pack("<3e", 1, 2, 3))}
            write_tensors(folder / WEIGHTS, held)
        return named(folders)

    with staging(tmp_path).stage(*write(7, 7)) as staged:
        assert (staged.path / WEIGHTS).read_bytes() == (folders[0] / WEIGHTS).read_bytes()
    with pytest.raises(CheckpointError, match="the same I64 numbers of ids"):
        staging(tmp_path).stage(*write(7, 8))
    with pytest.raises(CheckpointError, match="half is F8_E5M2"):
        write(7, 7, dtype="F8_E5M2")


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"config": {**CONFIG, "hidden_size": 9}}, r"config.json differs \(hidden_size\)"),
        ({"template": "{{ other }}"}, r"the tokenizer differs \(tokenizer_config.json\)"),
        ({"parameters": {**PARAMETERS, "bias": (3,)}}, r"the names of tensors differ \(bias\)"),
        ({"parameters": {**PARAMETERS, "model.norm.weight": (6,)}}, r"model.norm.weight is F32\[5\] and F32\[6\]"),
    ],
)
def test_checkpoints_that_do_not_belong_together_are_refused_with_what_differs(
    tmp_path: Path, options: dict[str, Any], difference: str
) -> None:
    folders = [
        write_checkpoint(tmp_path / "step-1", parameters=PARAMETERS),
        write_checkpoint(tmp_path / "step-2", **{"parameters": PARAMETERS, **options}),
    ]
    with pytest.raises(CheckpointError, match=difference):
        named(folders)


def test_config_that_differs_in_its_writer_and_index_of_other_weights_are_the_same(tmp_path: Path) -> None:
    for step, version in ((1, "4.57.0"), (2, "4.57.1")):
        write_checkpoint(tmp_path / f"step-{step}", config={**CONFIG, "transformers_version": version})
    (tmp_path / "step-2" / "pytorch_model.bin.index.json").write_text("{}")
    assert inspect_checkpoint(str(Merge.of_folders("mean", [f"{tmp_path}/step-1", f"{tmp_path}/step-2"]))).complete
