"""Running flows from the command line: live progress, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from flows.console.live import live_view
from resources.errors import AssayError, BadInput
from tasks.gates.reasons import Verdict
from tasks.prefect_server.embedded import EmbeddedServer, embedded_server
from tasks.prefect_server.lazy import server_named
from tasks.prefect_server.progress import CellDone, Judged, Raised, Update, listening
from tasks.records.current import current_records
from tasks.records.record import Record, now, read_records
from tasks.reports.artifacts import report_uri
from tasks.running.warm import begun_early
from tasks.spec.evaluation import EvaluationConfig

if TYPE_CHECKING:
    from tasks.generation.config import GenerationConfig

Result = TypeVar("Result")
_NEEDED_BY_FLOWS = ("flows.evaluation",)
_NEEDED_LATER = ("fastapi", "flows.series", "flows.suites", "scipy.special")
"""Modules that Prefect, the command and the first cell would import when they get to them."""


@dataclass(frozen=True)
class SeriesResult:
    """The result of a series. `error` is set if not every wanted cell has a succeeded record."""

    records: list[Record]
    evaluated: int
    already_recorded: int
    report: str | None
    error: AssayError | None
    verdict: Verdict | None = None
    """The gate's verdict, where there is one."""
    alerts: tuple[str, ...] = ()
    """Alerts that it raised, a line each."""


def run_series(
    evaluate: Callable[[], list[Record]],
    *,
    evaluation_path: str,
    run_name: str,
    console: Console,
    finished: Callable[[], list[Record] | None] = lambda: None,
    configs: Sequence[EvaluationConfig] = (),
) -> SeriesResult:
    """Runs a flow here and now, with live progress on `console`.

    Args:
        evaluate: the flow, with its arguments.
        evaluation_path: where its records go.
        run_name: of the run whose checkpoints it evaluates.
        console: where progress is shown.
        finished: returns the records if there is nothing to do; the flow is not run then.
        configs: what is evaluated; what that needs is imported while Prefect is, and while its server starts.
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
            elif isinstance(update, Raised):
                alerts.append(update.text)
            show(update)

        with listening(take):
            try:
                if (found := finished()) is None:
                    own_server()  # first: nothing takes longer where the pool is kept
                    with begun_early(configs):
                        found = _run_flow(evaluate)
                records = found
            except AssayError as raised:
                if isinstance(raised, BadInput):
                    raise
                error = raised
    if error is not None:
        found = [record for record in read_records(evaluation_path) if record.checkpoint.run == run_name]
        records = current_records(found)
    already = sum(record.succeeded and record.created < began for record in records)
    report = report_uri(evaluation_path, run_name) if records else None
    return SeriesResult(records, len(evaluated), already, report, error, verdict, tuple(alerts))


def run_generation(config: GenerationConfig, *, console: Console) -> list[dict[str, Any]]:
    """Runs a generation here and now, with live progress on `console`; returns its totals by checkpoint."""
    with live_view(console) as show, listening(show):
        return _run_flow(lambda: _generate(config))


def _generate(config: GenerationConfig) -> list[dict[str, Any]]:
    from flows.generation import generate_text

    return generate_text(config)


def own_server() -> EmbeddedServer | None:
    """The Prefect server of this process, begun now if it was not yet; None where another one is named."""
    return None if server_named() else embedded_server()


def import_flows() -> None:
    """Imports Prefect and all that a flow run of this process needs, which costs nothing while its server starts."""
    for name in _NEEDED_BY_FLOWS if server_named() else (*_NEEDED_BY_FLOWS, *_NEEDED_LATER):
        import_module(name)


def _run_flow(flow: Callable[[], Result]) -> Result:
    server = own_server()
    import_flows()
    from tasks.prefect_server.client import prefect_errors_in_words

    with ExitStack() as using:
        if server is not None:
            using.enter_context(server.used())
        using.enter_context(prefect_errors_in_words())
        return flow()
