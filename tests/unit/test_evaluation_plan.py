"""What is refused once checkpoints and place are known, which endpoint answers for a checkpoint, and options."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fakes.engine import FakeEngine
from fakes.models import write_checkpoint, write_run
from flows.running import EvaluationOptions, evaluation_from_file, evaluation_from_options
from pools.launch import Servable
from resources.errors import BadInput, EndpointUnusable
from tasks.cells import plan_cells
from tasks.checkpoints import find_checkpoints
from tasks.config import CheckpointSelection, EvaluationConfig
from tasks.serving import EndpointServing


def config(path: Path | str, output: Path | str, **changes: Any) -> EvaluationConfig:
    given = {"model_path": str(path), "evaluation_path": str(output), "evals": [{"name": "demo_facts"}], **changes}
    return EvaluationConfig.model_validate(given)


def test_two_checkpoints_of_one_name_are_refused_with_their_places(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [100])
    write_checkpoint(run / "step-100", seed=5)
    with pytest.raises(BadInput, match="run-a-100 at") as caught:
        plan_cells.fn([config(run, tmp_path / "out")], find_checkpoints(str(run)))
    assert str(run / "hf" / "step-100") in caught.value.found
    assert "one run at a time" in caught.value.remedy


def test_one_served_name_for_several_checkpoints_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run-a", [1, 2])
    wanted = config(run, tmp_path / "out", base_url="http://127.0.0.1:9/v1", served_model_name="m")
    with pytest.raises(BadInput, match="one checkpoint for served_model_name"):
        plan_cells.fn([wanted], find_checkpoints(str(run)))


def test_relative_path_in_a_deployed_flow_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run-a", [1])
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "a-deployment")
    with pytest.raises(BadInput, match="absolute paths in a deployed flow"):
        plan_cells.fn([config(run, "evaluations")], find_checkpoints(str(run)))


def test_endpoint_answers_under_the_checkpoints_name_its_path_or_the_name_given(tmp_path: Path) -> None:
    served = Servable.from_uri("run-1", str(write_checkpoint(tmp_path / "step-1")))

    async def model_of(*offered: str, served_name: str | None = None) -> str:
        async with FakeEngine(models=offered) as engine:
            serving = EndpointServing(f"{engine.url}/v1", {"run-1": served}, served_name=served_name)
            opened = await asyncio.to_thread(serving.open, "run-1", cell="c", attempt="a", mirror="", in_chat=False)
            return opened.running.model

    assert asyncio.run(model_of("other", "run-1")) == "run-1"
    assert asyncio.run(model_of(served.uri)) == served.uri
    assert asyncio.run(model_of("prod", served_name="prod")) == "prod"
    with pytest.raises(EndpointUnusable, match="it offers something-else"):
        asyncio.run(model_of("something-else"))


def test_endpoint_without_v1_and_a_served_name_without_endpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="ends in /v1"):
        config(tmp_path, tmp_path, base_url="http://127.0.0.1:8000")
    with pytest.raises(ValidationError, match="served_model_name is for base_url"):
        config(tmp_path, tmp_path, served_model_name="m")


def test_latest_together_with_every_n_steps_is_refused() -> None:
    with pytest.raises(ValidationError, match="which='latest' and every_n_steps"):
        CheckpointSelection(which="latest", every_n_steps=5)


def test_pool_options_beside_an_endpoint_are_refused_not_ignored() -> None:
    base: dict[str, Any] = {"model": "runs/a", "evals": ("demo_facts",), "base_url": "http://127.0.0.1:8000/v1"}
    assert evaluation_from_options(EvaluationOptions(**base)).base_url is not None
    extras: list[dict[str, Any]] = [{"chat": True}, {"engine": ("dtype=float32",)}, {"replicas": 2}, {"cpu": 1}]
    for extra in extras:
        with pytest.raises(BadInput, match=f"--base-url and --{next(iter(extra))}"):
            evaluation_from_options(EvaluationOptions(**base, **extra))


def test_options_beside_a_file_are_refused_not_ignored(tmp_path: Path) -> None:
    file = tmp_path / "evaluation.yaml"
    file.write_text("model_path: /runs/a\nevals: [{name: demo_facts}]\n")
    assert evaluation_from_file(str(file), EvaluationOptions()).model_path == "/runs/a"
    with pytest.raises(BadInput, match="--config and --eval, --limit"):
        evaluation_from_file(str(file), EvaluationOptions(evals=("x",), limit=3))


def test_options_become_a_configuration() -> None:
    made = evaluation_from_options(
        EvaluationOptions(
            model="runs/a",
            evals=("arc_easy:5", "demo_facts"),
            engine=("max_model_len=512", "enforce_eager=false", "dtype=float32"),
            chat=True,
            cpu=3,
        )
    )
    assert [task.metric_key for task in made.evals] == ["arc_easy_5shot", "demo_facts"]
    assert made.evals[0].num_fewshot == 5
    assert made.pool_config is not None
    assert made.pool_config.model.engine_kwargs == {"max_model_len": 512, "enforce_eager": False, "dtype": "float32"}
    assert made.pool_config.resource_config.cpu == 3
    assert made.asks_in_chat
    assert made.evaluation_path == "evaluations"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"evals": ("x",)}, "found:    --eval"),
        ({"model": "a"}, "found:    --model"),
        ({"model": "a", "evals": ("x:many",)}, "--eval x:many"),
        ({"model": "a", "evals": ("x",), "engine": ("oops",)}, "--engine oops"),
    ],
)
def test_incomplete_options_say_what_was_found(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        evaluation_from_options(EvaluationOptions(**options))
    assert words.lower() in str(caught.value).lower()
