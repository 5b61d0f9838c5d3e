"""The deployed runners of suites and of a single training step: the evaluations and checkpoints of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakes.models import write_checkpoint
from flows import suites as flows
from resources.settings import deployment_data
from tasks.checkpoints.checkpoint import Checkpoint, layouts_for
from tasks.checkpoints.discovery import discover
from tasks.running.planning import Request
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig
from tasks.spec.evaluators import EVALUATORS
from tasks.spec.suites import SuiteRequest, load_suite

SUITES = {
    "default_key_evals": "default_key_evals",
    "default_base_eval": "default_base_eval",
    "default_sft_eval": "default_sft_eval",
    "run_helm": "helm",
    "run_key_evals": "key_evals",
    "run_base_model_evals": "base_model",
    "run_sft_model_evals": "sft_model",
    "run_alpaca_eval": "alpaca_eval",
    "run_on_gpu": "on_gpu",
    "run_uncheatable_evals": "uncheatable",
    "run_lm_eval_harness": "lm_eval_harness",
}
DEPLOYED: dict[str, dict[str, Any]] = {
    deployment["entrypoint"].removeprefix("flows.suites."): deployment["parameters"]
    for deployment in yaml.safe_load(deployment_data("prefect.yaml").read_text())["deployments"]
    if {"suite", "evaluator"} & set(deployment["parameters"])
}

Evaluated = tuple[Sequence[EvaluationConfig], Sequence[Checkpoint]]


@pytest.fixture
def request_of_run(tmp_path: Path) -> SuiteRequest:
    for step in (1, 2):
        write_checkpoint(tmp_path / "run" / "hf" / f"step-{step}", seed=step)
    return SuiteRequest(
        model_path=str(tmp_path / "run"), base_url="http://127.0.0.1:9/v1", benchmarks_path=str(tmp_path)
    )


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[Evaluated]:
    handed: list[Evaluated] = []

    def plan(request: Request) -> Evaluated:
        [config, *_] = request.configs
        return request.configs, discover(config.model_path, request.selection, **layouts_for(request.configs))

    monkeypatch.setattr(flows, "plan", plan)
    monkeypatch.setattr(flows, "evaluate", lambda made, gate: handed.append(made))
    return handed


def run(runner: str, **parameters: Any) -> None:
    """Calls a deployed flow with the parameters of its deployment and further parameters."""
    flow = getattr(flows, runner)
    flow.fn(**flow.validate_parameters({**DEPLOYED[runner], **parameters}))


def test_every_deployed_runner_has_its_suite_or_evaluator():
    step_runners = {f"evaluate_{name}_on_step": name for name in EVALUATORS}
    assert {name: given.get("suite") or given["evaluator"] for name, given in DEPLOYED.items()} == {
        **SUITES,
        **step_runners,
    }


@pytest.mark.parametrize(("runner", "suite"), SUITES.items())
def test_runner_makes_every_evaluation_of_its_suite(
    request_of_run: SuiteRequest, evaluated: list[Evaluated], runner: str, suite: str
):
    run(runner, request=request_of_run, **({} if runner.startswith("default_") else {"selection": {"steps": [1]}}))
    [(configs, checkpoints)] = evaluated
    assert configs == load_suite(suite).evaluations_of(request_of_run)
    asked = {task.metric_key for config in configs for task in config.evals}
    assert asked == {task.metric_key for evaluation in load_suite(suite).evaluations for task in evaluation.evals}
    assert {config.wandb_tags for config in configs} == {(f"suite={suite}",)}
    assert [checkpoint.step for checkpoint in checkpoints] == [2 if runner.startswith("default_") else 1]


@pytest.mark.parametrize("evaluator", EVALUATORS)
@pytest.mark.parametrize(("step", "evaluated_step"), [(1, 1), (None, 2)])
def test_step_runner_evaluates_that_step_or_the_latest(
    request_of_run: SuiteRequest, evaluated: list[Evaluated], evaluator: str, step: int | None, evaluated_step: int
):
    runner, evals = f"evaluate_{evaluator}_on_step", (EvalTaskConfig(name="demo"),)
    run(runner, request=request_of_run, evals=evals, step=step)
    [([config], checkpoints)] = evaluated
    assert (config.evaluator.name, config.evals) == (evaluator, evals)
    assert config.native is (config.base_url is None)
    assert [checkpoint.step for checkpoint in checkpoints] == [evaluated_step]
