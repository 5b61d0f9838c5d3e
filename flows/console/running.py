"""Runs flows from the command line, with live progress and a result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from flows.console.live import live_view
from resources.errors import AssayError, BadInput, StorageError
from resources.settings import settings
from tasks.errors import OverBudget
from tasks.prefect_server.embedded import EmbeddedServer, embedded_server
from tasks.prefect_server.lazy import server_named
from tasks.prefect_server.progress import CellDone, Judged, RaisedAlert, Update, listening
from tasks.records.current import current_records
from tasks.records.record import Record, now, read_records
from tasks.records.verdicts import Verdict
from tasks.reports.artifacts import publish_report, report_uri
from tasks.running.cells import Cell, conclude, standing_record
from tasks.running.claimed_cells import put_away
from tasks.running.conclude import conclude_by
from tasks.running.expected import check_budget, tell
from tasks.running.planning import Plan, Request, carrying_out
from tasks.running.warm import begun_early
from tasks.sinks.publishing import missing_sinks

if TYPE_CHECKING:
    from tasks.generation.config import GenerationConfig

Result = TypeVar("Result")
_NEEDED_BY_FLOWS = ("flows.evaluation",)
_NEEDED_LATER = ("fastapi", "flows.series", "flows.suites", "scipy.special")
"""Modules that Prefect, the command and the first cell import later."""


@dataclass(frozen=True)
class SeriesResult:
    """The result of a series. `error` is set if a wanted cell has no succeeded record."""

    records: list[Record]
    evaluated: int
    already_recorded: int
    report: str | None
    error: AssayError | None
    verdict: Verdict | None = None
    """The gate's verdict, if there is a gate."""
    alerts: tuple[str, ...] = ()
    """Alerts that it raised, each in a line."""


def run_series(
    evaluate: Callable[[], list[Record]], evaluation_path: str, run_name: str, *, request: Request | None = None
) -> SeriesResult:
    """Runs a flow in this process, with live progress.

    The `request` that it carries out is planned first, without Prefect, and the flow is skipped if nothing is left to
    do; unless a configured Prefect server must show it, or incomplete checkpoints are waited for.
    """
    began = now()
    evaluated: set[int] = set()
    error: AssayError | None = None
    records: list[Record] = []
    verdict: Verdict | None = None
    alerts: list[str] = []
    with live_view() as show:

        def take(update: Update) -> None:
            nonlocal verdict
            if isinstance(update, CellDone) and update.status != "gone":
                evaluated.add(update.cell)
            elif isinstance(update, Judged):
                verdict = update.verdict
            elif isinstance(update, RaisedAlert):
                alerts.append(update.text)
            show(update)

        with listening(take):
            try:
                with ExitStack() as carried_out:
                    finished = None
                    if request is not None and not (server_named() or request.selection.wait_for_incomplete_seconds):
                        plan = carried_out.enter_context(carrying_out(request))
                        finished = records_if_finished(request, plan)
                    if finished is None:
                        own_server()  # first: with a kept pool this is the longest step
                        with begun_early(request.configs if request else ()):
                            finished = _run_flow(evaluate)
                    records = finished
            except AssayError as raised:
                if isinstance(raised, BadInput):
                    raise
                error = raised
    if error is not None:
        run_records = [record for record in read_records(evaluation_path) if record.checkpoint.run == run_name]
        records = current_records(run_records)
    already = sum(record.succeeded and record.created < began for record in records)
    report = report_uri(evaluation_path, run_name) if records else None
    return SeriesResult(records, len(evaluated), already, report, error, verdict, tuple(alerts))


def records_if_finished(request: Request, plan: Plan) -> list[Record] | None:
    """Returns the records of a plan without Prefect if every cell has a record, and every sink has received it.

    Writes the report and the gate's verdict as a flow run would. Returns None, without any effect, if cells or sinks
    are pending. Raises OverBudget if the pending cells are expected to cost more than the limit.
    """
    if not all(cell.done and _is_announced(cell) for cell in plan.cells):
        try:
            check_budget(plan.expected, settings().max_usd)
        except OverBudget:
            tell(plan.expected)  # if it may start, its flow run logs this
            raise
        return None
    plan.report_updates()
    try:
        put_away(plan.cells)
        publish_report(request.configs[0])
    except StorageError:
        return None  # a flow run retries
    return conclude(plan.cells) if request.gate is None else conclude_by(request.gate, plan.cells)


def _is_announced(cell: Cell) -> bool:
    recorded = standing_record(cell) if cell.config.sinks else None
    return recorded is None or not missing_sinks(recorded.record, cell.config.sinks)


def run_generation(config: GenerationConfig) -> list[dict[str, Any]]:
    """Runs a generation in this process, with live progress; returns its totals by checkpoint."""

    def generate() -> list[dict[str, Any]]:
        from flows.generation import generate_text

        return generate_text(config)

    with live_view() as show, listening(show):
        return _run_flow(generate)


def own_server() -> EmbeddedServer | None:
    """Returns this process's Prefect server, started if necessary; None if another server is configured."""
    return None if server_named() else embedded_server()


def import_flows() -> None:
    """Imports Prefect and all modules of a flow run, in parallel to the start of its server."""
    for name in _NEEDED_BY_FLOWS if server_named() else (*_NEEDED_BY_FLOWS, *_NEEDED_LATER):
        import_module(name)


def _run_flow(flow: Callable[[], Result]) -> Result:
    server = own_server()
    import_flows()
    from tasks.prefect_server.client import readable_prefect_errors

    with ExitStack() as using:
        if server is not None:
            using.enter_context(server.used())
        using.enter_context(readable_prefect_errors())
        return flow()
