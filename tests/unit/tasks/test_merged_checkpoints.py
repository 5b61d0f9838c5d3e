"""Merged checkpoints by their names: found in runs, planned as cells, shown in records, written on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fakes.cli import invoke
from fakes.models import write_checkpoint, write_run
from pools.weights.merges import locations_of
from resources.errors import BadInput, CheckpointError
from tasks.checkpoints.discovery import find_checkpoints
from tasks.errors import NoCheckpoints
from tasks.generation.config import GenerationConfig
from tasks.running.cells import plan_cells
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.names import is_relative, place_of
from tasks.spec.suites import SuiteRequest

STEPS = (10, 20, 30, 40)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "llama", STEPS)


def steps_in(name: str) -> list[int]:
    [merged] = find_checkpoints(name)
    return [checkpoint.step for checkpoint in merged.inputs]


def test_merged_checkpoint_has_run_and_step_of_its_last_input(run: Path) -> None:
    [merged] = find_checkpoints(f"ema({run}@last:2, 0.9)")
    assert (merged.run, merged.name, merged.step) == ("llama", "llama-30-to-40-ema2-0.9", 40)
    assert locations_of(merged.uri) == (f"{run}/hf/step-30", f"{run}/hf/step-40")
    assert find_checkpoints(merged.uri) == [merged]


def test_checkpoints_of_several_runs_are_merged_in_the_order_of_the_name(tmp_path: Path, run: Path) -> None:
    other = write_run(tmp_path / "other", [5])
    [merged] = find_checkpoints(f"interpolate({other}@5, {run}/hf/step-20, 0.25)")
    assert [checkpoint.name for checkpoint in merged.inputs] == ["other-5", "llama-20"]
    assert (merged.run, merged.step) == ("llama", 20)


def test_checkpoint_that_is_still_written_keeps_a_range_incomplete_and_is_not_among_the_last(run: Path) -> None:
    (run / "hf" / "step-40" / "config.json").unlink()
    [merged] = find_checkpoints(f"mean({run}@10..40)")
    assert merged.problems == ("llama-40: config.json is missing",)
    assert steps_in(f"mean({run}@last:2)") == [20, 30]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("mean({run}@10+11)", NoCheckpoints, "none of 11; there are 10, 20, 30, 40"),
        ("mean({run}@last:5)", NoCheckpoints, "5 complete checkpoints"),
        ("mean({run}@10..15)", BadInput, "at least two checkpoints"),
        ("mean({run}, {run}@10)", BadInput, "a single checkpoint at"),
        ("mean({run}/nowhere@10..20)", BadInput, "is not there"),
        ("mean({run}@10..30, 1+3)", BadInput, "a share for each checkpoint"),
    ],
)
def test_name_of_what_is_not_there_is_refused(run: Path, name: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        find_checkpoints(name.format(run=run))


def test_two_checkpoints_of_a_step_are_refused(run: Path) -> None:
    write_checkpoint(run / "hf" / "checkpoint-20", seed=5)
    with pytest.raises(BadInput, match="a single checkpoint of step 20"):
        find_checkpoints(f"mean({run}@..)")


def test_native_checkpoints_are_left_out_if_exported_and_never_merged(run: Path) -> None:
    for place in (run / "checkpoints", run.parent / "native"):
        for step in (15, 20):
            folder = place / f"step-{step}"
            folder.mkdir(parents=True)
            (folder / "metadata.json").write_text(json.dumps({"step": step}))
            (folder / "manifest.ocdbt").write_text("")
    assert steps_in(f"mean({run}@10..30)") == [10, 20, 30]
    [merged] = find_checkpoints(f"mean({run.parent / 'native'}@..)")
    assert "export it to Hugging Face format" in merged.problems[0]


def test_merged_checkpoint_has_its_own_cell_and_says_how_it_was_made(run: Path) -> None:
    def cell(path: str) -> Any:
        config = {"model_path": path, "evals": [{"name": "demo_facts"}], "evaluation_path": str(run.parent / "records")}
        [checkpoint] = find_checkpoints(path)
        [planned] = plan_cells.fn([EvaluationConfig.model_validate(config)], [checkpoint])
        return planned

    merged, last = cell(f"interpolate({run}@30, {run}@40, 0.25)"), cell(f"{run}/hf/step-40")
    assert (merged.reference.run, merged.reference.step) == (last.reference.run, last.reference.step)
    assert merged.uri != last.uri and merged.reference.digest != last.reference.digest
    assert last.reference.merge is None
    made = merged.reference.merge
    assert [(each.step, each.weight) for each in made.inputs] == [(30, 0.75), (40, 0.25)]
    assert made.inputs[1].digest == last.reference.digest
    assert str(made) == "interpolate of 2, 0.25: llama 30, 40"
    assert cell(merged.reference.uri).uri == merged.uri
    before = merged.reference.listing
    (run / "hf" / "step-30" / "README.md").write_text("other")
    assert cell(merged.reference.uri).reference.listing != before
    (run / "hf" / "step-30" / "model.safetensors").write_bytes(
        (run / "hf" / "step-10" / "model.safetensors").read_bytes()
    )
    assert cell(merged.reference.uri).uri != merged.uri


def test_place_of_a_merged_checkpoint_is_equal_for_any_spelling(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    written = place_of(f"mean({run}/hf/step-30, {run}/hf/step-40, 1.0+3)")
    assert place_of("mean(llama/step-30, ./llama/hf/step-40/, 1+3)") == written
    assert place_of("mean(llama/step-20, llama/hf/step-40, 1+3)") != written


def test_checkpoints_that_do_not_belong_together_are_refused_when_they_are_looked_at(run: Path) -> None:
    (run / "hf" / "step-30" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"the tokenizer differs \(tokenizer.json\)"):
        find_checkpoints(f"mean({run}@last:2)")


@pytest.mark.parametrize(
    ("merge", "name"),
    [
        ({"steps": "8000..10000"}, "mean(gs://runs/a@8000..10000)"),
        ({"kind": "mean", "steps": [10, 20], "weights": [1, 3]}, "mean(gs://runs/a@10+20, 1+3)"),
        ({"kind": "ema", "weights": 0.9}, "ema(gs://runs/a@last:5, 0.9)"),
        ({"kind": "wsm", "steps": "last:4", "weights": "sqrt"}, "wsm(gs://runs/a@last:4, sqrt)"),
        ({"kind": "interpolate", "steps": [10, 20], "weights": 0.00001}, "interpolate(gs://runs/a@10+20, 0.00001)"),
    ],
)
def test_options_of_a_merge_become_its_name(merge: dict[str, Any], name: str) -> None:
    asked = {"model_path": "gs://runs/a", "merge": merge}
    config = EvaluationConfig.model_validate({**asked, "evals": [{"name": "demo_facts"}]})
    assert (config.model_path, config.merge, config.run_name) == (name, None, "a")
    assert SuiteRequest.model_validate(asked).model_path == name
    assert (
        GenerationConfig.model_validate({**asked, "prompts": {"files": ["p"]}, "output_path": "o"}).model_path == name
    )
    assert EvaluationConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    "asked",
    [
        {"model_path": "runs/a", "merge": {"kind": "median"}},
        {"model_path": "runs/a", "merge": {"kind": "ema"}},
        {"model_path": "runs/a", "merge": {"steps": "soon"}},
        {"model_path": "mean(runs/a@1+2)", "merge": {"steps": "last:2"}},
        {"pool_name": "kept", "merge": {"steps": "last:2"}, "prompts": {"files": ["p"]}, "output_path": "o"},
    ],
)
def test_options_of_a_merge_that_cannot_be_right_are_refused(asked: dict[str, Any]) -> None:
    kind = GenerationConfig if "prompts" in asked else SuiteRequest
    with pytest.raises((ValidationError, BadInput)):
        kind.model_validate(asked)


def test_merge_of_relative_paths_means_another_place_in_another_folder() -> None:
    assert is_relative("mean(runs/a@last:5)")
    assert not is_relative("mean(/runs/a@last:5)") and not is_relative("mean(gs://b/a@last:5)")


def test_merged_checkpoint_is_written_whole_into_a_folder_of_its_own_and_nowhere_else(
    run: Path, tmp_path: Path
) -> None:
    target = tmp_path / "averaged" / "step-40"
    shown = invoke(["checkpoints", "--export", str(target), f"mean({run}@last:2)", "--json"])
    assert shown.exit_code == 0, shown.output
    assert [(checkpoint["uri"], checkpoint["complete"]) for checkpoint in json.loads(shown.stdout)] == [
        (str(target), True)
    ]
    last = run / "hf" / "step-40"
    assert {path.name for path in target.iterdir()} == {path.name for path in last.iterdir()}
    assert (target / "config.json").read_bytes() == (last / "config.json").read_bytes()
    assert (target / "model.safetensors").read_bytes() != (last / "model.safetensors").read_bytes()
    assert list(target.parent.iterdir()) == [target]
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    again = invoke(["checkpoints", "--export", str(target), f"mean({run}@last:3)"])
    assert isinstance(again.exception, BadInput) and "to be absent or empty" in again.exception.expected
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--export", "{run}/x", "{run}"], "a single checkpoint"),
        (["--export", "gs://bucket/x", "mean({run}@last:2)"], "a folder of this machine"),
    ],
)
def test_writing_of_several_checkpoints_or_to_nowhere_is_refused(
    run: Path, arguments: list[str], expected: str
) -> None:
    refused = invoke(["checkpoints", *(argument.format(run=run) for argument in arguments)])
    assert isinstance(refused.exception, BadInput) and expected in refused.exception.expected
    assert not (run / "x").exists()
