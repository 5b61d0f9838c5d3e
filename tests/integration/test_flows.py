"""The flows themselves, on a Prefect server, with lm-eval itself, against the deterministic engine as an endpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest
from prefect.artifacts import Artifact

from fakes.command import run_command
from fakes.endpoints import endpoint
from fakes.models import CONFIG, write_checkpoint
from fakes.polling import eventually
from fakes.tokenizers import write_byte_tokenizer
from flows.evaluation import evaluate_checkpoint
from flows.series import evaluate_checkpoints
from resources.environments.environments import ensure_environment
from resources.settings import process_environment
from tasks.errors import EvaluationInterrupted
from tasks.evaluators.environments import LM_EVAL
from tasks.records.record import SCOPE_NAME, Record, read_records
from tasks.records.verdicts import find_early
from tasks.spec.evaluation import EvaluationConfig

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900), pytest.mark.usefixtures("prefect_api")]

ASSAY = Path(sys.executable).with_name("assay")
QUESTIONS = 4


@dataclass(frozen=True)
class Series:
    run: Path
    evaluations: Path
    base_url: str

    @property
    def config(self) -> EvaluationConfig:
        return EvaluationConfig.model_validate(
            {
                "model_path": str(self.run),
                "evaluation_path": str(self.evaluations),
                "base_url": self.base_url,
                "evals": [{"name": "demo_facts"}, {"name": "demo_backwards"}],
                "max_eval_instances": QUESTIONS,
            }
        )

    def arguments(self) -> list[str]:
        arguments = ["evaluate", "--model", str(self.run), "--output", str(self.evaluations)]
        arguments += ["--eval", "demo_facts", "--eval", "demo_backwards", "--limit", str(QUESTIONS)]
        return [*arguments, "--base-url", self.base_url, "--json"]

    def records(self) -> dict[str, Record]:
        files = sorted(self.evaluations.rglob("record.json"))
        records = read_records(str(self.evaluations))
        assert len(files) == len(records), "a record cannot be read"
        return {f"{record.checkpoint.name}/{record.cell}": record for record in records}


def write_served_checkpoint(folder: Path, *, seed: int) -> Path:
    """A checkpoint with a tokenizer that the harness can load; the weights are only digested."""
    return write_byte_tokenizer(write_checkpoint(folder, seed=seed, config={**CONFIG, "num_attention_heads": 1}))


@pytest.fixture(scope="module", autouse=True)
def _harness_is_built() -> None:
    ensure_environment(LM_EVAL)


@pytest.fixture
def series(tmp_path: Path) -> Callable[[str, list[int]], Series]:
    """Creates a run named `run` with complete checkpoints at these steps, for evaluation at an endpoint."""

    def make(base_url: str, steps: list[int]) -> Series:
        for step in steps:
            write_served_checkpoint(tmp_path / "run" / "hf" / f"step-{step}", seed=step)
        return Series(tmp_path / "run", tmp_path / "evaluations", base_url)

    return make


def test_series_is_evaluated_once_and_only_what_is_missing_or_changed_is_evaluated_again(
    tmp_path: Path, series: Callable[[str, list[int]], Series]
):
    with endpoint(tmp_path, "run-1", "run-2") as served:
        training_run = series(served.base_url, [1, 2])

        returned = evaluate_checkpoints(training_run.config)
        first = training_run.records()
        assert [record.checkpoint.name for record in returned] == ["run-1", "run-2"]
        assert {record.status for record in first.values()} == {"succeeded"}
        assert list(first.values()) == returned
        for record in returned:
            assert record.counts is not None
            assert record.counts.requested == record.counts.answered == record.counts.scored == 2 * QUESTIONS
            assert {(metric.benchmark, metric.n) for metric in record.metrics} == {
                ("demo_facts", QUESTIONS),
                ("demo_backwards", QUESTIONS),
            }
            assert record.served["by"] == "endpoint"
        artifacts = {kind: Artifact.get(f"run-{kind}") for kind in ("results", "curves", "report")}
        assert {kind: getattr(artifact, "type", None) for kind, artifact in artifacts.items()} == {
            "results": "table",
            "curves": "image",
            "report": "markdown",  # Prefect's rendering of a link
        }
        assert (training_run.evaluations / "run" / "report.html").is_file()

        asked = served.requests
        assert evaluate_checkpoints(training_run.config) == returned
        assert served.requests == asked

        gone = next(path for path in training_run.evaluations.rglob("record.json") if "step-1/" in str(path))
        gone.unlink()
        evaluate_checkpoints(training_run.config)
        again = training_run.records()
        assert again.keys() == first.keys()
        assert {key for key in first if again[key] != first[key]} == {key for key in first if key.startswith("run-1/")}

        shutil.rmtree(training_run.run / "hf" / "step-2")
        written_again = write_served_checkpoint(training_run.run / "hf" / "step-2", seed=99)
        [newest] = evaluate_checkpoint(training_run.config.model_copy(update={"discover_latest_checkpoint": True}))
        assert newest.succeeded and newest.checkpoint.uri == str(written_again)
        assert again.items() < training_run.records().items()
        assert newest.checkpoint.weights_digest not in {record.checkpoint.weights_digest for record in again.values()}


def test_endpoint_that_serves_other_models_is_refused_and_recorded_as_ours(
    tmp_path: Path, series: Callable[[str, list[int]], Series]
):
    with endpoint(tmp_path, "model-a", "model-b") as served:
        training_run = series(served.base_url, [1])
        with pytest.raises(EvaluationInterrupted, match="model-a, model-b"):
            evaluate_checkpoints(training_run.config)
        assert served.requests == 0
    [record] = training_run.records().values()
    assert record.status == "infra_failed" and record.metrics == ()
    assert record.reason is not None and "to serve run-1" in record.reason


def test_endpoint_that_dies_in_the_middle_is_recorded_as_an_infrastructure_failure(
    tmp_path: Path, series: Callable[[str, list[int]], Series]
):
    with endpoint(tmp_path, "run-1", delay_seconds=0.5) as served, ThreadPoolExecutor(1) as threads:
        training_run = series(served.base_url, [1])

        def kill_in_the_middle() -> None:
            eventually(lambda: served.requests > QUESTIONS or over.is_set())
            served.process.kill()

        over = Event()
        killed = threads.submit(kill_in_the_middle)
        try:
            done = run_command(*training_run.arguments())
        finally:
            over.set()
        killed.result()
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and "To do:" in done.stderr
    assert [record["status"] for record in json.loads(done.stdout)["records"]] == ["infra_failed"]
    [record] = training_run.records().values()
    assert record.status == "infra_failed" and record.metrics == ()


def test_two_runs_of_an_evaluation_at_once_leave_a_valid_record_per_cell(
    tmp_path: Path, series: Callable[[str, list[int]], Series], prefect_api: str
):
    env = process_environment({"PREFECT_API_URL": prefect_api})
    with endpoint(tmp_path, "run-1") as served:
        training_run = series(served.base_url, [1])
        other = subprocess.Popen(
            [str(ASSAY), *training_run.arguments()], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        eventually(lambda: list(training_run.evaluations.rglob("attempt-*")) or other.poll() is not None)
        returned = evaluate_checkpoints(training_run.config)
        printed, errors = other.communicate(timeout=300)
    assert other.returncode == 0, errors
    [record] = training_run.records().values()
    assert record.succeeded and returned == [record]
    assert [Record.model_validate(each) for each in json.loads(printed)["records"]] == [record]
    attempts = [path.name for path in training_run.evaluations.rglob("attempt-*") if path.is_dir()]
    assert record.attempt in attempts


def test_checkpoint_decided_early_has_no_record_until_it_is_finished(
    tmp_path: Path, series: Callable[[str, list[int]], Series]
):
    gate = tmp_path / "gate.json"
    rule = {"benchmark": "demo_facts", "metric": "acc", "not_worse_than": "run@1", "by_more_than": 0.1}
    gate.write_text(json.dumps({"rules": [rule]}))
    with endpoint(tmp_path, "run-1", "run-2") as served:
        training_run = series(served.base_url, [1, 2])
        arguments = ["evaluate", "--model", training_run.run, "--output", training_run.evaluations, "--json"]
        arguments += ["--eval", "demo_facts", "--base-url", served.base_url]
        assert run_command(*arguments, "--step", "1").returncode == 0

        arguments += ["--gate", gate]
        decided = run_command(*arguments, "--step", "2", "--early")
        assert decided.returncode == 0, decided.stderr
        [(cell, verdict)] = find_early(str(training_run.evaluations))
        [score] = verdict.scores
        assert score.verdict == "not worse" and 0 < score.asked <= verdict.asked < verdict.questions == score.questions
        assert [record.checkpoint.name for record in training_run.records().values()] == ["run-1"]
        assert (Path(cell) / SCOPE_NAME).is_file(), "its answers would be lost"
        words = f"decided early at {score.asked} of 120 questions (α = 0.05 per command and baseline): not worse"
        assert words in json.dumps(json.loads(decided.stdout)["gate"], ensure_ascii=False)
        assert words in str(getattr(Artifact.get("run-gate"), "data", None))

        asked = served.requests
        assert run_command(*arguments, "--step", "2", "--early").returncode == 0
        assert served.requests == asked and [early.created for _, early in find_early(cell)] == [verdict.created]

        finished = run_command(*arguments, "--finish")
        assert {record.checkpoint.name for record in training_run.records().values()} == {"run-1", "run-2"}
        assert "agrees with the early verdict, not worse" in finished.stdout
