"""Traces as received by a collector: joined, off by default, and never blocking."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest

from fakes.collector import collector
from fakes.processes import free_port
from resources.settings import process_environment
from resources.tracing import mark, past_span, span, span_of_requests, traceparent, traces_endpoint, tracing

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
QUIET = """
import sys
from resources.tracing import mark, past_span, span_of_requests, traceparent, tracing
with tracing("evaluation"), span_of_requests("cell"):
    mark(failed=True)
    past_span("load", began=0, ended=1, phases={})
    assert traceparent() is None
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def fail_inside() -> None:
    with span("ask"):
        raise ValueError("the whole answer of the model")


def test_spans_of_threads_and_other_processes_are_children_of_their_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as came:
        monkeypatch.setenv(ENDPOINT, came.url)

        def cell() -> str | None:
            with span_of_requests("cell", step=7):
                now = time.time()
                past_span("load", began=now, ended=now + 3, phases={"stage": 1.0, "reload": 4.0}, how="reload")
                mark(failed=True, status="failed")
                with span("open"):
                    return traceparent()

        with tracing("evaluation", run="run-a"), ThreadPoolExecutor(1) as threads:
            named = threads.submit(copy_context().run, cell).result()
            with tracing("another"), span("plan"):
                pass
    paths = {
        *("evaluation", "evaluation/cell", "evaluation/cell/open", "evaluation/another", "evaluation/another/plan"),
        *(f"evaluation/cell/{name}" for name in ("load", "load/stage", "load/reload")),
    }
    assert set(came.paths()) == paths and len(came.spans) == len(paths)
    asked = came.span_named("cell")
    assert named is not None and named.startswith(f"00-{asked.trace_id.hex()}-{asked.span_id.hex()}-0")
    assert {item.key: item.value.string_value or item.value.int_value for item in asked.attributes} == {
        "step": 7,
        "status": "failed",
    }
    assert asked.status.code == asked.status.STATUS_CODE_ERROR
    load, stage, reload = came.span_named("load"), came.span_named("stage"), came.span_named("reload")
    assert stage.start_time_unix_nano == load.start_time_unix_nano
    assert stage.end_time_unix_nano == reload.start_time_unix_nano
    assert reload.end_time_unix_nano == load.end_time_unix_nano
    assert came.services == {"assay"}


def test_exception_marks_its_spans_without_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as came:
        monkeypatch.setenv(ENDPOINT, came.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "nightly")
        with pytest.raises(ValueError), tracing("evaluation"):
            fail_inside()
    assert set(came.paths()) == {"evaluation", "evaluation/ask"}
    assert {span.status.message for span in came.spans} == {"ValueError"}
    assert not [event for span in came.spans for event in span.events]
    assert came.services == {"nightly"}


def test_nothing_is_traced_or_imported_unless_a_variable_names_a_collector() -> None:
    asked = process_environment({"OTEL_SERVICE_NAME": "x"})
    shown = subprocess.run([sys.executable, "-c", QUIET], env=asked, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["[]"]


@pytest.mark.parametrize("variables", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}, {}])
def test_endpoint_is_that_of_opentelemetrys_own_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:4318/")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert traces_endpoint() == (None if variables else "http://127.0.0.1:4318/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/other")
    assert traces_endpoint() == (None if variables else "http://127.0.0.1:9/other")


def test_work_goes_on_past_a_collector_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector(silent=True) as deaf:
        monkeypatch.setenv(ENDPOINT, deaf.url)
        with tracing("evaluation"), span_of_requests("cell"):
            assert traceparent() is not None
        assert not deaf.released.is_set(), "the block ended though nothing was answered"


@pytest.mark.parametrize(
    "variables",
    [
        {ENDPOINT: "http://127.0.0.1:{port}"},
        {ENDPOINT: "nonsense"},
        {ENDPOINT: "http://127.0.0.1:{port}", "OTEL_EXPORTER_OTLP_CERTIFICATE": "/nowhere"},
    ],
)
def test_collector_that_is_not_there_or_named_wrongly_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("{port}", str(free_port())))
    done = []
    with tracing("evaluation"), span("cell"):
        done.append("work")
    assert done == ["work"]


def test_exporter_that_cannot_be_imported_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with tracing("evaluation"), span("cell"):
        assert traceparent() is None
