"""Discovery of checkpoints: names, order, completeness, selection, waiting."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from fakes.models import write_checkpoint, write_run
from pools.weights.model_files import digest_model_folder
from resources.errors import BadInput
from resources.storage import storage
from tasks.checkpoints.discovery import LOADED_NATIVELY, Checkpoint, discover, discover_checkpoint, find_checkpoints
from tasks.checkpoints.run_snapshot import snapshot_run
from tasks.errors import NoCheckpoints
from tasks.spec.evaluation import CheckpointSelection
from tasks.spec.names import name_of

RUN_ID = "0123456789abcdef0123456789abcdef"


class Clock:
    """A clock that advances only in sleeps, and runs a function in each."""

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
        ("/runs/llama/step-10\n", "step-10-", "step-10-", 0),
        ("/runs/llama/step-٣", "step--", "step--", 0),
        ("/runs/llama/hf", "llama", "llama", 0),
        ("/runs/llama/./hf/.", "llama", "llama", 0),
        ("/models/my model!", "my-model-", "my-model-", 0),
        (f"runs:/{RUN_ID}/checkpoints/hf/step-5", "checkpoints-01234567", "checkpoints-01234567-5", 5),
        (f"mlflow-artifacts://host:1/2/{RUN_ID}/artifacts/model", "model-01234567", "model-01234567", 0),
        (f"runs:/{RUN_ID}", "01234567", "01234567", 0),
        ("models:/llama/3", "llama-v3", "llama-v3", 0),
        ("models:/llama@champion/hf/step-5", "llama-champion", "llama-champion-5", 5),
        ("/runs/my-run/global_step_10/actor/huggingface", "my-run", "my-run-10", 10),
        ("/runs/my-run/global_step10_hf", "my-run", "my-run-10", 10),
        ("/runs/my-run/checkpoints/100", "my-run", "my-run-100", 100),
        ("/runs/my-run/checkpoints", "my-run", "my-run", 0),
        ("/runs/my-run/epoch0epochstep9globalstep19", "my-run", "my-run-19", 19),
        ("/runs/my-run/epoch_0_step_99/model/consolidated", "my-run", "my-run-99", 99),
        ("/runs/llama-step-100", "llama", "llama-100", 100),
        ("/runs/llama-batch-32", "llama-batch-32", "llama-batch-32", 0),
        ("/runs/llama-step-10000-lr3", "llama-step-10000-lr3", "llama-step-10000-lr3", 0),
        ("/runs/my-run/checkpoint-best", "checkpoint-best", "checkpoint-best", 0),
        ("hf://owner/olmo@stage1-step100-tokens1B", "olmo-stage1", "olmo-stage1-100", 100),
        ("hf://owner/olmo@main", "olmo@main", "olmo@main", 0),
        ("mean(/runs/llama@8000..10000)", "llama", "llama", 0),
        ("mean(/r/a/hf/step-10,/r/a/hf/step-20,/r/a/hf/step-30)", "a", "a-10-to-30-mean3", 30),
        ("ema(/r/a/step-10, /r/a/step-20, 0.9)", "a", "a-10-to-20-ema2-0.9", 20),
        ("mean(/r/a/step-10, /r/a/step-15, /r/a/step-30)", "a", "a-10-to-30-mean3-9ceb89", 30),
        ("interpolate(/r/a/step-1, /r/b/step-2, 0.3)", "b", "b-1-to-2-interpolate-0.3-1a83e2", 2),
    ],
)
def test_names_come_from_the_path(uri: str, run: str, name: str, step: int) -> None:
    assert name_of(uri) == (run, name, step)


@pytest.mark.parametrize("suffix", ["", "hf"])
def test_run_is_found_with_and_without_hf_in_order_of_step(tmp_path: Path, suffix: str) -> None:
    run = write_run(tmp_path / "run-a", [100, 20, 3])
    checkpoints = find_checkpoints(str(run / suffix))
    assert [(checkpoint.step, checkpoint.name) for checkpoint in checkpoints] == [
        (3, "run-a-3"),
        (20, "run-a-20"),
        (100, "run-a-100"),
    ]
    assert all(checkpoint.complete for checkpoint in checkpoints)


def test_path_without_checkpoints_is_refused_with_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "model.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="is a file"):
        find_checkpoints(str(file))
    with pytest.raises(BadInput, match="is not there"):
        find_checkpoints(str(tmp_path / "nothing"))
    with pytest.raises(NoCheckpoints, match=r"hf/step-N[\s\S]*an empty folder"):
        find_checkpoints(str(tmp_path / "empty"))


def test_half_written_checkpoint_is_reported_and_never_selected(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [1, 2])
    (run / "hf" / "step-2" / "model.safetensors").unlink()
    (run / "hf" / "step-3").mkdir()
    shutil.copy(run / "hf" / "step-1" / "model.safetensors", run / "hf" / "step-3")
    by_step = {checkpoint.step: checkpoint for checkpoint in find_checkpoints(str(run))}
    assert by_step[1].complete
    assert "no weights" in by_step[2].problems[0]
    assert "config.json is missing" in by_step[3].problems
    assert [checkpoint.step for checkpoint in find(run)] == [1]


def test_malformed_checkpoint_does_not_end_discovery_of_its_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [1, 2, 3, 4, 5])
    steps = {step: run / "hf" / f"step-{step}" for step in range(1, 6)}
    (steps[2] / "config.json").write_text('{"architectures": [null]}')
    (steps[3] / "model.safetensors").unlink()
    (steps[3] / "model.safetensors").symlink_to("model.safetensors")
    (steps[4] / "model.safetensors").unlink()
    (steps[4] / "model.safetensors").symlink_to(steps[1])
    (steps[5] / "config.json").unlink()
    os.mkfifo(steps[5] / "config.json")
    for step in (6, 7):
        metadata = write_native(run / "checkpoints" / f"step-{step}", step=step) / "metadata.json"
        metadata.write_text("[" * 100_000)
    metadata.unlink()
    os.mkfifo(metadata)
    os.mkfifo(run / "checkpoints" / "step-6" / "d" / "array")
    checkpoints = find_checkpoints(str(run), kinds=LOADED_NATIVELY)
    assert [checkpoint.step for checkpoint in checkpoints if checkpoint.complete] == [1]
    assert len(checkpoints) == 7
    assert [seen.step for seen in snapshot_run(str(run)) if seen.complete] == [1]


def test_run_with_only_incomplete_checkpoints_says_what_is_missing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [7])
    (run / "hf" / "step-7" / "tokenizer.json").unlink()
    with pytest.raises(NoCheckpoints, match=r"1 incomplete \(step-7: no tokenizer"):
        find(run)


@pytest.mark.parametrize(("arrives_after", "steps", "waited"), [(3, [1, 2], 3), (99, [1], 5)])
def test_upload_is_selected_if_it_finishes_within_the_wait(
    tmp_path: Path, arrives_after: int, steps: list[int], waited: int
) -> None:
    run = write_run(tmp_path / "run-a", [1, 2])
    weights = run / "hf" / "step-2" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    clock = Clock()
    clock.meanwhile = {arrives_after: [lambda: weights.write_bytes(whole)]}
    selection = CheckpointSelection(wait_for_incomplete_seconds=5)
    selected = discover.fn(str(run), selection, sleep=clock.sleep, clock=clock.now)
    assert [checkpoint.step for checkpoint in selected] == steps
    assert clock.seconds == waited


def write_native(folder: Path, *, step: int, content: bytes = b"arrays", old: bool = False) -> Path:
    """Writes a checkpoint as Levanter does: arrays, then the file that marks it complete. `old`: arrays as folders."""
    files = ["model/embeddings/weight/.zarray", "model/embeddings/weight/0.0"] if old else ["manifest.ocdbt", "d/1f3a"]
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "metadata.json").write_text(json.dumps({"step": step, "timestamp": "2026-01-01T00:00:00"}))
    return folder


def natives(path: Path, *, reference: str | None = None) -> dict[int, Checkpoint]:
    checkpoints = find_checkpoints(str(path), kinds=LOADED_NATIVELY, reference=reference)
    return {checkpoint.step: checkpoint for checkpoint in checkpoints if checkpoint.kind == "levanter"}


@pytest.mark.parametrize("old", [False, True])
def test_native_checkpoint_is_complete_for_the_evaluator_that_loads_it(tmp_path: Path, old: bool) -> None:
    run = write_run(tmp_path / "run-a", [1])
    write_native(run / "checkpoints" / "step-9", step=9, old=old)
    [native] = natives(run).values()
    assert (native.name, native.step, native.problems) == ("run-a-9", 9, ())
    assert native.folder is not None and native.folder.reference is not None
    assert native.folder.reference.uri == str(run / "hf" / "step-1")
    [reported] = [checkpoint for checkpoint in find_checkpoints(str(run)) if checkpoint.kind == "levanter"]
    assert not reported.complete and "export it" in reported.problems[0]


def test_native_checkpoint_with_an_export_is_left_to_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [5])
    for step in (5, 6):
        write_native(run / "checkpoints" / f"step-{step}", step=step)
    checkpoints = find_checkpoints(str(run), kinds=LOADED_NATIVELY)
    assert [(checkpoint.step, checkpoint.kind) for checkpoint in checkpoints] == [(5, "huggingface"), (6, "levanter")]


def test_native_checkpoint_takes_config_and_tokenizer_of_its_own_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [5, 10])
    write_native(run / "checkpoints" / "step-5", step=5)
    write_native(run / "checkpoints" / "step-7", step=7)
    by_step = natives(run / "checkpoints")
    references = {
        step: checkpoint.folder.reference.uri
        for step, checkpoint in by_step.items()
        if checkpoint.folder and checkpoint.folder.reference
    }
    assert references == {5: str(run / "hf" / "step-5"), 7: str(run / "hf" / "step-10")}


def test_native_checkpoint_that_is_not_whole_says_what_it_lacks(tmp_path: Path) -> None:
    run = tmp_path / "run-a" / "checkpoints"
    reference = write_checkpoint(tmp_path / "reference")
    (write_native(run / "step-1", step=1) / "metadata.json").unlink()
    (write_native(run / "step-2", step=2) / "metadata.json").write_text('{"st')
    shutil.rmtree(write_native(run / "step-3", step=3) / "d")
    write_native(run / "step-4", step=4)
    lacking = {step: " ".join(checkpoint.problems) for step, checkpoint in natives(run).items()}
    for step, problem in {1: "metadata.json is missing", 2: "names no step", 3: "no arrays"}.items():
        assert problem in lacking[step]
        assert "evaluator.reference" in lacking[step]
    assert "evaluator.reference" in lacking[4]
    assert not natives(run, reference=str(reference))[4].problems
    (reference / "tokenizer.json").unlink()
    assert "no tokenizer" in natives(run, reference=str(reference))[4].problems[0]


def test_native_checkpoint_has_the_step_it_names_itself(tmp_path: Path) -> None:
    write_native(tmp_path / "run-a" / "last", step=40)
    assert list(natives(tmp_path / "run-a")) == [40]


def test_native_digest_follows_arrays_config_and_tokenizer_but_not_the_time_of_writing(tmp_path: Path) -> None:
    def digest(folder: Path, reference: Path) -> str:
        [checkpoint] = natives(folder, reference=str(reference)).values()
        assert checkpoint.folder is not None
        return digest_model_folder(checkpoint.folder).checkpoint

    first = write_native(tmp_path / "a" / "step-1", step=1)
    again = write_native(tmp_path / "b" / "step-1", step=1)
    (again / "metadata.json").write_text('{"step": 1, "timestamp": "2026-02-02T00:00:00"}')
    other = write_native(tmp_path / "c" / "step-1", step=1, content=b"other arrays")
    reference, changed = write_checkpoint(tmp_path / "r"), write_checkpoint(tmp_path / "s", template="{{ other }}")
    assert digest(first, reference) == digest(again, reference)
    assert len({digest(first, reference), digest(other, reference), digest(first, changed)}) == 3


def test_native_checkpoints_in_a_store_are_found_alike(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-n", [1])
    write_native(run / "checkpoints" / "step-9", step=9)
    storage.copy_from_local(run, "memory://bucket/run-n")
    checkpoints = find_checkpoints("memory://bucket/run-n", kinds=LOADED_NATIVELY)
    assert [(checkpoint.name, checkpoint.complete) for checkpoint in checkpoints] == [
        ("run-n-1", True),
        ("run-n-9", True),
    ]
    assert checkpoints[1].folder is not None
    assert len(digest_model_folder(checkpoints[1].folder).weights) == 32


@pytest.mark.parametrize(
    ("selection", "steps"),
    [
        ({}, [10, 20, 25, 30, 35]),
        ({"which": "latest"}, [35]),
        ({"every_n_steps": 10}, [10, 20, 30, 35]),
        ({"every_n_steps": 25}, [25, 35]),
        ({"every_n_steps": 8}, [10, 20, 25, 35]),  # at or past 8, 16, 24 and 32: 30 is not
        ({"every_n_steps": 100}, [35]),
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
        discover_checkpoint.fn(str(run), latest=False)
    assert discover_checkpoint.fn(str(run), latest=True).step == 20
    assert discover_checkpoint.fn(str(write_checkpoint(tmp_path / "alone")), latest=False).name == "alone"
