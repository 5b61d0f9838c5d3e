"""Promises of every evaluator, for all harnesses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fakes.endpoints import KEY, planned_model
from pools.endpoint import LocalCheckpoint, Scoring
from resources.environments.environments import ENVIRONMENTS
from tasks.errors import HarnessOutputInvalid
from tasks.evaluators.evaluator import EvaluatedModel, Evaluator, evaluator_named, harness_environments
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.evaluators import EVALUATORS, is_native, options_kind

PYTHON = Path("/environment/bin/python")
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "lm_evaluation_harness": ("demo_facts", "demo_backwards"),
    "alpaca_eval": ("demo_instructions",),
    "helm": ("demo_mcqa",),
    "inspect_ai": ("demo_choices",),
    "levanter_lm_evaluation_harness": ("demo_facts",),
}
"""Bundled benchmarks, by evaluator."""


@pytest.fixture(params=sorted(EVALUATORS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def evaluator(name: str) -> Evaluator:
    return evaluator_named(name)


@pytest.fixture
def config(name: str, evaluator: Evaluator) -> EvaluationConfig:
    evals = [{"name": benchmark} for benchmark in BENCHMARKS[name]]
    base_url = "http://127.0.0.1:9/v1" if evaluator.needs_endpoint else None
    given = {"evaluator": name, "model_path": "checkpoint", "base_url": base_url, "evals": evals}
    return EvaluationConfig.model_validate(given)


@pytest.fixture
def model(evaluator: Evaluator) -> EvaluatedModel:
    return planned_model() if evaluator.needs_endpoint else local_checkpoint()


def local_checkpoint(**changes) -> LocalCheckpoint:
    return LocalCheckpoint(**{"name": "run-100", "uri": "/runs/run/hf/step-100", **changes})


def test_evaluator_is_registered_under_its_own_name(name: str, evaluator: Evaluator):
    assert evaluator.name == options_kind(name).model_validate({}).name == name
    assert evaluator.needs_endpoint != is_native(name)


def test_evaluator_environment_is_its_own_and_its_lists_exist(evaluator: Evaluator, config: EvaluationConfig):
    assert evaluator.environment(config) in evaluator.environments
    for spec in evaluator.environments:
        assert harness_environments()[spec.name] == spec and spec.name not in ENVIRONMENTS
        assert spec.requirements.is_file() and (spec.overrides is None or spec.overrides.is_file())


def test_command_touches_nothing_and_is_the_same_twice(
    evaluator: Evaluator, model: EvaluatedModel, config: EvaluationConfig, tmp_path: Path
):
    output = tmp_path / "output"
    first = evaluator.command(model, config, output, python=PYTHON)
    assert first == evaluator.command(model, config, output, python=PYTHON)
    assert list(tmp_path.iterdir()) == []


def test_command_has_the_key_in_a_single_variable_only(
    evaluator: Evaluator, model: EvaluatedModel, config: EvaluationConfig, tmp_path: Path
):
    command = evaluator.command(model, config, tmp_path, python=PYTHON)
    assert KEY not in " ".join(command.argv)
    assert all(KEY not in text for text in command.files.values())
    holders = [name for name, value in command.variables.items() if KEY in value]
    assert holders == (["OPENAI_API_KEY"] if evaluator.needs_endpoint else [])
    assert KEY not in repr(command)


def test_command_runs_the_given_interpreter(
    evaluator: Evaluator, model: EvaluatedModel, config: EvaluationConfig, tmp_path: Path
):
    command = evaluator.command(model, config, tmp_path, python=PYTHON)
    assert Path(command.argv[0]).is_relative_to(PYTHON.parent)


def test_command_follows_what_it_is_given(
    evaluator: Evaluator, model: EvaluatedModel, config: EvaluationConfig, tmp_path: Path
):
    def everything(model: EvaluatedModel) -> str:
        command = evaluator.command(model, config, tmp_path, python=PYTHON)
        return " ".join([*command.argv, *command.files.values()])

    endpoints = ({"base_url": "http://127.0.0.1:10/v1"}, {"model": "run-200"}, {"capacity": 70})
    checkpoints = ({"uri": "gs://runs/run/hf/step-100"}, {"kind": "levanter"}, {"tokenizer": "/reference"})
    others = (
        [planned_model(**changes) for changes in endpoints]
        if evaluator.needs_endpoint
        else [local_checkpoint(**changes) for changes in checkpoints]
    )
    assert everything(model) not in [everything(other) for other in others]


@pytest.mark.parametrize("name", ["lm_evaluation_harness", "helm"])
def test_job_says_whether_choices_are_scored_from_the_cache_of_an_engine(
    evaluator: Evaluator, config: EvaluationConfig, tmp_path: Path
):
    def job_of(**changes) -> dict[str, Any]:
        command = evaluator.command(planned_model(**changes), config, tmp_path, python=PYTHON)
        return json.loads(command.files["job.json"])

    scoring = Scoring(scores_from_cache=True, kv_cache_tokens=2048, engine="e", architecture="a", dtype="float32")
    assert scoring.model_dump().items() <= job_of(scoring=scoring).items()
    assert job_of()["scores_from_cache"] is False


@pytest.mark.parametrize("folder", [".", "missing"])
def test_parse_of_an_empty_or_missing_folder_is_invalid_output(
    evaluator: Evaluator, config: EvaluationConfig, tmp_path: Path, folder: str
):
    with pytest.raises(HarnessOutputInvalid):
        evaluator.read(tmp_path / folder, config)


@pytest.mark.parametrize("log", ["", "\r\r\n", "100%", "Requesting API", "\x00" * 1000, "1/2 [", "(a; 1 before, 2"])
def test_progress_of_any_log_is_none_or_sensible(evaluator: Evaluator, log: str):
    progress = evaluator.progress(log)
    assert progress is None or 0 <= progress.done <= progress.total < math.inf


def test_check_accepts_the_benchmarks_that_come_with_assay(evaluator: Evaluator, config: EvaluationConfig):
    evaluator.check(config, PYTHON)
