"""Plans of evaluations: made once, by a command before it imports Prefect, or else by the flow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from pools.weights.kept import keeping
from pools.weights.model_files import checkpoint_gone
from tasks.checkpoints.checkpoint import Checkpoint, layouts_for
from tasks.checkpoints.discovery import discover
from tasks.prefect_server.progress import Event, Notice, Update, listening, report_event
from tasks.running.cells import Cell, as_served, plan_cells
from tasks.running.expected import Expected, with_expectations
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig
from tasks.verdicts.gate import Gate


@dataclass(frozen=True)
class Request:
    """Evaluations of the selected checkpoints of a run, and of a merged checkpoint of it, if any."""

    configs: tuple[EvaluationConfig, ...]
    selection: CheckpointSelection = CheckpointSelection()
    gate: Gate | None = None
    merged: EvaluationConfig | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """Cells of evaluations, with the decisions that a gate requests early and the expected cost of the open cells."""

    cells: Sequence[Cell]
    expected: Expected
    updates: Sequence[Update] = ()
    """Its updates, if they were not reported while it was made."""

    def report_updates(self) -> None:
        for update in self.updates:
            if isinstance(update, Event):
                report_event(update.text, type(update))


_known: ContextVar[tuple[Request, Plan] | None] = ContextVar("plan", default=None)


def plan(request: Request) -> Plan:
    """Returns the plan of a request; inside `carrying_out` of that request, the plan that exists."""
    if (known := _known.get()) is not None and known[0] == request:
        known[1].report_updates()
        return known[1]
    configs, merged = request.configs, request.merged
    checkpoints = discover(configs[0].model_path, request.selection, **layouts_for(configs))
    more = plan_cells([as_served(merged)], discover(merged.model_path, CheckpointSelection())) if merged else []
    return plan_checkpoints(configs, checkpoints, gate=request.gate, more=more)


def plan_checkpoints(
    configs: Sequence[EvaluationConfig],
    checkpoints: Sequence[Checkpoint],
    *,
    gate: Gate | None = None,
    more: Sequence[Cell] = (),
) -> Plan:
    """Returns the plan of evaluations of checkpoints, with `more` cells of the same run."""
    cells = [*plan_cells([as_served(config) for config in configs], checkpoints), *more]
    if checkpoints and not cells:
        raise checkpoint_gone(configs[0].model_path)
    if gate is not None and gate.decide == "early":
        from tasks.running.early import decided_early  # statistics, which take long to import

        cells = decided_early(gate, cells)
    return Plan(*with_expectations(cells))


@contextmanager
def carrying_out(request: Request) -> Iterator[Plan]:
    """Plans a request, and makes the plan known to the flow in the block, which reports its updates.

    The files of its checkpoints are kept until they are evaluated, or until the end of the block.
    """
    updates: list[Update] = []
    with keeping(report_unprotected):
        with listening(updates.append):
            made = replace(plan(request), updates=updates)
        token = _known.set((request, made))
        try:
            yield made
        finally:
            _known.reset(token)


def report_unprotected(reason: str) -> None:
    """Reports that a checkpoint could not be kept."""
    report_event(f"checkpoints that their trainer removes now are gone, since they could not be kept: {reason}", Notice)
