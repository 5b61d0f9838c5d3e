"""Runs flows from the command line, with live progress and a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from flows.console.live import live_view
from resources.errors import AssayError, BadInput
from tasks.prefect_server.embedded import EmbeddedServer, embedded_server
from tasks.prefect_server.lazy import server_named
from tasks.prefect_server.progress import CellDone, Judged, RaisedAlert, Update, listening
from tasks.records.current import current_records
from tasks.records.record import Record, now, read_records
from tasks.records.verdicts import Verdict
from tasks.reports.artifacts import report_uri
from tasks.running.warm import begun_early
from tasks.spec.evaluation import EvaluationConfig

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
    evaluate: Callable[[], list[Record]],
    *,
    evaluation_path: str,
    run_name: str,
    console: Console,
    finished: Callable[[], list[Record] | None] = lambda: None,
    configs: Sequence[EvaluationConfig] = (),
) -> SeriesResult:
    """Runs a flow in this process, with live progress on `console`.

    Args:
        finished: returns the records if there is nothing to do, which skips the flow.
        configs: evaluations with imports to do during Prefect's import and its server's start.
    """
    began = now()
    evaluated: set[int] = set()
    error: AssayError | None = None
    records: list[Record] = []
    verdict: Verdict | None = None
    alerts: list[str] = []
    with live_view(console) as show:

        def take(update: Update) -> None:
            nonlocal verdict
            if isinstance(update, CellDone):
                evaluated.add(update.cell)
            elif isinstance(update, Judged):
                verdict = update.verdict
            elif isinstance(update, RaisedAlert):
                alerts.append(update.text)
            show(update)

        with listening(take):
            try:
                if (flow_records := finished()) is None:
                    own_server()  # first: with a kept pool this is the longest step
                    with begun_early(configs):
                        flow_records = _run_flow(evaluate)
                records = flow_records
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


def run_generation(config: GenerationConfig, *, console: Console) -> list[dict[str, Any]]:
    """Runs a generation in this process, with live progress on `console`; returns its totals by checkpoint."""
    with live_view(console) as show, listening(show):
        return _run_flow(lambda: _generate(config))


def _generate(config: GenerationConfig) -> list[dict[str, Any]]:
    from flows.generation import generate_text

    return generate_text(config)


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
