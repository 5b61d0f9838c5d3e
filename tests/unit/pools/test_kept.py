"""Kept checkpoints: readable after a trainer removed them, on any disk, within bounds, and gone afterwards."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.models import write_checkpoint
from fakes.polling import eventually
from pools.engine.launch import staging
from pools.weights.content import content_digest, file_identity, hash_of
from pools.weights.kept import Keeper, hold_kept
from pools.weights.layouts import inspect_checkpoint
from pools.weights.merges import Merge
from pools.weights.model_files import ModelDigests, ModelFolder, digest_model_folder, inspect_model_folder
from resources.errors import CheckpointGone
from resources.settings import settings
from resources.storage import storage
from resources.storage.listings import KEPT_FOLDER

Inspected = tuple[ModelFolder, ModelDigests]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if Path(folder).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("needs a second disk in /dev/shm")
        yield Path(folder)


def checkpoint(run: Path, step: int = 1) -> Inspected:
    folder = inspect_model_folder(str(write_checkpoint(run / f"checkpoint-{step}", seed=step)))
    return folder, digest_model_folder(folder)


def keeper() -> Keeper:
    return Keeper(on_unprotected=lambda reason: pytest.fail(reason))


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.name != "room.lock")


def staged_weights(uri: str, digests: ModelDigests) -> bytes:
    with staging() as copies, copies.stage(uri, digests) as staged:
        staged.verify()
        return (staged.path / "model.safetensors").read_bytes()


def test_kept_checkpoint_removed_by_its_trainer_is_staged_until_it_is_released(tmp_path: Path) -> None:
    folder, digests = checkpoint(tmp_path / "run")
    content = Path(folder.uri, "model.safetensors").read_bytes()
    with keeper() as keeping:
        assert keeping.keep(folder, digests, wanted_by=["a", "b"])
        assert not keeping.keep(folder, digests, wanted_by=["b"])
        shutil.rmtree(folder.uri)
        keeping.release("a")
        assert staged_weights(folder.uri, digests) == content
        with staging() as copies:
            assert (copies.stage_small_files(folder.uri, digests) / "config.json").is_file()
        keeping.release("b")
        assert left_in(settings().staging_dir / "kept") == []
        with pytest.raises(CheckpointGone):
            staged_weights(folder.uri, digests)


def test_kept_checkpoint_on_a_disk_of_its_own_is_linked_there_and_not_discovered(other_disk: Path) -> None:
    folder, digests = checkpoint(other_disk / "runs" / "run")
    with keeper() as keeping:
        assert keeping.keep(folder, digests, wanted_by=["a"])
        assert left_in(other_disk / KEPT_FOLDER)
        assert not any(KEPT_FOLDER in file.uri for file in storage.list_files(str(other_disk)))
        shutil.rmtree(folder.uri)
        staged_weights(folder.uri, digests)
    assert not (other_disk / KEPT_FOLDER).exists()


@pytest.mark.parametrize(("age_seconds", "copied"), [(0, True), (3 * 24 * 3600, False)])
def test_checkpoint_without_links_is_copied_while_its_run_is_young(
    other_disk: Path, monkeypatch: pytest.MonkeyPatch, age_seconds: int, copied: bool
) -> None:
    folder, digests = checkpoint(other_disk / "run")
    then = time.time() - age_seconds
    for path in (other_disk / "run", *(other_disk / "run").rglob("*")):
        os.utime(path, (then, then))
    folder = inspect_model_folder(folder.uri)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # another user's run
    with keeper() as keeping:
        assert not keeping.keep(folder, digests, wanted_by=["a"])
        entries = settings().staging_dir / "kept"
        if copied:
            eventually(lambda: hold_kept(folder.uri, digests)[0] != folder.uri)
            assert Path(hold_kept(folder.uri, digests)[0], "model.safetensors").stat().st_nlink == 1
        else:
            assert not entries.exists()
    assert KEPT_FOLDER not in left_in(other_disk)


def test_checkpoints_beyond_the_bound_are_left_alone_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = [checkpoint(tmp_path / "run", step) for step in (1, 2, 3)]
    size_bytes = sum(file.size for file in checkpoints[0][0].files.values())
    monkeypatch.setenv("ASSAY_STAGING_MAX_BYTES", str(2 * size_bytes - 1))
    settings.cache_clear()
    reasons: list[str] = []
    with Keeper(reasons.append) as keeping:
        assert [keeping.keep(*each, wanted_by=[each[0].uri]) for each in checkpoints] == [True, False, False]
        eventually(lambda: bool(reasons))
    assert len(reasons) == 1 and "a bound of" in reasons[0]


def test_kept_checkpoint_of_a_killed_process_is_removed_with_the_next(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path / "run", 1), checkpoint(tmp_path / "run", 2)

    def keep_and_die() -> None:
        keeper().keep(*first, wanted_by=["a"])
        os._exit(1)

    child = multiprocessing.get_context("fork").Process(target=keep_and_die)
    child.start()
    child.join()
    assert left_in(settings().staging_dir / "kept")
    with keeper() as keeping:
        keeping.keep(*second, wanted_by=["b"])
        assert hold_kept(first[0].uri, first[1])[0] == first[0].uri


def test_kept_checkpoint_held_by_an_engine_stays_until_the_engine_lets_go(tmp_path: Path) -> None:
    folder, digests = checkpoint(tmp_path / "run")
    with staging() as copies:
        with keeper() as keeping:
            keeping.keep(folder, digests, wanted_by=["a"])
            staged = copies.stage(folder.uri, digests)
        shutil.rmtree(folder.uri)
        staged.verify()
        assert (staged.path / "model.safetensors").read_bytes()
        staged.release()
    assert left_in(settings().staging_dir / "kept") == []


def test_kept_inputs_of_a_merge_are_averaged_after_their_trainer_removed_them(tmp_path: Path) -> None:
    uris = [checkpoint(tmp_path / "run", step)[0].uri for step in (1, 2)]
    merged = inspect_checkpoint(str(Merge.of_folders("mean", uris)))
    digests = digest_model_folder(merged)
    with keeper() as keeping:
        assert keeping.keep(merged, digests, wanted_by=["a"])
        shutil.rmtree(tmp_path / "run")
        assert staged_weights(merged.uri, digests)


def test_digest_of_a_kept_checkpoint_is_not_computed_again(tmp_path: Path) -> None:
    folder, digests = checkpoint(tmp_path / "run")
    weights = Path(folder.uri, "model.safetensors")
    known = settings().cache_dir / "digests" / hash_of(repr(file_identity(weights)).encode())
    storage.write_bytes(str(known), b"as it was computed")

    def digest_in(uri: str) -> bytes:
        return content_digest(inspect_model_folder(uri).files["model.safetensors"])

    with keeper() as keeping:
        assert keeping.keep(folder, digests, wanted_by=["a"])
        kept, let_go = hold_kept(folder.uri, digests)
        assert digest_in(folder.uri) == digest_in(kept) == b"as it was computed"
        let_go()
    assert digest_in(folder.uri) == b"as it was computed"
