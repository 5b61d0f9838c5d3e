"""A run trained by Levanter while lm-eval evaluates its checkpoints with vLLM; nothing is faked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakes.polling import eventually
from fakes.training import CONTEXT, nano_training, trainers_of, write_training_data
from flows.training import train_and_evaluate
from resources.errors import JobFailed
from resources.settings import process_environment
from tasks.errors import GateRefused
from tasks.prefect_server.progress import CellDone, Update, listening
from tasks.records.record import Record, read_records
from tasks.running.claims.files import claims_folder, read_claims
from tasks.spec.training import TrainAndEvaluateConfig
from tasks.verdicts.gate import Gate

pytestmark = [pytest.mark.engine, pytest.mark.harness, pytest.mark.timeout(600)]

ASSAY = Path(sys.executable).with_name("assay")
STEPS, EVERY, QUESTIONS = 61, 20, 4
RUN = "nano"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_training_data(tmp_path_factory.mktemp("data"))


def nano_config(data: Path, output: Path, *, steps: int = STEPS, **trainer: Any) -> dict[str, Any]:
    engine = {"max_model_len": CONTEXT, "dtype": "float32", "kv_cache_memory_bytes": "64M"}
    evaluation = {
        "evals": [{"name": "demo_facts"}],
        "evaluation_path": str(output.parent / "evaluations"),
        "max_eval_instances": QUESTIONS,
        "pool_config": {"model": {"name": output.name, "engine_kwargs": engine}},
    }
    training = nano_training(data, output, steps=steps, every=EVERY, **trainer)
    return {"training": training, "evaluations": [evaluation], "every_n_steps": 2 * EVERY, "poll_seconds": 0.5}


def evaluate(config: dict[str, Any]) -> tuple[list[Record], list[CellDone]]:
    """Runs the flow; returns its records, and the cells that were evaluated for them."""
    evaluated: list[CellDone] = []

    def take(update: Update) -> None:
        if isinstance(update, CellDone):
            evaluated.append(update)

    with listening(take):
        return train_and_evaluate(TrainAndEvaluateConfig.model_validate(config)), evaluated


@pytest.fixture(scope="module")
def trained(prefect_api: str, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    run = tmp_path_factory.mktemp("e2e") / RUN
    records, evaluated = evaluate(nano_config(data, run))
    assert len(evaluated) == len(records)
    return run, records


def test_checkpoints_are_evaluated_on_a_warm_pool_during_training(trained: tuple[Path, list[Record]]) -> None:
    run, records = trained
    assert [record.checkpoint.name for record in records] == [f"{RUN}-40", f"{RUN}-60"], (
        "multiples, and the last checkpoint"
    )
    assert {int(folder.name.removeprefix("step-")) for folder in (run / "hf").iterdir()} == {20, 40, 60}
    for record in records:
        assert record.succeeded and record.samples == QUESTIONS
    first, second = records
    assert first.served["how"] == "cold start"
    assert second.served["how"] in {"reload", "restart"}, "the same replica, which compares its first reload"
    assert (run.parent / "evaluations" / RUN / "report.html").is_file()
    claims = read_claims(claims_folder(str(run.parent / "evaluations"), RUN))
    assert {seen.claim.subject.checkpoint for seen in claims} == {record.checkpoint.name for record in records}
    assert all(seen.claim.released for seen in claims)


def test_run_that_is_trained_and_evaluated_costs_nothing_more(trained: tuple[Path, list[Record]], data: Path) -> None:
    run, records = trained
    written = (run / "trained.json").stat().st_mtime_ns
    again, evaluated = evaluate(nano_config(data, run))
    assert again == records and evaluated == []
    gate = Gate.model_validate({"rules": [{"benchmark": "demo_facts", "metric": "acc", "at_least": 1.5}]})
    with pytest.raises(GateRefused, match=f"{RUN}-60: demo_facts"):
        train_and_evaluate(TrainAndEvaluateConfig.model_validate(nano_config(data, run)), gate)
    assert (run / "trained.json").stat().st_mtime_ns == written


def test_training_that_fails_fails_the_flow_after_what_there_is_was_evaluated(
    trained: tuple[Path, list[Record]], data: Path
) -> None:
    run, records = trained
    broken = nano_config(data, run, steps=STEPS + 1)
    broken["training"]["train_config"]["data"]["components"]["texts"]["source"]["train_urls"] = ["/nowhere.jsonl"]
    broken["training"]["train_config"]["data"]["cache_dir"] = str(run.parent / "other-cache")
    with pytest.raises(JobFailed, match="nowhere"):
        evaluate(broken)
    assert read_records(str(run.parent / "evaluations")) == records


def test_command_that_is_ended_ends_the_training(prefect_api: str, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "endless.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(nano_config(data, tmp_path / "endless", steps=10**6)))))
    environment = process_environment({"PREFECT_API_URL": prefect_api})
    command = [str(ASSAY), "train-and-evaluate", str(file)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as run:
        trainers = eventually(lambda: trainers_of("endless"))
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=120)
    assert run.returncode == 128 + signal.SIGTERM, errors
    assert trainers and trainers_of("endless") == []
