"""Discovery of checkpoints: names, order, completeness, selection, waiting."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fakes.models import write_checkpoint, write_run
from resources import storage
from resources.errors import BadInput, NoCheckpoints
from tasks.checkpoints import Checkpoint, discover, discover_one, find_checkpoints
from tasks.config import CheckpointSelection
from tasks.names import name_of


class Clock:
    """A clock that moves only by sleeping, and does something meanwhile."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.meanwhile: dict[int, list] = {}

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        for action in self.meanwhile.pop(int(self.seconds), []):
            action()


def find(path: Path, **selection: object) -> list[Checkpoint]:
    clock = Clock()
    return discover.fn(str(path), CheckpointSelection.model_validate(selection), sleep=clock.sleep, clock=clock.now)


@pytest.mark.parametrize(
    ("uri", "run", "name", "step"),
    [
        ("/runs/llama/hf/step-2000", "llama", "llama-2000", 2000),
        ("gs://bucket/llama/hf/step-7", "llama", "llama-7", 7),
        ("/runs/llama/checkpoint-500", "llama", "llama-500", 500),
        ("/runs/llama/global_step_10", "llama", "llama-10", 10),
        ("/runs/llama/hf", "llama", "llama", 0),
        ("/models/my model!", "my-model-", "my-model-", 0),
    ],
)
def test_names_come_from_the_path(uri: str, run: str, name: str, step: int) -> None:
    assert name_of(uri) == (run, name, step)


@pytest.mark.parametrize("suffix", ["", "hf"])
def test_run_is_found_with_and_without_hf_in_order_of_step(tmp_path: Path, suffix: str) -> None:
    run = write_run(tmp_path / "run-a", [100, 20, 3])
    found = find_checkpoints(str(run / suffix))
    assert [(checkpoint.step, checkpoint.name) for checkpoint in found] == [
        (3, "run-a-3"),
        (20, "run-a-20"),
        (100, "run-a-100"),
    ]
    assert all(checkpoint.complete for checkpoint in found)


def test_single_checkpoint_is_found_by_its_own_path(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [20])
    assert [checkpoint.name for checkpoint in find_checkpoints(str(run / "hf" / "step-20"))] == ["run-a-20"]


def test_runs_in_a_store_are_found_alike(tmp_path: Path) -> None:
    storage.copy_from_local(write_run(tmp_path / "run-b", [5, 6]), "memory://bucket/run-b")
    assert [checkpoint.name for checkpoint in find_checkpoints("memory://bucket/run-b")] == ["run-b-5", "run-b-6"]


def test_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(BadInput, match="is a file"):
        find_checkpoints(str(file))


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not there"):
        find_checkpoints(str(tmp_path / "nothing"))


def test_empty_run_says_where_checkpoints_were_expected(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoints, match="hf/step-N") as caught:
        find_checkpoints(str(tmp_path))
    assert caught.value.found == "an empty folder"


def test_half_written_checkpoint_is_reported_and_never_selected(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [1, 2])
    (run / "hf" / "step-2" / "model.safetensors").unlink()
    (run / "hf" / "step-3").mkdir()
    shutil.copy(run / "hf" / "step-1" / "model.safetensors", run / "hf" / "step-3")
    found = {checkpoint.step: checkpoint for checkpoint in find_checkpoints(str(run))}
    assert found[1].complete
    assert "no weights" in found[2].problems[0]
    assert "config.json is missing" in found[3].problems
    assert [checkpoint.step for checkpoint in find(run)] == [1]


def test_run_with_only_incomplete_checkpoints_says_what_is_missing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [7])
    (run / "hf" / "step-7" / "tokenizer.json").unlink()
    with pytest.raises(NoCheckpoints, match=r"1 incomplete \(step-7: no tokenizer"):
        find(run)


def test_upload_that_finishes_while_watched_is_selected(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [1, 2])
    whole = (run / "hf" / "step-2" / "model.safetensors").read_bytes()
    weights = run / "hf" / "step-2" / "model.safetensors"
    weights.write_bytes(whole[:100])
    clock = Clock()
    clock.meanwhile = {3: [lambda: weights.write_bytes(whole)]}
    selection = CheckpointSelection(wait_for_incomplete_seconds=60)
    found = discover.fn(str(run), selection, sleep=clock.sleep, clock=clock.now)
    assert [checkpoint.step for checkpoint in found] == [1, 2]
    assert clock.seconds == 3


def test_upload_that_does_not_finish_is_left_out_after_the_wait(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [1, 2])
    (run / "hf" / "step-2" / "config.json").unlink()
    clock = Clock()
    selection = CheckpointSelection(wait_for_incomplete_seconds=5)
    found = discover.fn(str(run), selection, sleep=clock.sleep, clock=clock.now)
    assert [checkpoint.step for checkpoint in found] == [1]
    assert clock.seconds == 5


def test_native_levanter_checkpoint_is_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [1])
    native = run / "checkpoints" / "step-9"
    (native / "model" / "embeddings").mkdir(parents=True)
    (native / "metadata.json").write_text("{}")
    (native / "model" / "embeddings" / "array").write_text("x")
    found = {checkpoint.step: checkpoint for checkpoint in find_checkpoints(str(run))}
    assert set(found) == {1, 9}
    assert found[9].kind == "levanter"
    assert "export it" in found[9].problems[0]


@pytest.mark.parametrize(
    ("selection", "steps"),
    [
        ({}, [10, 20, 25, 30, 35]),
        ({"which": "latest"}, [35]),
        ({"every_n_steps": 10}, [10, 20, 30, 35]),
        ({"every_n_steps": 25}, [25, 35]),
    ],
)
def test_selection_takes_all_the_latest_or_every_n_steps(
    tmp_path: Path, selection: dict[str, object], steps: list[int]
) -> None:
    run = write_run(tmp_path / "run-a", [10, 20, 25, 30, 35])
    assert [checkpoint.step for checkpoint in find(run, **selection)] == steps


def test_one_of_several_checkpoints_must_be_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [10, 20])
    with pytest.raises(BadInput, match="2, from run-a-10 to run-a-20"):
        discover_one.fn(str(run), latest=False)
    assert discover_one.fn(str(run), latest=True).step == 20
    assert discover_one.fn(str(write_checkpoint(tmp_path / "alone")), latest=False).name == "alone"
