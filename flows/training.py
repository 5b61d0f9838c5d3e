"""The flow for a run that is still to be trained: its checkpoints are evaluated while it trains, on one pool."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from prefect import flow

from flows.hooks import leave_nothing
from resources.errors import AssayError, NoCheckpoints
from tasks.announcing import announce
from tasks.cells import Cell, conclude, plan_cells
from tasks.checkpoint_events import emit
from tasks.checkpoints import Checkpoint
from tasks.config import EvaluationConfig
from tasks.evaluation import evaluate_cells
from tasks.progress import report_event
from tasks.provisioning import as_served, prepare_environments, provisioned, served_alike
from tasks.publishing import publish_report
from tasks.records import Record, now
from tasks.run_marks import marked
from tasks.training import finished, is_trained, plan_training, training
from tasks.training_cells import ArrivingCells, Exports
from tasks.training_config import TrainAndEvaluateConfig


@flow(
    name="train-and-evaluate",
    flow_run_name="train and evaluate {config.place}",
    persist_result=False,
    on_cancellation=[leave_nothing],
    on_crashed=[leave_nothing],
)
def train_and_evaluate(config: TrainAndEvaluateConfig) -> list[Record]:
    """Trains a model and evaluates each checkpoint as soon as it is complete; ends when both are done.

    A run that is trained already is only evaluated. If the training fails, what it left is evaluated first; if the
    evaluation cannot go on, the training does.

    Raises:
        AssayError: the request cannot be right, the training failed, or a wanted cell has no succeeded record.
    """
    began = now()
    configs = [as_served(one) for one in config.asked()]
    if served := [one for one in configs if not one.native]:
        served_alike(served)
    plan_cells(configs, [])  # refuses what can be refused before anything is trained
    trained = is_trained(plan_training(config.training))
    failure: AssayError | None = None
    with nullcontext() if trained else training(config.training) as job:
        report_event("trained already" if job is None else f"training as job {job.job_id}")
        exports = Exports(config.exports, every_n_steps=config.every_n_steps)
        cells = ArrivingCells(configs, exports, job, poll_seconds=config.poll_seconds, plan=_planned)
        try:
            with marked(configs):
                _evaluate(cells, configs)
        except AssayError as error:
            failure = error
            report_event(f"the evaluation ended: {error.found}")
        if job is not None:
            finished(job)
    if failure is not None:
        raise failure
    if not cells.planned:
        raise NoCheckpoints(
            expected=f"at least one complete checkpoint in {config.exports}",
            found="none, though the training has ended",
            remedy="let it export more often: hf_save_steps in train_config",
        )
    if any(one.sinks for one in configs):
        announce(list(cells.planned.values()), since=began)
    return conclude(list(cells.planned.values()))


def _planned(configs: Sequence[EvaluationConfig], checkpoints: Sequence[Checkpoint]) -> list[Cell]:
    """The cells of some checkpoints, which whoever else waits for them is told of: they are complete."""
    emit(checkpoints)
    return plan_cells(configs, checkpoints)


def _evaluate(cells: ArrivingCells, configs: Sequence[EvaluationConfig]) -> None:
    """Evaluates checkpoints as they come, all on one pool, which is started for the first one."""
    prepare_environments(configs)
    checkpoints = cells.first()
    if cells:
        with provisioned(configs, checkpoints) as serving:
            cells.serving = serving
            evaluate_cells(cells, serving, configs=configs)
    if cells.planned:
        publish_report(configs[0])
