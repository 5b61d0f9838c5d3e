"""The agent of a replica's host other than host 0: follows host 0's orders, and ends when host 0 is gone."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from pools.config import InferencePoolConfig
from pools.engine.launch import HostPart, Launcher, ServedCheckpoint, digests_of, engine_job, environment_name, staging
from pools.protocol import Failure, ServedModel
from pools.proxy.client import ProxyAddress, ProxyClient
from pools.replica.gang import HostOrders, HostState, leave
from pools.replica.loading import excerpt, whole_log
from pools.weights.staging import StagedFolder
from resources.errors import AssayError, ProxyFailed
from resources.jobs.addresses import own_address
from resources.jobs.jobs import Client, JobHandle

_RETRY_SECONDS = 0.25
_ANSWER_SECONDS = 5.0
_KEPT_CHECKPOINTS = 2  # the loaded checkpoint and its predecessor, to which a failed load returns

_UNHEARD = (OSError, ValidationError, ProxyFailed)
_log = logging.getLogger("assay.agent")


class Follower:
    """A host of a replica other than host 0; the proxy at `address` gives the address of host 0."""

    def __init__(
        self,
        name: str,
        config: InferencePoolConfig,
        *,
        rank: int,
        launcher: Launcher,
        client: Client,
        address: ProxyAddress,
        token: str,
        start: int,
    ) -> None:
        self._name, self._config, self._rank = name, config, rank
        self._launcher, self._client = launcher, client
        self._proxy = ProxyClient(address, key=token)
        self._token = token
        self._state = HostState(instance=secrets.token_hex(6), start=start)
        self._orders = HostOrders()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._staging = staging(environment_name(config), trusted=config.model.trusts_code)
        self._staged: dict[str, StagedFolder] = {}
        self._job: JobHandle | None = None
        self._door: str | None = None
        self._here = ""
        self._saying = threading.RLock()

    def run(self) -> None:
        """Follows host 0 until it orders an end; ends the process if host 0 is silent for too long."""
        worker = threading.Thread(target=self._work, name="follow", daemon=True)
        worker.start()
        last_heard, patience_seconds = time.monotonic(), self._config.startup_timeout_seconds
        try:
            while not self._stopping.is_set():
                try:
                    orders = self._asked(seen=self._orders.version)
                except _UNHEARD as error:
                    if time.monotonic() - last_heard > patience_seconds:
                        return leave(f"host 0 has not been heard of for {patience_seconds:g} s: {error}")
                    self._stopping.wait(_RETRY_SECONDS)
                    continue
                last_heard, patience_seconds = time.monotonic(), self._config.lease_seconds
                if orders.stop:
                    _log.info("told to stop")
                    return
                with self._changed:
                    self._orders = orders
                    self._changed.notify_all()
        finally:
            self._stopping.set()
            with self._changed:
                self._changed.notify_all()
            self._staging.close()
            worker.join()
            self._end_part()

    def _asked(self, *, seen: int = -1) -> HostOrders:
        door = self._door or self._proxy.announced(self._name, join_token=self._token).door
        place = urlsplit(door or "")
        if not place.hostname:
            raise ConnectionError(f"the proxy knows no host 0 of {self._name} yet")
        self._here = own_address((place.hostname, place.port or 0))
        with self._saying:
            self._say(sequence=self._state.sequence + 1, seen=seen)
            body = self._looked_at().model_dump_json()
        host_0 = ProxyAddress(host=place.hostname, port=place.port or 0)
        client = ProxyClient(host_0, key=self._token, timeout_seconds=_ANSWER_SECONDS)
        answer = client.ask_for("POST", f"/hosts/{self._rank}", body=body)
        self._door = door
        return HostOrders.model_validate_json(answer)

    def _looked_at(self) -> HostState:
        job, state = self._job, self._state
        if job is not None and state.part and not state.ended and job.status().finished and self._job is job:
            state = self._state = state.model_copy(update={"ended": True, "log": excerpt(whole_log(job))})
        return state

    def _say(self, **fields: object) -> None:
        with self._saying:
            self._state = self._state.model_copy(update=fields)

    def _say_at_once(self, **fields: object) -> None:
        self._say(**fields)
        with suppress(*_UNHEARD):
            self._asked()

    def _work(self) -> None:
        seen = HostOrders()
        while True:
            with self._changed:
                self._changed.wait_for(lambda seen=seen: self._stopping.is_set() or self._orders != seen)
                if self._stopping.is_set():
                    return
                seen = orders = self._orders
            if orders.next is not None:
                self._staging.prefetch(orders.next.uri, digests_of(orders.next))
            if orders.part != self._state.part:
                self._end_part()
            if orders.check != self._state.checked and orders.served is not None:
                self._check(orders.check, orders.served)
            if orders.part != self._state.part and self._state.failure is None:
                self._start_part(orders)

    def _check(self, number: int, served: ServedModel) -> None:
        try:
            staged = self._staged.pop(served.digest, None)
            if staged is None:
                staged = self._staging.stage(served.uri, digests_of(served))
            self._staged[served.digest] = staged
            staged.verify()
            while len(self._staged) > _KEPT_CHECKPOINTS:
                self._staged.pop(next(iter(self._staged))).release()
            self._say_at_once(checked=number, folder=str(staged.path), failure=None)
        except AssayError as error:
            _log.error("%s is not to be had here: %s", served.uri, error)
            self._say_at_once(checked=number, folder="", failure=Failure(**error.as_values()))

    def _start_part(self, orders: HostOrders) -> None:
        assert orders.meeting is not None and orders.served is not None
        hosts = self._config.resource_config.hosts_per_replica
        part = HostPart(self._rank, hosts, orders.meeting, self._here)
        folder = Path(self._state.folder)
        checkpoint = ServedCheckpoint.from_folder(self._name, folder, digests_of(orders.served))
        launch = self._launcher.launch(checkpoint, port=0, part=part)
        self._job = self._client.submit(engine_job(f"{self._name}-host-{self._rank}", self._config, launch))
        self._say_at_once(part=orders.part, ended=False, log="")

    def _end_part(self) -> None:
        if self._job is not None:
            with suppress(AssayError):
                self._job.terminate()
            self._job = None
            self._say_at_once(part=0, ended=False, log="")
