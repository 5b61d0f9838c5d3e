"""Progress, links and assets of a flow run in Prefect's UI; and flow runs while the server is away."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import pytest
from prefect import flow
from prefect.assets import Asset
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from fakes.polling import eventually
from fakes.records import make_metric, make_record, merged_record
from resources.errors import BadInput
from tasks.errors import PrefectUnavailable
from tasks.prefect_server.client import end_reported, readable_prefect_errors, server_answers, show
from tasks.prefect_server.flow_runs import ProgressBar
from tasks.prefect_server.progress import CellDone, CellProgress, Event, Update, listening
from tasks.reports.artifacts import asset_key, asset_keys, browser_address, table_rows


@dataclass
class Screen:
    """Fake of the server: messages that it received, and its behavior."""

    shown: list[tuple[float, str]] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)
    failures: int = 0

    def show(self, percent: float, described: str) -> None:
        self.answers.wait(30)
        if self.failures:
            self.failures -= 1
            raise httpx.ConnectError("no server")
        self.shown.append((round(percent, 1), described))


def bar_of(screen: Screen, heard: list[Update]) -> ProgressBar:
    return ProgressBar("run-a", also=heard.append, send=screen.show)


def progress(cell: int, done: int) -> CellProgress:
    return CellProgress(f"step-{cell}", cell, 4, "lm-eval", done, 10)


def test_progress_never_waits_while_the_server_hangs_and_shows_the_latest():
    screen, heard = Screen(), []
    bar = bar_of(screen, heard)
    updates = [progress(1, done) for done in range(10)] + [CellDone("step-1", 1, 4, "succeeded", 1.0)]
    for update in updates:
        bar.take(update)
    assert heard == updates and screen.shown == []
    screen.answers.set()
    bar.close()
    assert screen.shown[-1] == (25.0, "1 of 4 cells of run-a evaluated")
    assert len(screen.shown) <= 2


def test_progress_of_interrupted_cells_stays_where_it_was():
    screen = Screen()
    screen.answers.set()
    bar = bar_of(screen, [])
    bar.take(CellDone("step-1", 1, 4, "failed", 1.0))
    bar.take(progress(2, 5))
    bar.take(CellDone("step-2", 2, 4, "infra_failed", 1.0))
    bar.close()
    assert screen.shown[-1] == (37.5, "1 of 4 cells of run-a evaluated")
    bar.take(progress(3, 5))
    assert screen.shown[-1][0] == 37.5  # the end is shown by then


def test_progress_that_the_server_did_not_take_is_sent_again():
    screen = Screen(failures=1)
    screen.answers.set()
    bar = ProgressBar("run-a", also=lambda _: None, send=screen.show, pause_seconds=0.0)
    bar.take(progress(1, 5))
    eventually(lambda: screen.shown == [(12.5, "0 of 4 cells of run-a evaluated")])
    bar.close()


class _Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps("3.8.8" if self.path.endswith("version") else True).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    """A bound server that is not listening yet: it refuses connections."""
    http_server = http.server.HTTPServer(("127.0.0.1", 0), _Server, bind_and_activate=False)
    http_server.server_bind()
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{http_server.server_port}/api"}):
        yield http_server
    http_server.server_close()


def waiting(server: http.server.HTTPServer, *, comes_back_after: int | None) -> tuple[Callable[[float], None], list]:
    """Returns a fake sleep and its waits; the server comes back after `comes_back_after` waits."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == comes_back_after:
            server.server_activate()
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    return sleep, waits


def test_server_that_comes_back_is_waited_for(server: http.server.HTTPServer):
    sleep, waits = waiting(server, comes_back_after=1)
    heard: list[Update] = []
    with listening(heard.append):
        assert server_answers(within_seconds=300, sleep=sleep, clock=lambda: sum(waits))
    server.shutdown()
    assert len(waits) == 1
    assert [type(event) for event in heard] == [Event] and "waiting for the Prefect server" in str(heard)


def test_server_that_stays_away_is_given_up_in_time(server: http.server.HTTPServer):
    sleep, waits = waiting(server, comes_back_after=None)
    assert not server_answers(within_seconds=3, sleep=sleep, clock=lambda: sum(waits))
    assert len(waits) == 2


def test_server_of_the_run_itself_is_not_waited_for():
    with temporary_settings(restore_defaults={PREFECT_API_URL}), pytest.raises(BadInput), end_reported():
        assert server_answers(within_seconds=300)
        raise BadInput(expected="a", found="b", remedy="c")


def test_flow_with_a_silent_server_fails_because_of_infrastructure(server: http.server.HTTPServer):
    @flow
    def nothing() -> None:
        pass

    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        pytest.raises(PrefectUnavailable, match="refused") as raised,
        readable_prefect_errors(),
    ):
        nothing()
    assert raised.value.exit_code == 2
    with pytest.raises(RuntimeError, match="a bug of ours"), readable_prefect_errors():
        raise RuntimeError("a bug of ours")


def test_what_cannot_be_shown_fails_nothing():
    heard: list[Update] = []

    def lost() -> None:
        raise httpx.ConnectError("gone meanwhile")

    with temporary_settings(restore_defaults={PREFECT_API_URL}), listening(heard.append):
        show("the report", lost)
    assert "the report cannot be shown in Prefect's UI: gone meanwhile" in str(heard)


@pytest.mark.parametrize(
    ("place", "address"),
    [
        ("gs://b/runs/a b/report.html", "https://storage.cloud.google.com/b/runs/a%20b/report.html"),
        ("gs://b/runs/a", "https://console.cloud.google.com/storage/browser/b/runs/a"),
        ("s3://b/runs/a", "s3://b/runs/a"),
        ("/data/a b/report.html", "file:///data/a%20b/report.html"),
    ],
)
def test_link_to_a_report_or_records_is_what_a_browser_can_open(place: str, address: str):
    assert browser_address(place) == address


def test_results_with_any_names_are_shown_as_text():
    [row] = table_rows([make_record(metrics=(make_metric(name="acc ![](http://x/b.png) <b>\r*"),))])
    assert row["metric"] == r"acc \!\[](http://x/b.png) \<b><br>\*"
    assert (row["run"], row["step"]) == ("run-a", 100)


@pytest.mark.parametrize(
    "parts", [("records", "run-a", "step-7"), ("my run?#[x]", "../a/b%", "ä<b>'\""), ("é" * 300, "b" * 300, "c" * 300)]
)
def test_asset_key_is_valid_for_prefect_with_a_part_for_each(parts: tuple[str, ...]):
    key = Asset(key=asset_key(*parts)).key
    assert len(key.removeprefix("assay://").split("/")) == len(parts)


def test_asset_of_a_merged_record_hangs_on_the_merged_checkpoint_and_on_those_in_it():
    merged = merged_record([100, 200])
    inputs = [asset_keys(make_record(step=step))[1] for step in (100, 200)]
    [own, checkpoint, *above] = asset_keys(merged)
    assert above == inputs and checkpoint not in inputs
    assert own == f"assay://records/run-a/step-200/lm_evaluation_harness/{merged.cell}"
