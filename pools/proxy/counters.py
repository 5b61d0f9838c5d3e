"""Counters of the proxy, and their text for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import get_args

from pools.protocol import Announcement, JournalStatus, LoadedHow, ReplicaStatus, RequestCounters

LATENCY_BOUNDS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
CLIENT_LEFT = 499
"""Status that counts requests of disconnected clients; it is never sent."""
_CELLS_REMEMBERED = 10_000


@dataclass(slots=True)
class Tally:
    """Everything the proxy counts. Model names come from the pool only: a client cannot add any."""

    by_status: Counter[int] = field(default_factory=Counter)
    models: defaultdict[str, RequestCounters] = field(default_factory=lambda: defaultdict(RequestCounters))
    cells: OrderedDict[tuple[str, str], RequestCounters] = field(default_factory=OrderedDict)
    """Counts by cell and attempt; the oldest are dropped."""
    latency_buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_SECONDS) + 1))
    latency_sum_seconds: float = 0.0
    loads: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Loaded checkpoints, by replica and way of loading."""
    load_seconds: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of these loads, by replica and phase."""
    _last_load: dict[tuple[str, str], int] = field(default_factory=dict)

    def announced(self, name: str, announcement: Announcement) -> None:
        last = self._last_load.get((name, announcement.instance), 0)
        for load in announcement.loads:
            if load.number <= last:
                continue
            self.loads[name, "failed" if load.failure else load.how] += 1
            for phase, seconds in load.phases.items():
                self.load_seconds[name, phase] += seconds
            self._last_load[name, announcement.instance] = load.number

    def cell(self, cell: str, attempt: str) -> RequestCounters:
        known = self.cells.get((cell, attempt))
        if known is None:
            known = self.cells[cell, attempt] = RequestCounters()
            if len(self.cells) > _CELLS_REMEMBERED:
                self.cells.popitem(last=False)
        return known

    def finished(self, status: int, *, seconds: float) -> None:
        self.by_status[status] += 1
        self.latency_buckets[bisect_left(LATENCY_BOUNDS_SECONDS, seconds)] += 1
        self.latency_sum_seconds += seconds


def count(counters: RequestCounters, status: int, *, turned_away: bool) -> None:
    """Counts a finished request by the HTTP status of its answer, from an engine or from the proxy itself."""
    if turned_away or status >= 500:
        counters.server_errors += 1
    elif status == CLIENT_LEFT:
        counters.cancelled += 1
    elif status < 300:
        counters.answered += 1
    else:
        counters.client_errors += 1


def prometheus_text(
    tally: Tally, *, replicas: Iterable[ReplicaStatus], held: int, journal: JournalStatus | None = None
) -> str:
    """Returns the counts in Prometheus' text format, version 0.0.4."""
    return "\n".join(_lines(tally, list(replicas), held, journal)) + "\n"


def _lines(tally: Tally, replicas: list[ReplicaStatus], held: int, journal: JournalStatus | None) -> Iterator[str]:
    by_status = {f'status="{status}"': count for status, count in sorted(tally.by_status.items())}
    yield from _family("requests_total", "counter", "Requests by the status of their answer; 499: left", by_status)
    results = ("answered", "client_errors", "server_errors", "cancelled")
    by_result = {
        f'model="{_escaped(name)}",result="{result}"': getattr(model, result)
        for name, model in sorted(tally.models.items())
        for result in results
    }
    yield from _family("model_requests_total", "counter", "Requests by model and result", by_result)
    tokens = {
        f'model="{_escaped(name)}",direction="{direction}"': count
        for name, model in sorted(tally.models.items())
        for direction, count in (("in", model.prompt_tokens), ("out", model.completion_tokens))
    }
    yield from _family("tokens_total", "counter", "Tokens that engines counted", tokens)
    every = list(tally.models.values())
    for name, meaning, count in (
        ("retries_total", "Attempts after the first", sum(model.retried for model in every)),
        ("upstream_requests_total", "Attempts sent to engines", sum(model.upstream for model in every)),
        ("held_requests_total", "Requests that had to wait for a replica", sum(model.held for model in every)),
    ):
        yield from _family(name, "counter", meaning, {"": count})
    yield from _family("held", "gauge", "Requests that wait for a replica now", {"": held})
    yield from _of_replicas(replicas)
    yield from _of_loads(tally, replicas)
    if journal is not None:
        counts = asdict(journal)
        size = counts.pop("bytes")
        for name, count in counts.items():
            yield from _family(f"journal_{name}_total", "counter", f"Journal: {name}", {"": count})
        yield from _family("journal_bytes", "gauge", "Size of what the journal holds", {"": size})
    yield from _latency(tally)


def _of_replicas(replicas: list[ReplicaStatus]) -> Iterator[str]:
    labels = {replica.name: f'replica="{_escaped(replica.name)}"' for replica in replicas}
    ready = {labels[replica.name]: int(replica.usable) for replica in replicas}
    yield from _family("replica_ready", "gauge", "1 where the replica gets requests", ready)
    in_flight = {labels[replica.name]: replica.in_flight for replica in replicas}
    yield from _family("in_flight", "gauge", "Requests a replica works on", in_flight)
    restarts = {labels[replica.name]: replica.announcement.restarts for replica in replicas}
    yield from _family("engine_restarts_total", "counter", "Engines started again after an engine died", restarts)


def _of_loads(tally: Tally, replicas: list[ReplicaStatus]) -> Iterator[str]:
    none_yet = dict.fromkeys(product((replica.name for replica in replicas), (*get_args(LoadedHow), "failed")), 0)
    counted = {**none_yet, **tally.loads}  # Prometheus sees no growth in a counter that starts with 1
    loads = {f'replica="{_escaped(name)}",how="{how}"': count for (name, how), count in sorted(counted.items())}
    yield from _family("loads_total", "counter", "Checkpoints loaded into replicas, by the way they came in", loads)
    seconds = {
        f'replica="{_escaped(name)}",phase="{_escaped(phase)}"': round(total, 6)
        for (name, phase), total in sorted(tally.load_seconds.items())
    }
    yield from _family("load_seconds_total", "counter", "Seconds of these loads by phase", seconds)


def _latency(tally: Tally) -> Iterator[str]:
    yield "# HELP assay_proxy_request_seconds From a request's arrival to the end of its answer"
    yield "# TYPE assay_proxy_request_seconds histogram"
    total = 0
    for bound, n in zip((*LATENCY_BOUNDS_SECONDS, "+Inf"), tally.latency_buckets, strict=True):
        total += n
        yield f'assay_proxy_request_seconds_bucket{{le="{bound}"}} {total}'
    yield f"assay_proxy_request_seconds_sum {tally.latency_sum_seconds:.6f}"
    yield f"assay_proxy_request_seconds_count {total}"


def _family(name: str, kind: str, meaning: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP assay_proxy_{name} {meaning}"
    yield f"# TYPE assay_proxy_{name} {kind}"
    for labels, value in values.items():
        yield f"assay_proxy_{name}{{{labels}}} {value}" if labels else f"assay_proxy_{name} {value}"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
