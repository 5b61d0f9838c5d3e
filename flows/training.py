"""The flow for a run that is yet to be trained: evaluates its checkpoints during the training, on a shared pool."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from flows.evaluation import run_claimed
from flows.hooks import pipeline
from resources.errors import AssayError
from resources.tracing import tracing
from tasks.checkpoints.checkpoint import Checkpoint
from tasks.errors import NoCheckpoints
from tasks.policies.events import emit
from tasks.prefect_server.flow_runs import marked
from tasks.prefect_server.progress import report_event
from tasks.records.record import Record, now
from tasks.reports.artifacts import publish_report
from tasks.running.cells import Cell, as_served, conclude, plan_cells
from tasks.running.claimed_cells import ClaimedCells
from tasks.running.claims.files import claims_folder
from tasks.running.conclude import announce, conclude_by, raise_alerts
from tasks.running.early import require_whole
from tasks.running.provisioning import prepare_environments, provisioned, served_alike
from tasks.running.scheduler import schedule_cells
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.training import TrainAndEvaluateConfig
from tasks.training.arrivals import ArrivingCells, ArrivingCheckpoints
from tasks.training.job import finished, is_trained, plan_training, training
from tasks.verdicts.gate import Gate


@pipeline("train-and-evaluate", run_name="train and evaluate {config.place}")
def train_and_evaluate(config: TrainAndEvaluateConfig, gate: Gate | None = None) -> list[Record]:
    """Trains a model and evaluates each checkpoint as soon as it is complete; ends when both are done.

    A finished training is not repeated. If the training fails, its checkpoints are evaluated first; if the evaluation
    fails, the training continues. Cells that another run has claimed are left to it, with a wait for them at the end.

    Args:
        config: The training, and the evaluations of its checkpoints.
        gate: Gate on their scores at the end; the flow run fails on NO-GO.
    """
    began = now()
    require_whole(gate, by="a training")
    configs = [as_served(evaluation) for evaluation in config.asked()]
    if served := [evaluation for evaluation in configs if not evaluation.native]:
        served_alike(served)
    plan_cells(configs, [])  # rejects invalid requests before the training
    trained = is_trained(plan_training(config.training))
    failure: AssayError | None = None
    with nullcontext() if trained else training(config.training) as job:
        report_event("trained already" if job is None else f"training as job {job.job_id}")
        every, steps_from = config.every_n_steps, config.steps_from
        exports = ArrivingCheckpoints(config.exports, every_n_steps=every, steps_from=steps_from)
        folder = claims_folder(configs[0].evaluation_path, configs[0].run_name)
        claimed = ClaimedCells([], wait=True, folder=folder)

        def plan_arrived(configs: Sequence[EvaluationConfig], arrived: Sequence[Checkpoint]) -> list[Cell]:
            emit(arrived)
            raise_alerts(list(cells.planned.values()), since=began)
            return plan_cells(configs, arrived)

        poll = config.poll_seconds
        cells = ArrivingCells(configs, exports, job, claimed=claimed, poll_seconds=poll, plan=plan_arrived)
        try:
            with marked(configs), claimed:
                _evaluate(cells, configs, claimed)
        except AssayError as error:
            failure = error
            report_event(f"the evaluation ended: {error.found}")
        if job is not None:
            finished(job)
    if failure is not None:
        raise failure
    if not cells.planned:
        raise NoCheckpoints(
            expected=f"a complete checkpoint in {config.exports}",
            found="none, though the training has ended",
            remedy="let it export more often: hf_save_steps in train_config",
        )
    planned = list(cells.planned.values())
    raise_alerts(planned, since=began)
    if any(evaluation.sinks for evaluation in configs):
        announce(planned, since=began)
    return conclude(planned) if gate is None else conclude_by(gate, planned)


def _evaluate(cells: ArrivingCells, configs: Sequence[EvaluationConfig], claimed: ClaimedCells) -> None:
    prepare_environments(configs)
    checkpoints = cells.first()
    with tracing("evaluation", **{"assay.run": configs[0].run_name}):
        if cells.wanted:
            with provisioned(configs, checkpoints) as serving:
                cells.serving = serving
                schedule_cells(cells.wanted, serving, arriving=cells.arrive(), configs=configs, claimed=claimed)
        run_claimed(claimed)
    if cells.planned:
        publish_report(configs[0])
