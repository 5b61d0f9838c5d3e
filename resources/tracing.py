"""Traces of this process, sent to an OpenTelemetry collector; off unless OpenTelemetry's own variables name it.

A background thread sends the spans, without error messages, prompts or answers, and drops them if they are rejected.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from resources.settings import variable

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

# For sending spans to the collector, and for the last spans at the end.
_COLLECTOR_SECONDS = 2.0
_NANOSECONDS = 1e9

_log = logging.getLogger("assay.tracing")
_tracer: ContextVar[Tracer | None] = ContextVar("tracer", default=None)
_requests_of: ContextVar[str | None] = ContextVar("requests_of", default=None)


def traces_endpoint() -> str | None:
    """Returns the full URL for traces from OpenTelemetry's own variables; None if they name none."""
    if (variable("OTEL_SDK_DISABLED") or "").lower() == "true" or variable("OTEL_TRACES_EXPORTER") == "none":
        return None
    base = variable("OTEL_EXPORTER_OTLP_ENDPOINT")
    return variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or (f"{base.rstrip('/')}/v1/traces" if base else None)


@contextmanager
def tracing(name: str, **attributes: str | int) -> Iterator[None]:
    """Traces the block and its spans, also in copies of the context; a nested block becomes a span of the outer."""
    if _tracer.get() is not None or (provider := _provider()) is None:
        with span(name, **attributes):
            yield
        return
    token = _tracer.set(provider.get_tracer("assay"))
    try:
        with span(name, **attributes):
            yield
    finally:
        _tracer.reset(token)
        ending = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(_COLLECTOR_SECONDS)


def _provider() -> TracerProvider | None:
    if traces_endpoint() is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = Resource.create({"service.name": "assay"}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=named, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=_COLLECTOR_SECONDS)))
    except Exception as error:  # noqa: BLE001 - the boundary: a broken tracer must not fail an evaluation
        _log.warning("nothing is traced: %s", error)
        return None
    return provider


@contextmanager
def span(name: str, **attributes: str | int) -> Iterator[None]:
    """Makes the block a span of the current trace, if there is a trace; an exception marks the span as failed."""
    if (tracer := _tracer.get()) is None:
        yield
        return
    from opentelemetry.trace import StatusCode

    with tracer.start_as_current_span(
        name, attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as current:
        try:
            yield
        except BaseException as error:
            current.set_status(StatusCode.ERROR, type(error).__name__)
            raise


def mark(*, failed: bool = False, **attributes: str | int) -> None:
    """Sets attributes and the failed state of the current span, if there is a span."""
    if _tracer.get() is None:
        return
    from opentelemetry.trace import StatusCode, get_current_span

    get_current_span().set_attributes(attributes)
    if failed:
        get_current_span().set_status(StatusCode.ERROR)


def past_span(name: str, *, ended: float, phases: Mapping[str, float], began: float, **attributes: str | int) -> None:
    """Adds a span for finished work of another process to the current span, if there is a span.

    `began` and `ended` are in seconds since 1970; `phases` are the seconds of consecutive parts, which become inner
    spans.
    """
    if (tracer := _tracer.get()) is None:
        return
    from opentelemetry.trace import set_span_in_context

    whole = tracer.start_span(name, start_time=int(began * _NANOSECONDS), attributes=attributes)
    for phase, seconds in phases.items():
        part = tracer.start_span(phase, set_span_in_context(whole), start_time=int(began * _NANOSECONDS))
        began = min(began + seconds, ended)
        part.end(int(began * _NANOSECONDS))
    whole.end(int(ended * _NANOSECONDS))


@contextmanager
def span_of_requests(name: str, **attributes: str | int) -> Iterator[None]:
    """Makes the block a span as `span` does, and the parent of requests that the block sends."""
    with span(name, **attributes):
        token = _requests_of.set(_current())
        try:
            yield
        finally:
            _requests_of.reset(token)


def traceparent() -> str | None:
    """Returns the `traceparent` header for requests sent from the current block; None without a span."""
    return _requests_of.get()


def _current() -> str | None:
    if _tracer.get() is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent")
