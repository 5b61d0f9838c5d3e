"""A replica's agent: the process next to an engine that joins the pool and follows its orders.

It announces itself to the proxy with the join token. Each announcement renews a lease, and the response names the
checkpoint to hold, so the pool needs no inbound connection to the machine. The requests of an agent that is silent for
a lease, or reports that its engine hangs, are sent to other replicas.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
from collections import deque
from functools import partial
from urllib.parse import urlsplit

from pools.config import InferencePoolConfig
from pools.engine.engines import device_name
from pools.engine.launch import Launcher, ServedCheckpoint, VllmLauncher, digests_of, environment_name, staging
from pools.protocol import Announcement, Failure, LoadReport, Orders, ServedModel
from pools.proxy.client import ProxyAddress, ProxyClient
from pools.replica.follower import Follower
from pools.replica.gang import Gang, leave
from pools.replica.ingress import Ingress
from pools.replica.loading import DIED, Loading
from pools.replica.replica import ReplicaEngine
from pools.settings import join_token
from pools.weights.staging import StagedFolder
from resources.backends.local.client import local_client
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.errors import AssayError, EngineDied, ProxyFailed
from resources.jobs.addresses import is_loopback, own_address
from resources.jobs.jobs import Client
from resources.settings import process_rank

_WATCH_SECONDS = 0.25
_HEALTH_SECONDS = 1.0
_RETRY_SECONDS = 0.25
_REMEMBERED_LOADS = 20
_ORPHANED_SECONDS = 120.0  # time for a proxy to restart on the same address

_log = logging.getLogger("assay.agent")


def run_agent(
    name: str, config: InferencePoolConfig, launcher: Launcher | None, address: ProxyAddress, start: int
) -> None:
    """Runs a replica, or another host of it, until the pool stops it or has been gone for 120 s.

    Args:
        launcher: starts engines; vLLM, from an environment that is built on this machine, when None.
        address: address of the pool's proxy; the join token is read from the environment.
        start: number of this start among the pool's starts of agents.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    threading.excepthook = _end_process
    if launcher is None:
        environment = ensure_environment(ENVIRONMENTS[environment_name(config)], on_progress=_log.info)
        launcher = VllmLauncher(config, environment)
    client = local_client()  # on any backend: the engine runs on the agent's machine
    rank, token = process_rank(), join_token()
    with launcher.warmed(client) as warm:
        options = {"launcher": warm, "client": client, "address": address, "token": token, "start": start}
        (Follower(name, config, rank=rank, **options) if rank else Agent(name, config, **options)).run()


def _end_process(failure: threading.ExceptHookArgs) -> None:
    _log.error("a thread failed", exc_info=failure.exc_value)
    logging.shutdown()
    os._exit(1)


class Agent:
    """Runs one of a pool's replicas as the pool orders; `start` as in `run_agent`."""

    def __init__(
        self,
        name: str,
        config: InferencePoolConfig,
        *,
        launcher: Launcher,
        client: Client,
        address: ProxyAddress,
        token: str,
        start: int,
    ) -> None:
        self._name = name
        self._config = config
        # Below the longest wait that the proxy grants, and well within a lease.
        self._beat_seconds = min(10.0, config.lease_seconds / 3)
        self._proxy = ProxyClient(address, key=token)
        self._token = token
        self._start = start
        self._instance = secrets.token_hex(6)
        self._sequence = 0
        self._loads: deque[LoadReport] = deque(maxlen=_REMEMBERED_LOADS)
        self._load_number = 0
        self._reported: ServedCheckpoint | None = None
        self._snapshot = threading.Lock()
        self._stop = threading.Event()
        self._healthy_at = time.monotonic()
        own_host = own_address((address.host, address.port))
        self._gang = Gang(name, config, host=own_host, token=token, start=start)
        self._replica = ReplicaEngine(
            name, config, launcher=launcher, client=client, on_change=self._changed, drain=self._drain, gang=self._gang
        )
        self._ingress = None if is_loopback(address.host) else Ingress(own_host, self._engine_port)
        self._staging = staging(environment_name(config), trusted=config.model.trusts_code)
        self._held: StagedFolder | None = None
        self._failed: tuple[str, str] | None = None
        self._orders: Orders | None = None
        self._obeying = threading.Lock()
        self._loading = False

    def run(self) -> None:
        """Joins the pool and follows its orders until it is stopped, or the pool has been gone for 120 s."""
        watcher = threading.Thread(target=self._watch, name="engine-watch", daemon=True)
        watcher.start()
        last_heard = time.monotonic()
        seen = -1
        try:
            while not self._stop.is_set():
                try:
                    orders = self._say(wait_seconds=self._beat_seconds if seen >= 0 else 0, seen=seen)
                except ProxyFailed as error:
                    if time.monotonic() - last_heard > _ORPHANED_SECONDS:
                        _log.error("the pool has been gone for %g s: %s", _ORPHANED_SECONDS, error.found)
                        return
                    seen = -1
                    self._stop.wait(_RETRY_SECONDS)
                    continue
                last_heard, seen = time.monotonic(), orders.version
                if orders.stop:
                    _log.info("told to stop: %s", orders.refusal or "the pool does not want it any more")
                    return
                self._orders = orders
                self._obey()
        finally:
            self._stop.set()
            self._replica.stop()
            self._gang.close()
            if self._ingress is not None:
                self._ingress.close()
            self._staging.close()
            if self._held is not None:
                self._held.release()

    def _obey(self) -> None:
        with self._obeying:
            orders = self._orders
            if orders is None or not orders.known or self._loading or self._stop.is_set():
                return
            if isinstance(self._replica.failure, EngineDied):
                return  # announced as such; the pool ends the agent
            if (ahead := next(iter(orders.next.values()), None)) is not None and ahead.uri:
                self._staging.prefetch(ahead.uri, digests_of(ahead))
                self._gang.prefetch(ahead)
            if orders.model is None or orders.served is None:
                self._failed = None
                return
            ordered = (orders.model, orders.served.digest)
            checkpoint = self._replica.checkpoint
            holds = checkpoint is not None and (checkpoint.name, checkpoint.digests.checkpoint) == ordered
            if (holds and self._replica.state in ("ready", "starting")) or ordered == self._failed:
                return
            self._loading = True
        threading.Thread(target=self._load_as_ordered, args=(orders.model, orders.served), name="load").start()

    def _load_as_ordered(self, model: str, served: ServedModel) -> None:
        try:
            self._load(model, served)
        finally:
            with self._obeying:
                self._loading = False
            self._obey()  # the orders may have changed meanwhile

    def _load(self, model: str, served: ServedModel) -> None:
        loading = Loading()
        failure: AssayError | None = None
        staged: StagedFolder | None = None
        try:
            with loading.phase("stage"):
                digests, check = digests_of(served), self._gang.check(served)
                staged = self._staging.stage(served.uri, digests)
                elsewhere = self._gang.folders(check)
            verify = partial(self._verify, staged, served)
            checkpoint = ServedCheckpoint.from_folder(model, staged.path, digests, verify=verify, elsewhere=elsewhere)
            self._replica.load(checkpoint, loading)
        except AssayError as error:
            failure = error
            _log.error("%s was not loaded: %s", model, error)
        self._load_number += 1
        report = LoadReport(
            number=self._load_number,
            model=model,
            digest=served.digest,
            how=loading.how,
            seconds=round(loading.seconds, 4),
            phases=loading.phases,
            ended=time.time(),
            reason=loading.reason,
            device=device_name(self._config.device),
            failure=Failure(**failure.as_values()) if failure else None,
        )
        if failure is None:
            _log.info("%s loaded: %s, %.2f s", model, loading.how, loading.seconds)
            if self._held is not None:
                self._held.release()
            self._held = staged
            self._failed = None
        else:
            if staged is not None:
                staged.release()
            self._failed = (model, served.digest)
        # caused by our own end, not by the checkpoint
        if failure is None or not (self._stop.is_set() or self._gang.lost):
            self._loads.append(report)
            self._reported = self._replica.checkpoint
            self._say_at_once()

    def _verify(self, staged: StagedFolder, served: ServedModel) -> None:
        check = self._gang.check(served)
        staged.verify()
        self._gang.folders(check)

    def _watch(self) -> None:
        lease = self._config.lease_seconds
        looked_at = 0.0
        replica = self._replica
        while not self._stop.wait(_WATCH_SECONDS):
            if (lost := self._gang.lost) is not None:
                leave(lost)
            if replica.state != "ready":
                self._healthy_at = time.monotonic()
            elif replica.engine_ended:
                self._say_at_once()
                replica.revive(DIED, still=lambda: replica.engine_ended)
            elif time.monotonic() - looked_at > min(_HEALTH_SECONDS, lease / 6):
                hung = self._hangs
                if replica.healthy(timeout_seconds=lease / 2):
                    self._healthy_at = time.monotonic()
                if self._hangs != hung:
                    self._say_at_once()
                if time.monotonic() - self._healthy_at > 2 * lease:
                    why = f"did not answer for {2 * lease:g} s"
                    replica.revive(why, still=lambda: not replica.healthy(timeout_seconds=1))
                looked_at = time.monotonic()

    def _engine_port(self) -> int | None:
        return urlsplit(self._replica.url).port if self._replica.url else None

    @property
    def _hangs(self) -> bool:
        return self._replica.state == "ready" and time.monotonic() - self._healthy_at > self._config.lease_seconds

    def _say(self, *, wait_seconds: float, seen: int, until_idle: bool = False) -> Orders:
        with self._snapshot:
            self._sequence += 1
            replica = self._replica
            state, checkpoint = replica.standing
            if state == "ready" and checkpoint is not self._reported:
                state = "starting"  # "ready" is announced together with the load's report
            holds = checkpoint is not None and state in ("ready", "draining")
            announcement = Announcement(
                instance=self._instance,
                start=self._start,
                sequence=self._sequence,
                url=self._ingress.url if self._ingress and replica.url else replica.url,
                ingress_key=self._ingress.key if self._ingress else None,
                engine_key=replica.key,
                door=self._gang.door,
                capacity=replica.capacity,
                state="dead" if replica.engine_ended or self._hangs else state,
                model=checkpoint.name if checkpoint else None,
                digest=checkpoint.digests.checkpoint if checkpoint and holds else None,
                prompt_logprobs=replica.prompt_logprobs,
                max_model_len=replica.max_model_len,
                scoring=replica.scoring,
                engine_version=replica.engine_version,
                restarts=replica.deaths.revived,
                last_death=replica.deaths.last,
                deaths=dict(replica.deaths.of_errors),
                failure=Failure(**replica.failure.as_values()) if replica.failure and not self._gang.lost else None,
                loads=tuple(self._loads),
                seen=seen,
                wait_seconds=wait_seconds,
                until_idle=until_idle,
            )
        return self._proxy.announce(self._name, announcement, join_token=self._token)

    def _changed(self) -> None:
        self._healthy_at = time.monotonic()
        self._say_at_once()

    def _say_at_once(self) -> None:
        try:
            self._say(wait_seconds=0, seen=-1)
        except ProxyFailed as error:
            _log.warning("the proxy was not told: %s", error.found)

    def _drain(self) -> None:
        deadline = time.monotonic() + self._config.engine_timeout_seconds
        while time.monotonic() < deadline and not self._stop.is_set():
            try:
                if self._say(wait_seconds=self._beat_seconds, seen=-1, until_idle=True).in_flight == 0:
                    return
            except ProxyFailed:
                self._stop.wait(_RETRY_SECONDS)
