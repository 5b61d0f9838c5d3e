"""Completion marks and checkpoints of training frameworks, in the layouts of their sources."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fakes.models import write_checkpoint
from pools.weights.model_files import digest_model_folder
from resources.storage import storage
from tasks.checkpoints.discovery import Checkpoint, discover, find_checkpoints
from tasks.checkpoints.run_snapshot import SeenCheckpoint, snapshot_run
from tasks.errors import NoCheckpoints
from tasks.policies.events import checkpoint_of
from tasks.spec.evaluation import CheckpointSelection
from tasks.spec.names import name_of, place_of, run_folder_of


def mark(folder: Path, name: str = "STABLE") -> Path:
    (folder / name).touch()
    return folder


def found_at(run: Path) -> dict[int, Checkpoint]:
    """Returns a run's checkpoints by step, and asserts that new and remembered snapshots of a policy find the same."""
    listed = find_checkpoints(str(run))
    by_step = {checkpoint.step: checkpoint for checkpoint in listed}
    assert len(by_step) == len(listed)
    for _ in range(2):
        seen = {checkpoint.step: checkpoint for checkpoint in snapshot_run(str(run))}
        assert {step: summary(checkpoint) for step, checkpoint in seen.items()} == {
            step: summary(checkpoint) for step, checkpoint in by_step.items()
        }
    return by_step


def summary(checkpoint: Checkpoint | SeenCheckpoint) -> tuple[object, ...]:
    return checkpoint.uri, checkpoint.name, checkpoint.kind, checkpoint.problems


@pytest.mark.parametrize(("name", "framework"), [("STABLE", "prime-rl"), (".complete", "miles")])
def test_checkpoint_after_the_first_marked_checkpoint_waits_for_its_mark(tmp_path: Path, name: str, framework: str):
    weights = tmp_path / "run" / "weights"
    for step in (10, 20, 30):
        write_checkpoint(weights / f"step_{step}", seed=step)
    assert all(checkpoint.complete for checkpoint in found_at(weights).values())

    mark(weights / "step_20", name)
    by_step = found_at(weights)
    assert [step for step, checkpoint in by_step.items() if checkpoint.complete] == [10, 20]
    assert by_step[30].problems == (f"{name} is not there, which {framework} writes when a checkpoint is whole",)

    mark(weights / "step_30", name)
    assert all(checkpoint.complete for checkpoint in found_at(weights).values())


def test_mark_makes_no_broken_checkpoint_complete(tmp_path: Path):
    weights = tmp_path / "weights"
    cut_off = mark(write_checkpoint(weights / "step_10")) / "model.safetensors"
    cut_off.write_bytes(cut_off.read_bytes()[:-1])
    mark(weights / "step_10", ".complete")
    assert "where its header says" in found_at(weights)[10].problems[0]


def test_broadcast_is_complete_with_its_mark_alone(tmp_path: Path):
    broadcasts = tmp_path / "run" / "broadcasts"
    write_checkpoint(broadcasts / "step_7")
    assert found_at(tmp_path / "run")[7].problems == (
        "STABLE is not there, which prime-rl writes when a checkpoint is whole",
    )
    named = checkpoint_of(str(broadcasts / "step_7" / "model.safetensors"))
    assert named is not None and not named.complete

    mark(broadcasts / "step_7")
    assert found_at(tmp_path / "run")[7].complete

    (broadcasts / "step_7" / "config.json").unlink()
    problems = found_at(tmp_path / "run")[7].problems
    assert "config.json is missing" in problems and "assay_prime_rl.py" in problems[-1]


def test_mark_in_a_store_is_asked_of_checkpoints_that_look_alike(tmp_path: Path):
    for step in (1, 2, 3):
        write_checkpoint(tmp_path / "weights" / f"step_{step}")
    mark(tmp_path / "weights" / "step_1")
    storage.copy_from_local(tmp_path / "weights", "memory://marks/weights")
    seen = {checkpoint.step: checkpoint.complete for checkpoint in snapshot_run("memory://marks/weights")}
    assert seen == {1: True, 2: False, 3: False}


def test_mark_that_appears_changes_no_digest(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "weights" / "step_1")
    before = found_at(tmp_path)[1].folder
    mark(mark(folder), ".complete")
    after = found_at(tmp_path)[1].folder
    assert before is not None and after is not None
    assert digest_model_folder(before) == digest_model_folder(after)


def bridge(run: Path, iteration: int, *, export: bool = True) -> Path:
    """Writes a checkpoint as Megatron-Bridge does, with an export where `also_save_hf_checkpoint` is set."""
    folder = run / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata", "metadata.json", "run_config.yaml", "train_state.pt"):
        (folder / name).write_text("{}")
    if export:
        write_checkpoint(folder / "hf", seed=iteration)
    return folder


def test_export_within_an_iteration_is_complete_once_megatron_names_it(tmp_path: Path):
    run = tmp_path / "llama"
    bridge(run, 100)
    bridge(run, 200)
    tracker = run / "latest_checkpointed_iteration.txt"
    tracker.write_text("100")
    for file in run.rglob("*"):  # verdicts on files written just now are not remembered
        os.utime(file, (1_700_000_000, 1_700_000_000))
    by_step = found_at(run)
    assert [(checkpoint.name, checkpoint.complete) for checkpoint in by_step.values()] == [
        ("llama-100", True),
        ("llama-200", False),
    ]
    assert "latest_checkpointed_iteration.txt names 100" in by_step[200].problems[0]
    for file in ("hf/config.json", "hf", ""):
        named = checkpoint_of(str(run / "iter_0000200" / file))
        assert named is not None and not named.complete

    tracker.write_text("200")
    assert all(checkpoint.complete for checkpoint in found_at(run).values())


@pytest.mark.parametrize("content", ["release", "", "seven"])
def test_tracker_that_names_no_iteration_says_nothing(tmp_path: Path, content: str):
    bridge(tmp_path / "llama", 100)
    (tmp_path / "llama" / "latest_checkpointed_iteration.txt").write_text(content)
    assert found_at(tmp_path / "llama")[100].complete


def test_export_within_a_step_is_the_checkpoint_of_that_step():
    for uri in ("/runs/llama/iter_0000100/hf", "/runs/llama/hf/step-100", "/runs/llama/step-100"):
        assert name_of(uri) == ("llama", "llama-100", 100)
        assert run_folder_of(uri) == "/runs/llama"
    assert place_of("/runs/llama/iter_0000100/hf") != place_of("/runs/llama/iter_0000200/hf")


def write_state(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


STATES = {
    "torchtitan": (
        ("checkpoint/step-10", ("__0_0.distcp", "__1_0.distcp", ".metadata")),
        ("dcp", "checkpoint-10"),
        "python scripts/checkpoint_conversion/convert_to_hf.py {folder} {run}/checkpoint/hf/step-10 --hf_assets_path",
    ),
    "prime-rl": (
        ("run/checkpoints/step_10", ("trainer/__0_0.distcp", "trainer/.metadata", "trainer/dataloader/rank_0.pt")),
        ("dcp", "run-10"),
        "deployments/hooks/assay_prime_rl.py",
    ),
    "FSDP of transformers": (
        ("run/checkpoint-10", ("config.json", "pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata")),
        ("dcp", "run-10"),
        "accelerate merge-weights {folder}/pytorch_model_fsdp_0 {run}/run/hf/checkpoint-10, and copy config.json",
    ),
    "ranks with their own metadata": (
        ("run/step-10", ("__0_0.distcp", "__0.metadata")),
        ("dcp", "run-10"),
        "export it",
    ),
    "Megatron-LM": (
        ("run/iter_0000010", ("__0_0.distcp", ".metadata", "metadata.json", "common.pt")),
        ("megatron", "run-10"),
        "--megatron-path {folder} --hf-path {run}/run/hf/iter_0000010",
    ),
    "Megatron-LM, torch": (
        ("run/iter_0000010", ("mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt")),
        ("megatron", "run-10"),
        "--ckpt-convert-format torch_dist",
    ),
    "Megatron-Bridge": (
        ("run/iter_0000010", ("__0_0.distcp", ".metadata", "metadata.json", "run_config.yaml")),
        ("megatron", "run-10"),
        "convert.sh export --executor local --device cpu --hf-model MODEL --megatron-path {folder} --hf-path",
    ),
    "NeMo 2": (
        ("run/gpt--step=9-last", ("weights/__0_0.distcp", "weights/.metadata", "weights/metadata.json", "context/a")),
        ("megatron", "gpt--step=9-last"),
        "nemo llm export path={folder} target=hf",
    ),
}  # fmt: skip
"""States in the layouts of frameworks: folder and files, kind and name, and a part of the message to users."""


@pytest.mark.parametrize("framework", STATES)
def test_state_of_a_trainer_is_recognised_and_says_how_it_is_exported(tmp_path: Path, framework: str):
    (place, names), (kind, name), advice = STATES[framework]
    folder = write_state(tmp_path / place, *names)
    [checkpoint] = find_checkpoints(str(tmp_path))
    assert (checkpoint.uri, checkpoint.kind, checkpoint.name) == (str(folder), kind, name)
    assert [summary(seen) for seen in snapshot_run(str(tmp_path))] == [summary(checkpoint)]
    [problem] = checkpoint.problems
    assert advice.format(folder=folder, run=tmp_path) in problem

    with pytest.raises(NoCheckpoints) as caught:
        discover.fn(
            str(tmp_path), CheckpointSelection(wait_for_incomplete_seconds=60), sleep=lambda _: pytest.fail("waited")
        )
    assert problem in caught.value.found and "export a checkpoint" in caught.value.remedy


@pytest.mark.parametrize("place", ["step-10", "iter_0000010"])
def test_state_without_metadata_is_still_being_written(tmp_path: Path, place: str):
    write_state(tmp_path / "run" / place, "__0_0.distcp", ".metadata.tmp")
    assert found_at(tmp_path)[10].problems == (".metadata is not there, which is written when all shards are",)


def test_export_counts_for_the_state_of_its_step(tmp_path: Path):
    for step in (10, 20):
        write_state(tmp_path / "run" / f"step-{step}", "__0_0.distcp", ".metadata")
    exported = write_checkpoint(tmp_path / "run" / "hf" / "step-10")
    assert {step: checkpoint.kind for step, checkpoint in found_at(tmp_path / "run").items()} == {
        10: "huggingface",
        20: "dcp",
    }
    shutil.rmtree(exported)
    assert found_at(tmp_path / "run")[10].kind == "dcp"


def test_checkpoint_with_a_sharded_optimizer_next_to_weights_is_complete(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "run" / "checkpoint-10")
    write_state(folder, "optimizer_0/__0_0.distcp", "optimizer_0/.metadata")
    [checkpoint] = find_checkpoints(str(tmp_path / "run"))
    assert checkpoint.complete and checkpoint.kind == "huggingface"


def test_shards_that_torchtitan_puts_together_are_no_checkpoint_of_their_own(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "run" / "step-10")
    write_state(folder, "sharded/shard-00001-model-00001-of-00001.safetensors")
    [checkpoint] = find_checkpoints(str(tmp_path / "run"))
    assert checkpoint.complete and checkpoint.uri == str(folder)
