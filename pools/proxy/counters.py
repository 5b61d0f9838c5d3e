"""What the proxy counts, and how Prometheus reads it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from pools.proxy.state import ModelCounters, ReplicaStatus

LATENCY_BOUNDS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
CLIENT_LEFT = 499
"""Status under which a request is counted whose client left; no answer carries it."""


@dataclass(slots=True)
class ModelTally:
    """Running counts behind `ModelCounters`."""

    answered: int = 0
    client_errors: int = 0
    server_errors: int = 0
    cancelled: int = 0
    retried: int = 0

    def count(self, status: int, *, turned_away: bool) -> None:
        """Counts one finished request by the HTTP status it was answered with, by an engine or by the proxy itself."""
        if turned_away:
            self.server_errors += 1
        elif status == CLIENT_LEFT:
            self.cancelled += 1
        elif 200 <= status < 300:
            self.answered += 1
        elif status < 500:
            self.client_errors += 1
        else:
            self.server_errors += 1

    @property
    def counters(self) -> ModelCounters:
        """The counts as a value."""
        return ModelCounters(**{one.name: getattr(self, one.name) for one in fields(self)})


@dataclass(slots=True)
class Tally:
    """Everything the proxy counts. Model names are only those the pool named: a client cannot add one."""

    by_status: Counter[int] = field(default_factory=Counter)
    models: dict[str, ModelTally] = field(default_factory=dict)
    latency_buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_SECONDS) + 1))
    latency_sum_seconds: float = 0.0

    def model(self, name: str) -> ModelTally:
        """The counts of one model."""
        known = self.models.get(name)
        if known is None:
            known = self.models[name] = ModelTally()
        return known

    def finished(self, status: int, *, seconds: float) -> None:
        """Counts one request that was answered, or left by its client, after so many seconds."""
        self.by_status[status] += 1
        self.latency_buckets[bisect_left(LATENCY_BOUNDS_SECONDS, seconds)] += 1
        self.latency_sum_seconds += seconds


def prometheus_text(tally: Tally, *, replicas: Iterable[ReplicaStatus], held: int) -> str:
    """The counts in Prometheus' text format, version 0.0.4."""
    lines = ["# TYPE assay_proxy_requests_total counter"]
    lines += [f'assay_proxy_requests_total{{status="{status}"}} {n}' for status, n in sorted(tally.by_status.items())]
    lines.append("# TYPE assay_proxy_model_requests_total counter")
    for name, model in sorted(tally.models.items()):
        for result in ("answered", "client_errors", "server_errors", "cancelled"):
            labels = f'model="{_escaped(name)}",result="{result}"'
            lines.append(f"assay_proxy_model_requests_total{{{labels}}} {getattr(model, result)}")
    lines.append("# TYPE assay_proxy_retries_total counter")
    lines.append(f"assay_proxy_retries_total {sum(model.retried for model in tally.models.values())}")
    lines.append("# TYPE assay_proxy_held gauge")
    lines.append(f"assay_proxy_held {held}")
    lines.append("# TYPE assay_proxy_in_flight gauge")
    lines += [f'assay_proxy_in_flight{{replica="{_escaped(one.name)}"}} {one.in_flight}' for one in replicas]
    lines.append("# TYPE assay_proxy_request_seconds histogram")
    total = 0
    for bound, n in zip((*LATENCY_BOUNDS_SECONDS, "+Inf"), tally.latency_buckets, strict=True):
        total += n
        lines.append(f'assay_proxy_request_seconds_bucket{{le="{bound}"}} {total}')
    lines.append(f"assay_proxy_request_seconds_sum {tally.latency_sum_seconds:.6f}")
    lines.append(f"assay_proxy_request_seconds_count {total}")
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
