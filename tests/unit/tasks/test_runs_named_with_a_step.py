"""Runs with a number behind a word for a step in their own name, such as `llama-step-100`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fakes.cells import of_cell
from fakes.cli import invoke
from fakes.hub import forget_hub, running_hub, use_hub
from fakes.layouts import OTHER, WHOLE, write_layout
from fakes.models import write_checkpoint
from fakes.records import make_record, publish
from resources.storage import storage
from tasks.checkpoints.discovery import discover, find_checkpoints, run_named_by, with_pinned_model
from tasks.checkpoints.run_snapshot import expand_runs, snapshot_run
from tasks.generation.config import GenerationConfig
from tasks.generation.generate import with_run_named
from tasks.policies.actions import end_claims
from tasks.policies.events import WatchedRuns, checkpoint_of
from tasks.policies.policy import Policy
from tasks.policies.snapshot import run_folders, take_snapshot
from tasks.records.current import told_apart
from tasks.running.cells import plan_cells
from tasks.running.claims.files import Subject, claims_folder
from tasks.running.claims.leases import Claims
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig
from tasks.spec.names import name_of
from tasks.spec.training import TrainAndEvaluateConfig

RUN = "llama-step-100"
STATE = ("mp_rank_00_model_states.pt",)

RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "hf/step-N": ({"hf/step-N": WHOLE}, "100 200"),
    "hf/checkpoint-N": ({"hf/checkpoint-N": WHOLE}, "100 200"),
    "hf/N": ({"hf/N": WHOLE}, "100 200"),
    "step-N": ({"step-N": WHOLE}, "100 200"),
    "exports in steps": ({"global_step_N/actor/huggingface": WHOLE}, "100 200"),
    "a final save": ({"checkpoint-N": WHOLE, ".": OTHER}, "100 200 final"),
    "a label": ({"final": WHOLE}, "final"),
    "files of the run": ({"hf/step-N": WHOLE, ".": ("tokenizer.json", "trainer_state.json")}, "100 200"),
    "a checkpoint that is being written": ({"hf/step-7": ("config.json",), "README.md": "# llama"}, "7"),
    "states of DeepSpeed": ({"global_step5": STATE, "global_step10": STATE}, "5 10"),
    "series": ({"v0/checkpoint-100": WHOLE, "v1/checkpoint-100": OTHER}, "v0-100 v1-100"),
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "weights": {".": WHOLE},
    "an export": {"hf": WHOLE},
    "an export of an export": {"policy/weights/model/consolidated": WHOLE},
    "states inside": {".": WHOLE, "global_step100": STATE},
    "a state": {".": ("model_and_optim/.metadata", "model_and_optim/__0_0.distcp")},
    "results": {".": WHOLE, "results/step-5": ("results.json",)},
    "a config": {".": ("config.json",)},
}


@pytest.mark.parametrize("row", RUNS)
@pytest.mark.parametrize("suffix", ["", "/"])
def test_run_has_its_whole_name_and_its_checkpoints_have_their_steps(tmp_path: Path, row: str, suffix: str) -> None:
    folders, names = RUNS[row]
    run = f"{tmp_path}/{RUN}{suffix}"
    write_layout(tmp_path / RUN, folders)
    assert run_named_by(run) == RUN
    listed = find_checkpoints(run)
    assert [each.name for each in listed] == [f"{RUN}-{name}" for name in names.split()]
    assert {each.run for each in listed} == {f"{RUN}-{each.series}" if each.series else RUN for each in listed}
    assert [*expand_runs([run]).values()] == [RUN]
    for _ in range(2):  # from its files, and as remembered
        seen = snapshot_run(run)
        assert [(each.run, each.name, each.label) for each in seen] == [(c.run, c.name, c.label) for c in listed]


@pytest.mark.parametrize("row", CHECKPOINTS)
@pytest.mark.parametrize("name", [RUN, "checkpoint-100"])
def test_folder_that_is_a_checkpoint_has_the_step_in_its_name(tmp_path: Path, row: str, name: str) -> None:
    write_layout(tmp_path / "my" / name, CHECKPOINTS[row])
    path = str(tmp_path / "my" / name)
    run, own, step = name_of(path)
    assert (run_named_by(path), step) == (run, 100)
    assert (run, own, 100) in [(each.run, each.name, each.step) for each in find_checkpoints(path)]
    assert {each.run for each in find_checkpoints(path)} == {each.run for each in snapshot_run(path)} == {run}


def test_expression_counts_in_the_name_of_a_checkpoint_and_not_of_a_run(tmp_path: Path) -> None:
    write_layout(tmp_path / RUN, {"last": WHOLE})
    assert [each.label for each in find_checkpoints(str(tmp_path / RUN), steps_from=r"step-(\d+)")] == ["last"]
    write_layout(tmp_path / "of-step-7", {".": WHOLE})
    assert [each.step for each in find_checkpoints(str(tmp_path / "of-step-7"), steps_from=r"step-(\d+)")] == [7]


def evaluation(path: Path | str, output: Path, **more: Any) -> EvaluationConfig:
    content = {"model_path": str(path), "evaluation_path": str(output), "evals": [{"name": "demo_facts"}], **more}
    return EvaluationConfig.model_validate(content)


@pytest.mark.parametrize("serving", [{}, {"base_url": "http://127.0.0.1:9/v1"}, {"pool_name": "kept"}])
def test_request_plans_cells_under_the_whole_name(tmp_path: Path, serving: Mapping[str, Any]) -> None:
    run, output = tmp_path / RUN, tmp_path / "out"
    write_layout(run, {"hf/step-N": WHOLE})
    config = with_pinned_model(evaluation(run, output, **serving))
    assert config.run_name == config.place == RUN
    cells = plan_cells.fn([config], discover.fn(str(run), CheckpointSelection()))
    assert [(each.reference.run, each.reference.name) for each in cells] == [(RUN, f"{RUN}-100"), (RUN, f"{RUN}-200")]
    assert all(cell.uri.startswith(f"{output}/{RUN}/step-") for cell in cells)
    single = with_pinned_model(evaluation(run / "hf" / "step-100", output, **serving))
    assert (single.run_name, single.place) == (RUN, f"{RUN} step-100")
    assert with_pinned_model(evaluation(run, output, model_name="mine", **serving)).run_name == "mine"
    assert with_pinned_model(evaluation(f"mean({run}@100..200)", output, **serving)).run_name == RUN
    [merged] = find_checkpoints(f"mean({run}@100+200)")
    assert (merged.run, merged.name) == (RUN, f"{RUN}-100-to-200-mean2")


def test_record_under_the_run_of_the_former_rule_is_found_by_its_digest(tmp_path: Path) -> None:
    run, output = tmp_path / RUN, tmp_path / "out"
    write_layout(run, {"hf/step-N": WHOLE})
    config = with_pinned_model(evaluation(run, output))
    [cell, other] = plan_cells.fn([config], find_checkpoints(str(run)))
    before = cell.reference.model_copy(update={"run": "llama", "name": "llama-100"})
    publish(output, make_record(**{**of_cell(cell), "checkpoint": before}))
    again, still = plan_cells.fn([config], find_checkpoints(str(run)))
    assert again.record is not None and again.record.checkpoint == cell.reference and again.uri == cell.uri
    assert not still.done and still.uri == other.uri


def test_generation_training_and_final_models_keep_the_name(tmp_path: Path) -> None:
    run = tmp_path / RUN
    write_layout(run, {"checkpoint-N": WHOLE, ".": OTHER})
    asked = {"prompts": {"files": ["p.jsonl"]}, "output_path": str(tmp_path / "answers")}
    generation = with_run_named(GenerationConfig.model_validate({"model_path": str(run), **asked}))
    assert find_checkpoints(str(run))[0].named_in(generation.run_name) == f"{RUN}-100"
    cells = plan_cells.fn([with_pinned_model(evaluation(run, tmp_path / "out"))], find_checkpoints(str(run)))
    apart = told_apart([cell.reference for cell in cells])
    assert {apart(cell.reference).run for cell in cells} == {RUN}
    training = {"train_config": {"trainer": {}}, "output_path": f"{tmp_path}/{RUN}"}
    config = {"training": training, "evaluations": [{"evals": [{"name": "demo_facts"}]}]}
    trained = TrainAndEvaluateConfig.model_validate(config)
    assert trained.asked()[0].run_name == RUN and trained.place.startswith(f"{RUN} · ")


def test_policy_watcher_and_claims_have_the_name(tmp_path: Path) -> None:
    output = tmp_path / "out"
    for step in (100, 300):
        write_layout(tmp_path / "runs" / f"llama-step-{step}", {"hf/step-N": WHOLE})
    names = [RUN, "llama-step-300"]
    content = {
        "name": "p",
        "runs": [f"{tmp_path}/runs/llama-*"],
        "suites": ["demo"],
        "evaluation_path": str(output),
        "checkpoints": ["all", {"which": "latest", "merged": "last 2"}],
    }
    policy = Policy.model_validate(content)
    listings = take_snapshot(policy)
    assert [listing.name for listing in listings] == names
    assert [seen.name for seen in listings[0].checkpoints] == [f"{RUN}-100", f"{RUN}-200", f"{RUN}-100-to-200-mean2"]
    assert {each.config.run_name for each in listings[0].evaluations} == {RUN}
    assert run_folders(policy) == {name: f"{output}/{name}" for name in names}
    watched = [(each.run, each.name) for each in WatchedRuns(policy).find_new()]
    assert watched == [(name, f"{name}-200") for name in names]
    file = tmp_path / "runs" / RUN / "hf" / "step-100" / "config.json"
    uploaded = checkpoint_of(str(file))
    assert uploaded is not None and uploaded.name == f"{RUN}-100"
    request = {"config": {"model_path": str(tmp_path / "runs" / RUN), "evaluation_path": str(output)}}
    subject = Subject(key="step-100.c", checkpoint=f"{RUN}-100", evaluation_hash="h")
    for parameters in (request, {"policy": content}):
        with Claims(claims_folder(str(output), RUN), flow_run="a", in_background=False) as claims:
            assert claims.acquire([subject]).ours
            assert end_claims(parameters, flow_run="a") == 1


def test_run_in_a_store_or_on_the_hub_has_its_whole_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_layout(tmp_path / RUN, {"hf/step-N": WHOLE})
    storage.copy_from_local(tmp_path / RUN, f"memory://bucket/named/{RUN}")
    for path in (f"memory://bucket/named/{RUN}", f"memory://bucket/named/{RUN}/hf"):
        assert run_named_by(path) == RUN
        assert [each.name for each in find_checkpoints(path)] == [f"{RUN}-100", f"{RUN}-200"]
    folders = [write_checkpoint(tmp_path / "made" / str(seed), seed=seed) for seed in (1, 2)]
    first, second = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    branches = {"main": second, "step-1000": first, "step-2000": second}
    with running_hub({"models/acme/alone-step-100": first}, {f"models/acme/{RUN}": branches}) as hub:
        use_hub(hub, monkeypatch, home=tmp_path / "hf")
        assert [each.name for each in find_checkpoints(f"acme/{RUN}")] == [f"{RUN}-1000", f"{RUN}-2000"]
        for path, name in ((f"acme/{RUN}", RUN), (f"acme/{RUN}@step-1000", RUN), ("acme/alone-step-100", "acme-alone")):
            assert with_pinned_model(evaluation(path, tmp_path)).run_name == name
    forget_hub()


def test_commands_show_the_run_by_its_whole_name(tmp_path: Path) -> None:
    run = tmp_path / "runs" / RUN
    write_layout(run, {"hf/step-N": WHOLE})
    shown = json.loads(invoke(["checkpoints", run, "--json"]).stdout)
    assert [(each["name"], each["step"]) for each in shown] == [(f"{RUN}-100", 100), (f"{RUN}-200", 200)]
    asked = ["evaluate", "--model", run, "--eval", "demo_facts", "--base-url", "http://127.0.0.1:9/v1", "--dry-run"]
    planned = invoke([*asked, "--output", tmp_path / "out"])
    assert f"  {RUN}-100 · " in planned.stdout and f"  {RUN}-200 · " in planned.stdout, planned.output
