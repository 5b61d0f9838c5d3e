"""The native evaluator: its command, its progress, and its refusals before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pools.endpoint import LocalCheckpoint
from resources.config import ResourceConfig
from resources.errors import BadInput
from tasks.errors import HarnessOutputInvalid
from tasks.evaluators.harness import Progress
from tasks.evaluators.levanter.evaluator import EVALUATOR
from tasks.evaluators.levanter.options import LevanterOptions
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

RECORDED = Path(__file__).parents[2] / "data" / "lm_eval" / "recorded"
PYTHON = Path("/environment/bin/python")


def make_config(*names: str, **changes: Any) -> EvaluationConfig:
    evals = [EvalTaskConfig(name=name) for name in names or ("demo_facts",)]
    given = {"evaluator": "levanter_lm_evaluation_harness", "model_path": "/runs/a", "evals": evals}
    return EvaluationConfig.model_validate({**given, **changes})


def levanter(**options: Any) -> dict[str, Any]:
    return {"name": "levanter_lm_evaluation_harness", **options}


def job(config: EvaluationConfig, checkpoint: LocalCheckpoint) -> dict[str, Any]:
    command = EVALUATOR.command(checkpoint, config, Path("/output"), python=PYTHON)
    return json.loads(command.files["job.json"])


def test_levanter_command_names_device_checkpoint_and_reference() -> None:
    native = LocalCheckpoint("a-7", "gs://runs/a/checkpoints/step-7", "levanter", "/runs/a/hf/step-5")
    config = make_config(resource_config=ResourceConfig.with_tpu("v5litepod-8"), evaluator=levanter(max_length=100))
    asked = job(config, native)
    assert asked["checkpoint"] == {
        "name": "a-7",
        "uri": "gs://runs/a/checkpoints/step-7",
        "kind": "levanter",
        "reference": "/runs/a/hf/step-5",
    }
    assert (asked["device"], asked["max_length"], asked["precision"]) == ("tpu", 100, None)
    exported = LocalCheckpoint("a-5", "/runs/a/hf/step-5")
    assert job(make_config(), exported)["checkpoint"]["reference"] == exported.uri
    assert job(make_config(), exported)["device"] == "cpu"


def test_levanter_takes_its_own_copy_of_benchmarks_in_a_store() -> None:
    config = make_config(benchmarks_path="gs://benchmarks/ours")
    command = EVALUATOR.command(LocalCheckpoint("a", "/runs/a"), config, Path("/output"), python=PYTHON)
    assert command.copies == {"benchmarks": "gs://benchmarks/ours"}
    assert json.loads(command.files["job.json"])["benchmarks_path"] == "benchmarks"


def test_levanter_options_that_change_numbers_are_measured_and_others_are_not() -> None:
    def measured(**options: Any) -> dict[str, Any]:
        return make_config(evaluator=levanter(**options)).score_inputs()

    assert measured(max_length=100) != measured()
    assert measured(precision="p=f32,c=bfloat16") != measured()
    assert measured(rows_per_device=9, reference="/elsewhere") == measured()


@pytest.mark.parametrize("policy", ["f32", "p=f32,c=bfloat17", "p=f32;c=f32", "p=f32,,c=f32", ""])
def test_levanter_precision_that_is_no_policy_is_refused(policy: str) -> None:
    assert (
        make_config(evaluator=levanter(precision="p=f32,c=bfloat16")).options(LevanterOptions).precision
        == "p=f32,c=bfloat16"
    )
    with pytest.raises(ValidationError, match="such as p=f32,c=bfloat16"):
        make_config(evaluator=levanter(precision=policy))


def test_levanter_progress_is_that_of_the_last_line() -> None:
    log = "Scoring (a, b (c)): 3/90\nnoise\nScoring (a, b (c)): 64/90\n[evaluator] more"
    assert EVALUATOR.progress(log) == Progress("a, b (c)", 64, 90)
    assert EVALUATOR.progress("Scoring: 3/90") is None


@pytest.mark.parametrize("own", [True, False])
def test_levanter_refuses_generation_that_its_file_tells_of(own: bool, tmp_path: Path) -> None:
    (tmp_path / "writes.yaml").write_text("task: 'writes'\noutput_type: generate_until\n")
    config = make_config("writes", benchmarks_path=str(tmp_path)) if own else make_config("demo_backwards")
    with pytest.raises(BadInput, match="lets the model write") as caught:
        EVALUATOR.check(config, PYTHON)
    assert "Send generation to the endpoint" in caught.value.remedy


def test_levanter_results_are_read_as_those_of_lm_eval_with_more_versions(tmp_path: Path) -> None:
    output = tmp_path / "output"
    shutil.copytree(RECORDED, output)
    config = make_config(*json.loads((RECORDED / "plan.json").read_text())["benchmarks"])
    with pytest.raises(HarnessOutputInvalid, match=r"levanter\.json"):
        EVALUATOR.read(output, config)[0]
    (output / "levanter.json").write_text(json.dumps({"versions": {"levanter": "0.2", "jax": "0.10"}, "devices": []}))
    parsed = EVALUATOR.read(output, config)[0]
    assert parsed.metrics and parsed.counts.requested == parsed.counts.scored > 0
    assert parsed.versions.items() >= {"levanter": "0.2", "jax": "0.10"}.items()
    assert len(list(EVALUATOR.read(output, config)[1])) == parsed.counts.requested
