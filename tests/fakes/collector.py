"""A collector of OpenTelemetry traces: an HTTP server that decodes the messages of the protocol."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fakes.http_server import Answer, Request, http_server


@dataclass
class Collector:
    """Address of a collector and its received spans. It answers nothing while `silent`."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    services: set[str] = field(default_factory=set)
    silent: bool = False
    released: threading.Event = field(default_factory=threading.Event)

    def paths(self) -> list[str]:
        """Returns each span's path from the root, names joined by /, sorted by start."""
        by_id = {span.span_id: span for span in self.spans}
        assert len({span.trace_id for span in self.spans}) <= 1, "a single trace"

        def path(span: Span) -> str:
            above = path(by_id[span.parent_span_id]) + "/" if span.parent_span_id else ""
            return above + span.name

        return [path(span) for span in sorted(self.spans, key=lambda span: span.start_time_unix_nano)]

    def span_named(self, name: str) -> Span:
        [span] = [span for span in self.spans if span.name == name]
        return span


@contextmanager
def collector(*, silent: bool = False) -> Iterator[Collector]:
    started = Collector(silent=silent)

    def answer(request: Request) -> Answer:
        if started.silent:
            started.released.wait()
            return 503, {}, b""
        for resource in ExportTraceServiceRequest.FromString(request.body).resource_spans:
            names = {item.key: item.value.string_value for item in resource.resource.attributes}
            started.services.add(names["service.name"])
            started.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return 200 if request.path == "/v1/traces" else 404, {}, b""

    with http_server(answer) as started.url:
        try:
            yield started
        finally:
            started.released.set()
