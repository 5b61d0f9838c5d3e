"""Checkpoints of training frameworks with their marks, and remembered listings, which never replace a run's content."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fakes.models import write_checkpoint
from fakes.policies import wanted_evaluation
from fakes.records import cell_of, make_record, renamed
from pools.weights.model_files import digest_model_folder
from resources.settings import settings
from resources.storage import storage
from tasks.checkpoints.discovery import Checkpoint, discover, find_checkpoints
from tasks.checkpoints.run_snapshot import SeenCheckpoint, snapshot_run
from tasks.errors import NoCheckpoints
from tasks.policies.events import checkpoint_of
from tasks.policies.policy import Policy, WantedEvaluation
from tasks.policies.reconciliation import RunListing, reconcile
from tasks.policies.snapshot import take_snapshot
from tasks.records.index import Evaluated, RunRecords
from tasks.records.record import write_record
from tasks.records.usage import IndexedRecord, usage_of
from tasks.running.claims.files import Subject, claims_folder
from tasks.running.claims.leases import Claims
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
        "dcp",
        "python scripts/checkpoint_conversion/convert_to_hf.py {folder} {run}/checkpoint/hf/step-10 --hf_assets_path",
    ),
    "prime-rl": (
        ("run/checkpoints/step_10", ("trainer/__0_0.distcp", "trainer/.metadata", "trainer/dataloader/rank_0.pt")),
        "dcp",
        "deployments/hooks/assay_prime_rl.py",
    ),
    "ranks with their own metadata": (
        ("run/step-10", ("__0_0.distcp", "__0.metadata")),
        "dcp",
        "export it",
    ),
    "Megatron-LM": (
        ("run/iter_0000010", ("__0_0.distcp", ".metadata", "metadata.json", "common.pt")),
        "megatron",
        "--megatron-path {folder} --hf-path {run}/run/hf/iter_0000010",
    ),
    "Megatron-LM, torch": (
        ("run/iter_0000010", ("mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt")),
        "megatron",
        "--ckpt-convert-format torch_dist",
    ),
    "Megatron-Bridge": (
        ("run/iter_0000010", ("__0_0.distcp", ".metadata", "metadata.json", "run_config.yaml")),
        "megatron",
        "convert.sh export --executor local --device cpu --hf-model MODEL --megatron-path {folder} --hf-path",
    ),
    "NeMo 2": (
        ("run/gpt--step=9-last", ("weights/__0_0.distcp", "weights/.metadata", "weights/metadata.json", "context/a")),
        "megatron",
        "nemo llm export path={folder} target=hf",
    ),
}  # fmt: skip
"""States in the layouts of frameworks: folder and files, kind, and a part of the message to users."""


@pytest.mark.parametrize("framework", STATES)
def test_state_of_a_trainer_is_recognised_and_says_how_it_is_exported(tmp_path: Path, framework: str):
    (place, names), kind, advice = STATES[framework]
    folder = write_state(tmp_path / place, *names)
    [checkpoint] = find_checkpoints(str(tmp_path))
    name = f"{name_of(str(tmp_path))[0]}-{9 if framework == 'NeMo 2' else 10}"
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


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    yield tmp_path / "cache"
    settings.cache_clear()


def test_checkpoint_completed_within_a_tick_of_the_clock_is_seen(tmp_path: Path):
    weights = write_checkpoint(tmp_path / "run" / "step-100") / "model.safetensors"
    whole, before = weights.read_bytes(), weights.stat()

    def looked(content: bytes) -> bool:
        weights.write_bytes(content)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        [checkpoint] = snapshot_run(str(tmp_path / "run"))
        return checkpoint.complete

    assert not looked(bytes(len(whole)))  # final size, but not written yet
    assert looked(whole)


def test_native_checkpoint_becomes_whole_with_its_reference_and_follows_it(tmp_path: Path):
    native, reference = tmp_path / "run" / "checkpoints" / "step-100", tmp_path / "elsewhere"
    (native / "d").mkdir(parents=True)
    (native / "manifest.ocdbt").write_bytes(b"m")
    (native / "d" / "array").write_bytes(b"a")
    (native / "metadata.json").write_text(json.dumps({"step": 100}))
    for path in native.rglob("*"):
        os.utime(path, (1e9, 1e9))
    [checkpoint] = snapshot_run(str(tmp_path / "run"), reference=str(reference))
    assert any("its reference" in problem for problem in checkpoint.problems)
    write_checkpoint(reference)
    [checkpoint] = snapshot_run(str(tmp_path / "run"), reference=str(reference))
    assert checkpoint.complete
    assert snapshot_run(str(tmp_path / "run"), reference=str(reference)) == [checkpoint]
    (reference / "tokenizer.json").write_text("another")
    [changed] = snapshot_run(str(tmp_path / "run"), reference=str(reference))
    assert changed.listing != checkpoint.listing


def test_run_with_a_folder_name_that_is_not_utf8_is_listed(tmp_path: Path):
    write_checkpoint(tmp_path / "run" / "step-100")
    odd = tmp_path / "run" / os.fsdecode(b"mod\xe9l")
    odd.mkdir()
    (odd / "config.json").write_text("{}")
    for _ in range(2):
        assert [checkpoint.complete for checkpoint in snapshot_run(str(tmp_path / "run"))] == [True, False]


def test_run_is_looked_at_where_nothing_can_be_remembered(tmp_path: Path, cache: Path):
    write_checkpoint(tmp_path / "run" / "step-100")
    cache.write_text("a file where a folder should be")
    assert [checkpoint.complete for checkpoint in snapshot_run(str(tmp_path / "run"))] == [True]


def wanted_evaluations(*names: str) -> list[WantedEvaluation]:
    return [wanted_evaluation(name) for name in names]


def policy(tmp_path: Path) -> Policy:
    content = {"name": "p", "runs": [str(tmp_path / "run")], "suites": ["demo"]}
    return Policy.model_validate({**content, "evaluation_path": str(tmp_path / "out")})


def test_records_of_before_and_after_a_copy_count_together(tmp_path: Path):
    usage = usage_of(make_record())
    row = IndexedRecord("c", "run-1", "hash-c", "digest", "original", "failed", 1.0, 1.0, 0.0, 0, "the reason", usage)
    states = [
        Evaluated("digest", "original", frozenset({"hash-a"})),
        Evaluated("digest", "copied", frozenset({"hash-b"})),
        Evaluated("of other weights", "long ago", frozenset({"hash-d"})),
    ]
    seen = SeenCheckpoint("/runs/run/step-1", "run", "run-1", 1, "huggingface", "copied", ())
    listing = RunListing(
        "/runs/run", "run", wanted_evaluations(*"abcd"), [seen], RunRecords({"run-1": states}, [row], {})
    )
    reconciliation = reconcile([listing], policy(tmp_path), now=2.0)
    assert reconciliation.done_count == 2
    assert [cell.evaluation.suites for cell in reconciliation.work] == [("d",)]
    assert [(cell.evaluation.suites, cell.state) for cell in reconciliation.others] == [(("c",), "failed")]
    again = replace(seen, listing="written again")
    reconciliation = reconcile([replace(listing, checkpoints=[again])], policy(tmp_path), now=2.0)
    assert len(reconciliation.work) == 4


def test_cell_that_fails_while_a_plan_is_made_is_not_taken_for_work(tmp_path: Path):
    write_checkpoint(tmp_path / "run" / "step-100")
    subject = Subject(key="step-100.cell", checkpoint="run-100", evaluation_hash="hash-a")
    claims = Claims(claims_folder(str(tmp_path / "out"), "run"), in_background=False)
    claims.__enter__()
    assert claims.acquire([subject]).ours

    def evaluations_of(_: Policy, run: str) -> list[WantedEvaluation]:
        # The other run ends here, after records were read.
        [seen] = snapshot_run(run)
        record = make_record(step=100, run="run", status="failed", evaluation_hash="hash-a")
        reference = record.checkpoint.model_copy(update={"listing": seen.listing})
        record = renamed(record.model_copy(update={"checkpoint": reference}))
        write_record(cell_of(tmp_path / "out", record), record)
        claims.__exit__()
        return wanted_evaluations("a")

    listings = take_snapshot(policy(tmp_path), evaluations_of=evaluations_of)
    assert reconcile(listings, policy(tmp_path), now=claims_time(listings)).work == []
    [cell] = reconcile(
        take_snapshot(policy(tmp_path), evaluations_of=lambda *_: wanted_evaluations("a")), policy(tmp_path), now=0.0
    ).others
    assert cell.state == "failed"


def claims_time(listings: list[RunListing]) -> float:
    return max(claim.holder.renewed for listing in listings for claim in listing.claims if claim.holder)
