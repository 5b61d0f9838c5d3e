"""Kept checkpoints: readable after a trainer removed them, on any disk, within bounds, and gone afterwards."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.models import write_checkpoint
from fakes.polling import eventually
from pools.engine.launch import staging
from pools.weights.content import content_digest, file_identity, hash_of
from pools.weights.kept import Keeper, keeps_removed_files, kept_location
from pools.weights.layouts import inspect_checkpoint
from pools.weights.merges import Merge
from pools.weights.model_files import ModelDigests, ModelFolder, digest_model_folder, inspect_model_folder
from resources.errors import CheckpointGone
from resources.settings import process_environment, settings
from resources.storage import storage

Inspected = tuple[ModelFolder, ModelDigests]

KEEPS = """
import sys, time
from pools.weights.kept import Keeper
from pools.weights.model_files import digest_model_folder, inspect_model_folder
folder = inspect_model_folder(sys.argv[1])
keeper = Keeper(print).__enter__()
keeper.keep(folder, digest_model_folder(folder), wanted_by="a")
print("kept", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()


def checkpoint(run: Path, step: int = 1) -> Inspected:
    folder = inspect_model_folder(str(write_checkpoint(run / f"checkpoint-{step}", seed=step)))
    return folder, digest_model_folder(folder)


def keeper(by_opening: Callable[[Path], bool] = keeps_removed_files) -> Keeper:
    return Keeper(on_unprotected=lambda reason: pytest.fail(reason), by_opening=by_opening)


def held() -> list[str]:
    return [path.name for path in (settings().staging_dir / "kept").glob("*")]


def is_kept(folder: ModelFolder, digests: ModelDigests) -> bool:
    with kept_location(folder.uri, digests) as uri:
        return uri != folder.uri


def staged_weights(uri: str, digests: ModelDigests) -> bytes:
    with staging() as copies, copies.stage(uri, digests) as staged:
        staged.verify()
        return (staged.path / "model.safetensors").read_bytes()


def test_kept_checkpoint_removed_by_its_trainer_is_staged_until_it_is_released(tmp_path: Path) -> None:
    folder, digests = checkpoint(tmp_path / "run")
    content = Path(folder.uri, "model.safetensors").read_bytes()
    with keeper() as keeping:
        for user in ("a", "b", "b"):
            keeping.keep(folder, digests, wanted_by=user)
        shutil.rmtree(folder.uri)
        keeping.release("a")
        assert staged_weights(folder.uri, digests) == content
        with staging() as copies:
            assert (copies.stage_small_files(folder.uri, digests) / "config.json").is_file()
        keeping.release("b")
        assert held() == []
        with pytest.raises(CheckpointGone):
            staged_weights(folder.uri, digests)


def test_kept_checkpoint_looks_as_before_to_all_that_list_it(tmp_path: Path) -> None:
    folder, digests = checkpoint(tmp_path / "run")
    before = storage.list_files(str(tmp_path / "run"))
    with keeper() as keeping:
        keeping.keep(folder, digests, wanted_by="a")
        staged_weights(folder.uri, digests)
        assert storage.list_files(str(tmp_path / "run")) == before
    assert storage.list_files(str(tmp_path / "run")) == before


def test_kept_checkpoint_that_is_written_again_is_staged_as_it_was_planned(tmp_path: Path) -> None:
    folder, digests = checkpoint(tmp_path / "run")
    content = Path(folder.uri, "model.safetensors").read_bytes()
    with keeper() as keeping:
        keeping.keep(folder, digests, wanted_by="a")
        shutil.rmtree(folder.uri)
        write_checkpoint(Path(folder.uri), seed=7)
        assert staged_weights(folder.uri, digests) == content


@pytest.mark.parametrize(("age_seconds", "copied"), [(0, True), (3 * 24 * 3600, False)])
def test_checkpoint_on_a_file_system_that_drops_open_files_is_copied_while_its_run_is_young(
    tmp_path: Path, age_seconds: int, copied: bool
) -> None:
    folder, _ = checkpoint(tmp_path / "run")
    then = time.time() - age_seconds
    for path in (tmp_path / "run", *(tmp_path / "run").rglob("*")):
        os.utime(path, (then, then))
    folder = inspect_model_folder(folder.uri)
    digests = digest_model_folder(folder)
    content = Path(folder.uri, "model.safetensors").read_bytes()
    with keeper(by_opening=lambda _: False) as keeping:
        keeping.keep(folder, digests, wanted_by="a")
        if copied:
            eventually(lambda: is_kept(folder, digests))
            with Path(folder.uri, "model.safetensors").open("r+b") as overwritten:
                overwritten.write(bytes(100))
            assert staged_weights(folder.uri, digests) == content
            keeping.release("a")
        assert held() == []


def test_only_file_systems_of_a_machine_keep_what_is_removed() -> None:
    assert keeps_removed_files(Path("/dev/shm"))
    assert not keeps_removed_files(Path("/proc/self"))


def test_checkpoints_beyond_the_bound_are_left_alone_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = [checkpoint(tmp_path / "run", step) for step in (1, 2, 3)]
    size_bytes = sum(file.size for file in checkpoints[0][0].files.values())
    monkeypatch.setenv("ASSAY_STAGING_MAX_BYTES", str(2 * size_bytes - 1))
    settings.cache_clear()
    reasons: list[str] = []
    with Keeper(reasons.append) as keeping:
        for each in checkpoints:
            keeping.keep(*each, wanted_by=each[0].uri)
        assert [is_kept(*each) for each in checkpoints] == [True, False, False]
        keeping.release(checkpoints[0][0].uri)
        keeping.keep(*checkpoints[2], wanted_by="again")
    assert len(reasons) == 1 and "a bound of" in reasons[0]


def test_checkpoints_beyond_the_limit_of_open_files_are_left_alone_with_a_reason(tmp_path: Path) -> None:
    checkpoints = [checkpoint(tmp_path / "run", step) for step in range(3)]
    program = (
        "import os, resource; limit = len(os.listdir('/proc/self/fd')) + 40\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))\n"
        "import sys; from pools.weights.kept import Keeper\n"
        "from pools.weights.model_files import digest_model_folder, inspect_model_folder\n"
        "with Keeper(print) as keeper:\n"
        "    for number in range(40):\n"
        "        for uri in sys.argv[1:]:\n"
        "            folder = inspect_model_folder(uri)\n"
        "            keeper.keep(folder, digest_model_folder(folder), wanted_by='a')\n"
        "            digest_model_folder(inspect_model_folder(uri))\n"
    )
    uris = [folder.uri for folder, _ in checkpoints] + [checkpoint(tmp_path / "more", step)[0].uri for step in range(9)]
    done = subprocess.run(
        [sys.executable, "-c", program, *uris], capture_output=True, text=True, env=process_environment(), check=True
    )
    assert done.stdout.count("\n") == 1 and "Too many open files" in done.stdout


def test_limit_of_open_files_is_raised_for_kept_checkpoints(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 1000), before[1]))
    try:
        with keeper() as keeping:
            each = checkpoint(tmp_path / "run")
            keeping.keep(*each, wanted_by="a")
            assert is_kept(*each)
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_kept_checkpoint_of_another_process_is_read_until_that_is_killed(tmp_path: Path) -> None:
    folder, digests = checkpoint(tmp_path / "run")
    content = Path(folder.uri, "model.safetensors").read_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", KEEPS, folder.uri], stdout=subprocess.PIPE, env=process_environment()
    ) as planner:
        assert planner.stdout is not None
        assert planner.stdout.readline() == b"kept\n"
        shutil.rmtree(folder.uri)
        with staging() as copies, copies.stage(folder.uri, digests) as staged:
            planner.send_signal(signal.SIGKILL)
            planner.wait()
            staged.verify()
            assert (staged.path / "model.safetensors").read_bytes() == content
            assert is_kept(folder, digests), "by the process that has staged it"
    assert len(held()) == 1, "of the killed process"
    assert not is_kept(folder, digests)
    with keeper():
        assert held() == []


def test_kept_inputs_of_a_merge_are_averaged_after_their_trainer_removed_them(tmp_path: Path) -> None:
    uris = [checkpoint(tmp_path / "run", step)[0].uri for step in (1, 2)]
    merged = inspect_checkpoint(str(Merge.of_folders("mean", uris)))
    digests = digest_model_folder(merged)
    with keeper() as keeping:
        keeping.keep(merged, digests, wanted_by="a")
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
        keeping.keep(folder, digests, wanted_by="a")
        with kept_location(folder.uri, digests) as kept:
            assert kept != folder.uri
            assert digest_in(folder.uri) == digest_in(kept) == b"as it was computed"
    assert digest_in(folder.uri) == b"as it was computed"
