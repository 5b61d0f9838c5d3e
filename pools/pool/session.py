"""A user's session with a pool: its lease, the checkpoints it requests, and the endpoints of its cells."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pools.endpoint import RunningModel, Scoring
from pools.engine.engines import replica_capacity
from pools.engine.launch import Servable
from pools.pool.access import PoolAccess, engine_digest, require_usable
from pools.protocol import Lease, LoadReport, ProxyStatus, ReplicaStatus, RequestCounters
from resources.errors import BadInput, EngineDied, ProxyFailed, ProxyRefused, error_of
from resources.tracing import traceparent

LEASE_SECONDS = 60.0
_RENEWALS_PER_LEASE = 6
_PATIENCE_SECONDS = 30.0  # for a proxy that restarts on its address
_WAIT_SECONDS = 5.0
_VERDICT_SECONDS = 1.5  # the pool polls leases twice a second
_RETRY_SECONDS = 0.2

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class OpenCell:
    """An attempt at a cell; its requests go to `running`, and `proxy` is the proxy instance that knows it."""

    name: str
    attempt: str
    proxy: str
    running: RunningModel
    loads_before: dict[str, int]


class PoolSession:
    """Uses a pool for as long as its lease is renewed: adds and requests checkpoints, reports loads and failures."""

    def __init__(
        self,
        access: PoolAccess,
        checkpoints: Sequence[Servable],
        *,
        holder: str,
        on_event: Callable[[str], None] = lambda line: None,
    ) -> None:
        if not checkpoints:
            raise BadInput(expected="at least 1 checkpoint to serve", found="none", remedy="name a checkpoint")
        require_usable(access, checkpoints)
        self.access = access
        self._checkpoints = {checkpoint.name: checkpoint for checkpoint in checkpoints}
        self._proxy = access.proxy()
        self._holder = holder
        self._on_event = on_event
        self._name = f"lease-{secrets.token_hex(6)}"
        self._wants: list[str] = []
        self._tries: dict[str, int] = {}
        self._cells: dict[tuple[str, str], tuple[str | None, str | None]] = {}  # mirror and traceparent
        self._proxy_instance = ""
        self._abilities: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._changing = threading.Lock()
        self._introducing = threading.Lock()
        self._closing = threading.Event()
        self._renewer = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> PoolSession:
        self._proxy_instance = self._take_lease().instance
        self._renewer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._renewer.join()
        with suppress(ProxyFailed):  # the pool is gone, or its lease runs out by itself
            self._proxy.end_lease(self._name)

    def bring(self, checkpoints: Sequence[Servable]) -> None:
        """Adds checkpoints under names that are not in use yet; they may be requested from now on."""
        require_usable(self.access, checkpoints)
        with self._changing:
            self._checkpoints = {**self._checkpoints, **{checkpoint.name: checkpoint for checkpoint in checkpoints}}
        self._take_lease()

    def load(self, name: str) -> tuple[RunningModel, LoadReport]:
        """Requests a checkpoint and waits until a replica holds it; returns its endpoint and the report of its load."""
        digest = self._digest(name)
        held = bool(_holding(self.status(), digest))
        self.want(name)
        status = self._until(lambda seen: bool(_holding(seen, digest)) and self.report(name, seen) is not None, name)
        report = self.report(name, status)
        assert report is not None
        if held:
            report = report.model_copy(update={"how": "already loaded", "seconds": 0.0, "phases": {}, "reason": None})
        return self._running_model(name, _shared_abilities(_holding(status, digest), self.access)), report

    def open(self, name: str, *, cell: str, attempt: str, mirror: str | None = None) -> OpenCell:
        """Requests a checkpoint for a cell; requests may be sent at once and wait until a replica holds the checkpoint.

        Args:
            cell: name that later attempts at the same cell reuse, so that they find its answers in the journal.
            mirror: folder in any store for a copy of the cell's answers; ignored without the admin key.
        """
        mirror = mirror if self.access.admin_key is not None else None
        trace = traceparent()
        self._patiently(lambda: self._proxy.open_cell(cell, attempt, mirror=mirror, traceparent=trace))
        with self._introducing:
            self._cells[cell, attempt] = (mirror, trace)
        status = self.status()
        loads_before = {
            replica.announcement.instance: max((load.number for load in replica.announcement.loads), default=0)
            for replica in status.replicas
        }
        self.want(name)
        try:
            running = self._running_model(name, self._abilities_of(name), prefix=f"/cells/{cell}/{attempt}")
        except BaseException:
            self.unwant(name)
            raise
        return OpenCell(cell, attempt, status.instance, running, loads_before)

    def has_prompt_logprobs(self, name: str) -> bool:
        """Returns True if engines return prompt log-probabilities for a checkpoint; loads it if that is unknown."""
        self.want(name)
        try:
            return self._abilities_of(name)["prompt_logprobs"]
        finally:
            self.unwant(name)

    def _abilities_of(self, name: str) -> Mapping[str, Any]:
        digests = self._checkpoints[name].digests
        kind = (digests.config, digests.tokenizer)
        if kind not in self._abilities:
            status = self._until(lambda seen: bool(_holding(seen, digests.checkpoint)), name)
            self._abilities[kind] = _shared_abilities(_holding(status, digests.checkpoint), self.access)
        return self._abilities[kind]

    def close_cell(self, opened: OpenCell, *, finished: bool) -> None:
        """Ends an attempt at a cell; if `finished`, the cell has its record and its answers can be dropped."""
        with self._introducing:
            mirror, _ = self._cells.pop((opened.name, opened.attempt), (None, None))

        def close() -> RequestCounters:
            if self._proxy.status().instance != opened.proxy:  # a restarted proxy does not know the cell's mirror yet
                self._proxy.open_cell(opened.name, opened.attempt, mirror=mirror)
            return self._proxy.close_cell(opened.name, opened.attempt, drop=finished)

        self._patiently(close)

    def replica_seconds(self, name: str) -> float:
        return self.status().replica_seconds.get(name, 0.0)

    def want(self, name: str) -> None:
        self._known(name)
        with self._changing:
            self._wants.append(name)
            self._tries[name] = self._tries.get(name, 0) + 1
        self._take_lease()
        self._await_another_try(name)

    def _await_another_try(self, name: str) -> None:
        deadline = time.monotonic() + _VERDICT_SECONDS
        status = self.status()
        while name in status.unusable and time.monotonic() < deadline:
            status = self._next(status)

    def unwant(self, name: str) -> None:
        with self._changing:
            if name in self._wants:
                self._wants.remove(name)
        self._take_lease()

    def report(self, name: str, status: ProxyStatus | None = None) -> LoadReport | None:
        """Returns the slowest of the replicas' last loads of a checkpoint; None if no replica has loaded it."""
        last = {replica.name: load for replica, load in self._loads(name, status or self.status())}
        return max(last.values(), key=lambda load: load.seconds, default=None)

    def report_of(self, name: str, opened: OpenCell) -> LoadReport | None:
        """Returns the slowest load of a checkpoint since a cell was opened; if there was none, that of `report`."""
        status, before = self.status(), opened.loads_before
        loads = self._loads(name, status)
        since = [load for replica, load in loads if load.number > before.get(replica.announcement.instance, 0)]
        return max(since, key=lambda load: load.seconds, default=None) or self.report(name, status)

    def _loads(self, name: str, status: ProxyStatus) -> Iterator[tuple[ReplicaStatus, LoadReport]]:
        digest = self._digest(name)
        for replica in status.replicas:
            for load in replica.announcement.loads:
                if load.digest == digest and load.model == name and load.failure is None:
                    yield replica, load

    def cell_counts(self, opened: OpenCell) -> RequestCounters:
        return self._patiently(lambda: self._proxy.cell_counts(opened.name, opened.attempt))

    def check(self, name: str) -> None:
        """Raises the reason if the pool cannot serve a checkpoint any more."""
        self._raise_failure(self.status(), name)

    def status(self) -> ProxyStatus:
        """Returns the status of the pool's proxy; waits up to 30 s for a proxy that restarts."""
        return self._patiently(self._introduced)

    def _introduced(self) -> ProxyStatus:
        status = self._proxy.status()
        if status.instance != self._proxy_instance:
            with self._introducing:
                if self._proxy_instance not in ("", status.instance):
                    self._take_lease()
                    for (cell, attempt), (mirror, trace) in self._cells.items():
                        self._proxy.open_cell(cell, attempt, mirror=mirror, traceparent=trace)
                self._proxy_instance = status.instance
        return status

    def _until(self, condition: Callable[[ProxyStatus], bool], name: str) -> ProxyStatus:
        status = self.status()
        while not condition(status):
            self._raise_failure(status, name)
            status = self._next(status)
        return status

    def _next(self, known: ProxyStatus) -> ProxyStatus:
        return self._patiently(lambda: self._proxy.status(after=known.version, wait_seconds=_WAIT_SECONDS))

    def _patiently(self, ask: Callable[[], Answer]) -> Answer:
        deadline: float | None = None
        while True:
            try:
                return ask()
            except ProxyRefused:
                raise
            except ProxyFailed:
                deadline = deadline or time.monotonic() + _PATIENCE_SECONDS
                if time.monotonic() > deadline or self._closing.is_set():
                    raise
                time.sleep(_RETRY_SECONDS)

    def _raise_failure(self, status: ProxyStatus, name: str) -> None:
        if (failure := status.unusable.get(name)) is not None:
            raise error_of(failure.model_dump())
        if status.failed is not None:
            raise EngineDied(
                expected="at least 1 replica that answers",
                found=status.failed,
                remedy="read the engine's log above; run again, or give the replicas more memory",
            )

    def _running_model(self, name: str, abilities: Mapping[str, Any], *, prefix: str = "") -> RunningModel:
        config = self.access.config
        capacity = replica_capacity(config.device, config.model.engine_kwargs) * config.resource_config.replicas
        base_url = self.access.address.base_url
        return RunningModel(
            base_url=f"{base_url.removesuffix('/v1')}{prefix}/v1",
            model=name,
            tokenizer=str(self._checkpoints[name].tokenizer),
            capacity=capacity,
            request_timeout_seconds=config.client_timeout_seconds,
            apply_chat_template=config.model.apply_chat_template,
            api_key=self.access.key.get_secret_value(),
            direct=True,
            **abilities,
        )

    def engine_identity(self) -> dict[str, Any]:
        versions = {replica.announcement.engine_version for replica in self.status().replicas}
        version = ", ".join(sorted(known for known in versions if known))
        return {**self.access.engine_identity(), "version": version}

    def _known(self, name: str) -> Servable:
        checkpoint = self._checkpoints.get(name)
        if checkpoint is None:
            raise BadInput(
                expected=f"one of the checkpoints brought: {', '.join(self._checkpoints)}",
                found=name,
                remedy="bring it when the session begins",
            )
        return checkpoint

    def _digest(self, name: str) -> str:
        return self._known(name).digests.checkpoint

    def _take_lease(self) -> ProxyStatus:
        with self._changing:
            lease = Lease(
                holder=self._holder,
                seconds=LEASE_SECONDS,
                models={name: checkpoint.served for name, checkpoint in self._checkpoints.items()},
                wants=tuple(self._wants),
                tries=dict(self._tries),
            )
            return self._patiently(lambda: self._proxy.take_lease(self._name, lease))

    def _renew(self) -> None:
        while not self._closing.wait(LEASE_SECONDS / _RENEWALS_PER_LEASE):
            try:
                self._take_lease()
            except ProxyFailed as error:
                self._on_event(f"the pool's lease could not be renewed: {error.found}")


def _holding(status: ProxyStatus, digest: str) -> list[ReplicaStatus]:
    return [replica for replica in status.replicas if replica.holds(digest)]


def _shared_abilities(holding: Sequence[ReplicaStatus], access: PoolAccess) -> dict[str, Any]:
    engines = [replica.announcement for replica in holding]
    scoring = [announced.scoring for announced in engines]
    return {
        "prompt_logprobs": all(announced.prompt_logprobs for announced in engines),
        "max_model_len": min((known for announced in engines if (known := announced.max_model_len)), default=None),
        "scoring": Scoring(
            scores_from_cache=all(way.scores_from_cache for way in scoring),
            kv_cache_tokens=min((way.kv_cache_tokens for way in scoring if way.kv_cache_tokens), default=None),
            engine=engine_digest(access.config, access.engine_build),
            architecture="/".join(sorted({way.architecture for way in scoring})),
            dtype="/".join(sorted({way.dtype for way in scoring})),
        ),
    }
