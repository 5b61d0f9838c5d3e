"""Staging: complete and verified copies, resumed after crashes, shared by processes, within a size limit."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from fakes.models import write_checkpoint, write_safetensors
from fakes.polling import eventually
from fakes.stores import FolderStore, failing_after, folder_store, waiting_until
from pools.engine.launch import Servable
from pools.weights.model_files import ModelDigests, digest_model_folder, inspect_model_folder
from pools.weights.staging import Staging
from resources.errors import CheckpointChanged, CheckpointGone, IncompleteCheckpoint, StorageError
from resources.storage import storage

RANGE = 4096
WEIGHTS = "model.safetensors"
PARAMETERS = {"model.embed_tokens.weight": (64, 64), "lm_head.weight": (64, 64)}
_fork = multiprocessing.get_context("fork")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[type[FolderStore]]:
    with folder_store(tmp_path / "reads") as store:
        yield store


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "staged"


def staging(local: Path, *, fitting: float = 10) -> Staging:
    """Creates a staging area with room for `fitting` of the checkpoints below."""
    return Staging(local, max_bytes=int(fitting * 34_000), range_bytes=RANGE, parallel_files=2)


def remote(tmp_path: Path, seed: int, *, shards: int = 1, kind: str = "store") -> tuple[str, ModelDigests]:
    folder = write_checkpoint(tmp_path / "remote" / f"step-{seed}", seed=seed, parameters=PARAMETERS, shards=shards)
    uri = str(folder) if kind == "local" else f"store:/{folder}"
    return uri, digest_model_folder(inspect_model_folder(uri))


def in_child(work: Callable[[], object]) -> ForkProcess:
    def work_alone() -> None:
        code = 1
        try:
            work()
            code = 0
        finally:
            if code:
                os.write(2, traceback.format_exc().encode())  # the child's own streams are pytest's
            os._exit(code)  # a normal exit of the fork would run exit handlers of Prefect from an earlier test

    child = _fork.Process(target=work_alone)
    child.start()
    return child


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


FILES_WITHOUT_WEIGHTS = (
    "consolidated.safetensors",
    "consolidated-00001-of-00002.safetensors",
    "other.safetensors",
    "adapter_model.safetensors",
    "adapter_config.json",
    "pytorch_model.bin",
    "optimizer.pt",
    "training_args.bin",
    "trainer_state.json",
    "README.md",
    "runs/events.json",
)
SMALL = ("merges.txt", "added_tokens.json", "hf_quant_config.json", "modeling_own.py", "nobody_knows_what.bpe")


@pytest.mark.parametrize("kind", ["local", "store"])
def test_stage_shows_weights_and_small_files_and_nothing_else(
    store: type[FolderStore], tmp_path: Path, local: Path, kind: str
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    for name in (*FILES_WITHOUT_WEIGHTS, *SMALL):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    uri = str(folder) if kind == "local" else f"store:/{folder}"
    with staging(local).stage(uri, digest_model_folder(inspect_model_folder(uri))) as staged:
        assert names(staged.path) == {WEIGHTS, "config.json", "tokenizer.json", "tokenizer_config.json", *SMALL}
        assert all(path.is_symlink() == (kind == "local") for path in staged.path.iterdir())
        assert all(path.read_bytes() == (folder / path.name).read_bytes() for path in staged.path.iterdir())


def test_stage_of_a_local_checkpoint_leaves_no_links_behind(tmp_path: Path, local: Path) -> None:
    folders = [write_checkpoint(tmp_path / f"step-{seed}", seed=seed) for seed in range(3)]
    digests = [digest_model_folder(inspect_model_folder(str(folder))) for folder in folders]
    local_staging = staging(local)
    held = local_staging.stage(str(folders[0]), digests[0])
    local_staging.stage(str(folders[1]), digests[1]).release()
    last = local_staging.stage(str(folders[2]), digests[2])
    assert {path for path in local.iterdir() if path.is_dir()} == {held.path, last.path}
    assert (held.path / WEIGHTS).resolve() == folders[0] / WEIGHTS


@pytest.mark.parametrize("kind", ["local", "store"])
def test_stage_of_a_checkpoint_that_lost_a_file_makes_it_again(
    store: type[FolderStore], tmp_path: Path, local: Path, kind: str
) -> None:
    uri, digests = remote(tmp_path, 1, kind=kind)
    with staging(local).stage(uri, digests) as staged:
        (staged.path / "tokenizer.json").unlink()
        with pytest.raises(IncompleteCheckpoint if kind == "local" else StorageError):
            staged.verify()
    with staging(local).stage(uri, digests) as staged:
        staged.verify()
        assert inspect_model_folder(str(staged.path), storage.list_files(str(staged.path), within="/")).complete


def test_file_that_checkpoints_of_a_run_share_is_staged(tmp_path: Path, local: Path) -> None:
    folder = write_checkpoint(tmp_path / "run-a" / "step-1")
    digests = digest_model_folder(inspect_model_folder(str(folder)))
    (folder / "tokenizer.json").rename(tmp_path / "run-a" / "tokenizer.json")
    (folder / "tokenizer.json").symlink_to("../tokenizer.json")
    with staging(local).stage(str(folder), digests) as staged:
        assert (staged.path / "tokenizer.json").resolve() == tmp_path / "run-a" / "tokenizer.json"


def test_staged_checkpoint_stays_what_its_link_showed(tmp_path: Path, local: Path) -> None:
    first, second = (write_checkpoint(tmp_path / f"step-{seed}", seed=seed) for seed in (1, 2))
    latest = tmp_path / "latest"
    latest.symlink_to(first)
    digests = digest_model_folder(inspect_model_folder(str(latest)))
    with staging(local).stage(str(latest), digests) as staged:
        latest.unlink()
        latest.symlink_to(second)
        staged.verify()
        assert (staged.path / WEIGHTS).read_bytes() == (first / WEIGHTS).read_bytes()


@pytest.mark.parametrize("kind", ["local", "store"])
@pytest.mark.parametrize("name", [WEIGHTS, "merges.txt"])
def test_changed_staged_checkpoint_is_reported(
    store: type[FolderStore], tmp_path: Path, local: Path, kind: str, name: str
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    (folder / "merges.txt").write_text("a b")
    uri = str(folder) if kind == "local" else f"store:/{folder}"
    with staging(local).stage(uri, digest_model_folder(inspect_model_folder(uri))) as staged:
        staged.verify()
        file = staged.path / name
        before = file.stat()
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(CheckpointChanged if kind == "local" else StorageError):
            staged.verify()


@pytest.mark.parametrize("kind", ["local", "store"])
def test_stage_of_a_checkpoint_written_since_is_refused_without_reading_remote_weights(
    store: type[FolderStore], tmp_path: Path, local: Path, kind: str
) -> None:
    store.hash_kind = "md5"
    uri, digests = remote(tmp_path, 1, kind=kind)
    write_safetensors(tmp_path / "remote" / "step-1" / WEIGHTS, seed=2, parameters=PARAMETERS)
    with pytest.raises(CheckpointChanged, match="changed since it was planned: other contents: weights"):
        staging(local).stage(uri, digests)
    assert store.ranges(WEIGHTS) == []


def test_stage_of_a_checkpoint_written_during_the_copy_is_refused(
    store: type[FolderStore], tmp_path: Path, local: Path
) -> None:
    uri, digests = remote(tmp_path, 1)
    config = tmp_path / "remote" / "step-1" / "config.json"
    store.before_read = lambda file, start: os.utime(config, (1, 1)) if start == 2 * RANGE else None
    with pytest.raises(CheckpointChanged, match="when copying began"):
        staging(local).stage(uri, digests)
    assert not (local / digests.checkpoint).exists()


def test_stage_with_a_flipped_byte_is_refused_and_copied_again(
    store: type[FolderStore], tmp_path: Path, local: Path
) -> None:
    uri, digests = remote(tmp_path, 1)
    store.spoil = lambda content: content[:-1] + bytes([content[-1] ^ 1]) if len(content) == RANGE else content
    with pytest.raises(StorageError, match="removed"):
        staging(local).stage(uri, digests)
    assert not (local / digests.checkpoint).exists()
    store.spoil = lambda content: content
    with staging(local).stage(uri, digests) as staged:
        assert (staged.path / WEIGHTS).read_bytes() == (tmp_path / "remote" / "step-1" / WEIGHTS).read_bytes()


def test_stage_reports_growing_bytes_up_to_all(store: type[FolderStore], tmp_path: Path, local: Path) -> None:
    uri, digests = remote(tmp_path, 1)
    seen: list[tuple[int, int]] = []
    staging(local).stage(uri, digests, on_progress=lambda copied, total: seen.append((copied, total))).release()
    total = sum(file.size for file in storage.list_files(uri))
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    assert len(seen) > 8


def test_stage_evicts_the_least_recently_used_under_any_clock(
    store: type[FolderStore], tmp_path: Path, local: Path
) -> None:
    checkpoints = [remote(tmp_path, seed) for seed in range(3)]
    copies = [local / digests.checkpoint for _, digests in checkpoints]
    with staging(local, fitting=2.5) as bounded:
        for uri, digests in checkpoints[:2]:
            bounded.stage(uri, digests).release()
        bounded.stage(*checkpoints[0]).release()
        for later, path in enumerate(sorted(local.rglob("*"))):
            os.utime(path, (2_000_000_000 - later, 2_000_000_000 - later))
        bounded.stage(*checkpoints[2]).release()
    assert [copy.is_dir() for copy in copies] == [True, False, True]
    assert {name[:32] for name in names(local) if name != "room.lock"} == {copies[0].name, copies[2].name}


def test_stage_counts_unfinished_copies(store: type[FolderStore], tmp_path: Path, local: Path) -> None:
    begun, new = remote(tmp_path, 1), remote(tmp_path, 2)
    store.before_read = failing_after(5, WEIGHTS)
    with pytest.raises(StorageError):
        staging(local, fitting=1.2).stage(*begun)
    store.before_read = failing_after(1000, WEIGHTS)
    staging(local, fitting=1.2).stage(*new).release()
    assert not (local / f"{begun[1].checkpoint}.partial").exists()


def test_stage_never_evicts_what_is_held(store: type[FolderStore], tmp_path: Path, local: Path) -> None:
    held, new = remote(tmp_path, 1), remote(tmp_path, 2)
    bounded = staging(local, fitting=1.5)
    with bounded.stage(*held) as staged:
        with pytest.raises(StorageError, match=f"in use: {held[1].checkpoint[:12]} \\(3.\\.. kB\\)"):
            bounded.stage(*new)
        assert inspect_model_folder(str(staged.path)).complete
    bounded.stage(*new).release()
    assert not staged.path.exists()


def test_stage_of_more_than_the_bound_evicts_nothing(store: type[FolderStore], tmp_path: Path, local: Path) -> None:
    kept, new = remote(tmp_path, 1), remote(tmp_path, 2)
    staging(local).stage(*kept).release()
    with pytest.raises(StorageError, match=r"a bound of 17\.0 kB"):
        staging(local, fitting=0.5).stage(*new)
    assert (local / kept[1].checkpoint).is_dir()


def test_stage_on_a_disk_that_is_too_small_is_refused(
    store: type[FolderStore], tmp_path: Path, small_disk: Path
) -> None:
    if not small_disk.is_mount():
        pytest.skip("needs a disk of its own")
    folder = write_checkpoint(tmp_path / "large", parameters={"model.embed_tokens.weight": (600, 600)})
    digests = digest_model_folder(inspect_model_folder(f"store:/{folder}"))
    with pytest.raises(StorageError, match=r"room for 1\.4 MB"):
        staging(small_disk, fitting=1000).stage(f"store:/{folder}", digests)
    assert not (small_disk / digests.checkpoint).exists()


def test_stage_in_two_processes_at_once_copies_once(store: type[FolderStore], tmp_path: Path, local: Path) -> None:
    uri, digests = remote(tmp_path, 1)
    store.log.write_text("")
    go = tmp_path / "go"
    store.before_read = waiting_until(go, name=WEIGHTS, start=RANGE)
    children = [in_child(lambda: staging(local).stage(uri, digests)) for _ in range(2)]
    eventually(lambda: (tmp_path / "go.reached").exists())
    go.touch()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0, 0]
    ranges = store.ranges(WEIGHTS)
    assert len(set(ranges)) == len(ranges) == 9


def test_stage_after_a_process_was_killed_in_the_middle_goes_on(
    store: type[FolderStore], tmp_path: Path, local: Path
) -> None:
    first, second = (f"model-0000{shard}-of-00002.safetensors" for shard in (1, 2))
    uri, digests = remote(tmp_path, 1, shards=2)
    store.log.write_text("")
    store.before_read = waiting_until(tmp_path / "never", name=second, start=2 * RANGE)
    child = in_child(lambda: staging(local).stage(uri, digests))
    eventually(lambda: (tmp_path / "never.reached").exists())
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(30)
    assert not (local / digests.checkpoint).exists()
    store.before_read = failing_after(1000, second)
    with staging(local).stage(uri, digests) as staged:
        assert inspect_model_folder(str(staged.path)).complete
    for shard in (first, second):
        ranges = store.ranges(shard)
        assert len(set(ranges)) == len(ranges) == 5


def test_stage_evicts_what_another_process_held_only_after_its_death(
    store: type[FolderStore], tmp_path: Path, local: Path
) -> None:
    held, new = remote(tmp_path, 1), remote(tmp_path, 2)

    def hold() -> None:
        kept = staging(local, fitting=1.5).stage(*held)
        (tmp_path / "held").touch()
        signal.pause()
        kept.release()

    child = in_child(hold)
    eventually(lambda: (tmp_path / "held").exists())
    bounded = staging(local, fitting=1.5)
    with pytest.raises(StorageError, match="in use"):
        bounded.stage(*new)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(30)
    bounded.stage(*new).release()
    assert not (local / held[1].checkpoint).exists()


def test_stage_of_what_is_prefetched_joins_it(store: type[FolderStore], tmp_path: Path, local: Path) -> None:
    uri, digests = remote(tmp_path, 1)
    store.log.write_text("")
    store.before_read = waiting_until(tmp_path / "go", name=WEIGHTS, start=4 * RANGE)
    seen: list[int] = []
    with staging(local) as local_staging:
        local_staging.prefetch(uri, digests)
        eventually(lambda: (tmp_path / "go.reached").exists())
        joining = threading.Thread(
            target=lambda: local_staging.stage(uri, digests, on_progress=lambda count, _: seen.append(count)).release()
        )
        joining.start()
        eventually(lambda: seen and seen[0] >= 4 * RANGE)
        (tmp_path / "go").touch()
        joining.join(30)
    assert (local / digests.checkpoint).is_dir()
    ranges = store.ranges(WEIGHTS)
    assert len(set(ranges)) == len(ranges) == 9


def test_prefetch_gives_way_to_another_checkpoint_and_goes_on(
    store: type[FolderStore], tmp_path: Path, local: Path
) -> None:
    later, now = remote(tmp_path, 1), remote(tmp_path, 2)
    store.log.write_text("")
    first, second = f"step-1/{WEIGHTS}", f"step-2/{WEIGHTS}"

    def slow_until_the_second_is_read(file: Path, start: int) -> None:
        if str(file).endswith(first) and not store.ranges(second):
            time.sleep(0.02)

    store.before_read = slow_until_the_second_is_read
    with Staging(local, max_bytes=1_000_000, range_bytes=500) as local_staging:
        local_staging.prefetch(*later)
        eventually(lambda: len(store.ranges(first)) > 3)
        local_staging.stage(*now).release()
        read_meanwhile = len(store.ranges(first))
        assert read_meanwhile < 60
        eventually(lambda: (local / later[1].checkpoint).is_dir())
    for weights in (first, second):
        assert len(set(store.ranges(weights))) == len(store.ranges(weights)) == 66
    read = [line.split("\t")[0] for line in store.log.read_text().splitlines() if WEIGHTS in line]
    of_second = [index for index, file in enumerate(read) if file.endswith(second)]
    assert of_second == list(range(of_second[0], of_second[-1] + 1)), "both were copied at once"


def test_prefetch_keeps_only_the_newest_of_those_waiting(store: type[FolderStore], tmp_path: Path, local: Path) -> None:
    first, replaced, newest = (remote(tmp_path, seed) for seed in range(3))
    store.before_read = waiting_until(tmp_path / "go", name=WEIGHTS, start=RANGE)
    with staging(local) as local_staging:
        local_staging.prefetch(*first)
        eventually(lambda: (tmp_path / "go.reached").exists())
        local_staging.prefetch(*replaced)
        local_staging.prefetch(*newest)
        (tmp_path / "go").touch()
        eventually(lambda: (local / newest[1].checkpoint).is_dir())
    assert (local / first[1].checkpoint).is_dir()
    assert not (local / replaced[1].checkpoint).exists()


def test_prefetch_error_is_met_by_stage(store: type[FolderStore], tmp_path: Path, local: Path) -> None:
    broken, sound = remote(tmp_path, 1), remote(tmp_path, 2)
    (tmp_path / "remote" / "step-1" / WEIGHTS).write_bytes(b"cut off")
    with staging(local) as local_staging:
        local_staging.prefetch(*broken)
        with pytest.raises(IncompleteCheckpoint):
            local_staging.stage(*broken)
        local_staging.prefetch(*sound)
        eventually(lambda: (local / sound[1].checkpoint).is_dir())


def test_close_ends_a_prefetch_between_ranges(store: type[FolderStore], tmp_path: Path, local: Path) -> None:
    uri, digests = remote(tmp_path, 1)
    store.before_read = waiting_until(tmp_path / "go", name=WEIGHTS, start=4 * RANGE)
    local_staging = staging(local)
    local_staging.prefetch(uri, digests)
    eventually(lambda: (tmp_path / "go.reached").exists())
    closing = threading.Thread(target=local_staging.close)
    closing.start()
    with pytest.raises(StorageError, match="closed"):
        local_staging.stage(uri, digests)
    (tmp_path / "go").touch()
    closing.join(30)
    content = local / f"{digests.checkpoint}.partial" / "content"
    assert (content / f"{WEIGHTS}.partial").stat().st_size == 5 * RANGE
    assert not (local / digests.checkpoint).exists()


def test_small_files_are_copied_once_without_weights(store: type[FolderStore], tmp_path: Path, local: Path) -> None:
    (uri, digests), (other_uri, other) = remote(tmp_path, 1), remote(tmp_path, 2)
    store.log.write_text("")
    folder = staging(local).stage_small_files(uri, digests)
    assert names(folder) == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert staging(local).stage_small_files(other_uri, other) == folder
    assert store.ranges("tokenizer.json") == [(0, (folder / "tokenizer.json").stat().st_size)]
    assert store.ranges(WEIGHTS) == []
    assert staging(local).stage_small_files(uri.removeprefix("store:/"), digests) == folder


@pytest.mark.parametrize("damage", [lambda file: file.write_text("{}"), Path.unlink])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_small_files_that_were_damaged_since_are_copied_again(
    store: type[FolderStore], tmp_path: Path, local: Path, damage: Callable[[Path], None], name: str
) -> None:
    uri, digests = remote(tmp_path, 1)
    file = staging(local).stage_small_files(uri, digests) / name
    before = file.read_bytes()
    damage(file)
    assert (staging(local).stage_small_files(uri, digests) / name).read_bytes() == before
    assert names(local / "small") == {file.parent.name}


def test_small_files_that_differ_from_the_plan_are_refused(
    store: type[FolderStore], tmp_path: Path, local: Path
) -> None:
    uri, digests = remote(tmp_path, 1)
    (tmp_path / "remote" / "step-1" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointChanged, match="tokenizer"):
        staging(local).stage_small_files(uri, digests)
    assert names(local / "small") == set()


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS, "."])
def test_checkpoint_with_a_folder_in_removal_is_gone(tmp_path: Path, held: bool, name: str) -> None:
    folder = write_checkpoint(tmp_path / "step-1", seed=1)
    servable = Servable.from_uri("run-1", str(folder))
    with Staging(tmp_path / "staged", max_bytes=10**6) as staging, ExitStack() as holding:
        check = holding.enter_context(staging.stage(servable.uri, servable.digests)).verify if held else None
        shutil.rmtree(folder) if name == "." else (folder / name).unlink()
        words = "its folder was removed" if name == "." else "its folder is being removed"
        with pytest.raises(CheckpointGone, match=words) as caught:
            check() if check else staging.stage(servable.uri, servable.digests)
    assert caught.value.record_status == "gone"
