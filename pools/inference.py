"""`InferencePool`: replicas of one model family behind one endpoint, for as long as a `with` block lasts."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from pydantic import SecretStr

from pools.config import InferencePoolConfig
from pools.endpoint import RunningModel
from pools.engines import engine_kwargs
from pools.launch import Launcher, ServedCheckpoint, VllmLauncher, environment_name
from pools.proxy.client import ProxyAddress, ProxyClient, proxy_command, wait_for_address
from pools.proxy.state import DesiredReplica, DesiredState, ModelCounters, ProxyLimits, ProxyStatus
from pools.replica import Loaded, Replica
from resources.config import ResourceConfig
from resources.environments import ENVIRONMENTS, ensure_environment
from resources.errors import BadInput, EngineDied, EngineStartFailed, ProxyFailed
from resources.jobs import Client, Command, JobHandle, JobRequest, create_environment, current_client
from resources.settings import ProxyKeys, settings

_WATCH_SECONDS = 0.5
_DRAIN_POLL_SECONDS = 0.01
_PROXY_START_SECONDS = 60.0


class InferencePool:
    """Engine replicas behind one proxy; leaves no process behind, whatever happens inside.

    The checkpoints it is opened for can all be asked for by name; `load` decides which one the replicas hold, and
    starts the engines at its first call. Requests for one that no replica holds are held by the proxy until one does.

    Args:
        config: what to serve, on what, and how patiently.
        checkpoints: every checkpoint that will be loaded.
        client: runs the processes; the current client when left out.
        launcher: how an engine server is started; vLLM from its pinned environment when left out.
        on_event: told in a line what the pool is doing.

    Raises:
        EnvironmentBuildFailed: the engine's environment could not be built.
        ProxyFailed: the proxy did not start; whatever had been started is ended first.
    """

    def __init__(
        self,
        config: InferencePoolConfig,
        checkpoints: Sequence[ServedCheckpoint],
        *,
        client: Client | None = None,
        launcher: Launcher | None = None,
        on_event: Callable[[str], None] = lambda line: None,
    ) -> None:
        if not checkpoints:
            raise BadInput(expected="at least one checkpoint to serve", found="none", remedy="name one")
        self.config = config
        self._checkpoints = {checkpoint.name: checkpoint for checkpoint in checkpoints}
        self._client = client or current_client()
        self._launcher = launcher
        self._on_event = on_event
        self._keys = ProxyKeys(client=SecretStr(secrets.token_urlsafe(24)), admin=SecretStr(secrets.token_urlsafe(24)))
        self._replicas: list[Replica] = []
        self._proxy: ProxyClient | None = None
        self._address: ProxyAddress | None = None
        self._proxy_job: JobHandle | None = None
        self._failure: str | None = None
        self._start_error: EngineStartFailed | None = None
        self._has_answered = False
        self._closing = threading.Event()
        self._publishing = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="pool-watch", daemon=True)

    def __enter__(self) -> InferencePool:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def base_url(self) -> str:
        """The endpoint, ending in `/v1`."""
        self._require_proxy()
        assert self._address is not None
        return self._address.base_url

    @property
    def key(self) -> str:
        """What clients send as `Authorization: Bearer`."""
        return self._keys.client.get_secret_value()

    def load(self, name: str) -> tuple[RunningModel, Loaded]:
        """Makes every replica hold one of the pool's checkpoints.

        Returns:
            What an evaluator needs to know, and how the checkpoint came into the engines (the slowest replica's way).

        Raises:
            EngineStartFailed: a replica could not be brought to it.
            ModelUnusable: its weights give no finite numbers.
            ProxyFailed: the proxy's process is gone.
        """
        self._check_proxy()
        if self._start_error is not None:
            raise self._start_error
        checkpoint = self._checkpoints[name]
        self._on_event(f"loading {name}")
        try:
            with ThreadPoolExecutor(len(self._replicas)) as threads:
                outcomes = list(threads.map(lambda replica: replica.load(checkpoint), self._replicas))
        except EngineStartFailed as error:
            if not self._has_answered:  # it never worked: the next checkpoint would meet the same
                self._start_error = error
            raise
        self._has_answered = True
        loaded = max(outcomes, key=lambda outcome: outcome.seconds)
        self._on_event(f"{name} is ready ({loaded.how}, {loaded.seconds:.1f} s)")
        return self._running_model(checkpoint), loaded

    def _running_model(self, checkpoint: ServedCheckpoint) -> RunningModel:
        return RunningModel(
            base_url=self.base_url,
            model=checkpoint.name,
            tokenizer=str(checkpoint.folder),
            capacity=sum(replica.capacity for replica in self._replicas),
            prompt_logprobs=all(replica.prompt_logprobs for replica in self._replicas),
            request_timeout_seconds=self.config.client_timeout_seconds,
            apply_chat_template=self.config.model.apply_chat_template,
            max_model_len=min((r.max_model_len for r in self._replicas if r.max_model_len), default=None),
            api_key=self.key,
        )

    @property
    def proxy_pid(self) -> int:
        """Process id of the proxy."""
        self._require_proxy()
        assert self._address is not None
        return self._address.pid

    def proxy_status(self) -> ProxyStatus:
        """Replicas with their load, requests held, and counters, as the proxy sees them now."""
        return self._require_proxy().status()

    def engine_urls(self) -> list[str]:
        """Addresses of the engines themselves, for looking at one directly."""
        return [replica.url for replica in self._replicas]

    def engine_identity(self) -> dict[str, Any]:
        """Which engine answers, with what arguments."""
        versions = {replica.engine_version for replica in self._replicas}
        return {
            "name": "vllm",
            "version": ", ".join(sorted(version for version in versions if version)),
            "device": self.config.device,
            "arguments": engine_kwargs(self.config),
        }

    def counts(self, name: str) -> dict[str, int]:
        """What the proxy counted for one checkpoint so far: answered, client_errors, server_errors, and so on."""
        return self.proxy_status().models.get(name, ModelCounters()).model_dump()

    def check(self) -> None:
        """Raises the reason if the pool cannot answer any more.

        Raises:
            EngineDied: no replica is left, and restarts are used up.
            ProxyFailed: the proxy's process is gone.
        """
        self._check_proxy()
        if self._has_answered and self._failure is not None:
            raise EngineDied(
                expected="at least one replica that answers",
                found=self._failure,
                remedy="read the engine's log above; run again, or give the replicas more memory",
            )

    def _check_proxy(self) -> None:
        if self._proxy_job is not None and self._proxy_job.status().finished:
            raise ProxyFailed(
                expected="the pool's proxy to run", found=self._proxy_job.logs(max_lines=10), remedy="run again"
            )

    def _start(self) -> None:
        if self._launcher is None:
            spec = ENVIRONMENTS[environment_name(self.config)]
            self._launcher = VllmLauncher(self.config, ensure_environment(spec, on_progress=self._on_event))
        self._start_proxy()
        self._replicas = [
            Replica(
                f"replica-{index}",
                self.config,
                launcher=self._launcher,
                client=self._client,
                served_names=tuple(self._checkpoints),
                on_change=self._publish,
                drain=self._drain,
            )
            for index in range(self.config.resource_config.replicas)
        ]
        self._publish()
        self._watcher.start()

    def _start_proxy(self) -> None:
        folder = settings().cache_dir / "pools" / secrets.token_hex(6)
        folder.mkdir(parents=True, mode=0o700)
        address_file = folder / "address.json"
        command, *arguments = proxy_command(
            address_file,
            host=self.config.proxy_host,
            port=self.config.proxy_port,
            limits=ProxyLimits(
                max_held=self.config.max_pending_requests,
                hold_timeout_seconds=self.config.proxy_timeout_seconds,
                engine_timeout_seconds=self.config.engine_timeout_seconds,
            ),
        )
        try:
            job = self._client.submit(
                JobRequest(
                    name=f"proxy-{folder.name}",
                    entrypoint=Command(command, tuple(arguments)),
                    resources=ResourceConfig(preemptible=False),
                    environment=create_environment(env_vars=self._keys.as_environment()),
                    max_retries_preemption=0,
                )
            )
            self._proxy_job = job
            self._address = wait_for_address(
                address_file, timeout_seconds=_PROXY_START_SECONDS, is_running=lambda: not job.status().finished
            )
            self._proxy = ProxyClient(self._address, admin_key=self._keys.admin.get_secret_value())
        except ProxyFailed as error:
            log = self._proxy_job.logs(max_lines=10).rstrip() if self._proxy_job else ""
            raise ProxyFailed(
                expected=error.expected,
                found=f"{error.found}. Last lines of its log:\n{log}",
                remedy="choose another proxy_port, or 0 for a free one",
            ) from error
        finally:
            address_file.unlink(missing_ok=True)
            folder.rmdir()

    def _require_proxy(self) -> ProxyClient:
        if self._proxy is None:
            raise ProxyFailed(
                expected="a pool that was entered", found="one that was not", remedy="use it in a with block"
            )
        return self._proxy

    def _publish(self) -> None:
        """Tells the proxy what is so: names, replicas, and whether all is lost."""
        if self._closing.is_set():
            return
        with self._publishing:
            dead = [replica for replica in self._replicas if replica.state == "dead"]
            if self._replicas and len(dead) == len(self._replicas):
                self._failure = "; ".join(f"{replica.name}: {replica.failure}" for replica in dead)
            else:
                self._failure = None
            self._require_proxy().set_state(
                DesiredState(
                    models={name: checkpoint.digests.checkpoint for name, checkpoint in self._checkpoints.items()},
                    replicas=tuple(_as_desired(replica) for replica in self._replicas if replica.url),
                    failed=self._failure if self._has_answered else None,
                )
            )

    def _drain(self, replica: str) -> None:
        """Waits until the proxy has nothing in flight on a replica, at most as long as one request may take."""
        deadline = time.monotonic() + self.config.engine_timeout_seconds
        while time.monotonic() < deadline and self._in_flight(replica) > 0:
            time.sleep(_DRAIN_POLL_SECONDS)

    def _in_flight(self, replica: str) -> int:
        return sum(seen.in_flight for seen in self.proxy_status().replicas if seen.name == replica)

    def _watch(self) -> None:
        """Revives replicas whose engine died, each in turn, until the pool closes."""
        while not self._closing.wait(_WATCH_SECONDS):
            for replica in self._replicas:
                if not self._closing.is_set():
                    replica.revive_if_dead()

    def close(self) -> None:
        """Ends every process of the pool; safe to call twice."""
        self._closing.set()
        with ThreadPoolExecutor(len(self._replicas) + 1) as threads:
            for replica in self._replicas:
                threads.submit(replica.stop)
            if self._proxy_job is not None:
                threads.submit(self._proxy_job.terminate)
        if self._watcher.is_alive():
            self._watcher.join()


def _as_desired(replica: Replica) -> DesiredReplica:
    return DesiredReplica(
        name=replica.name,
        url=replica.url,
        digest=replica.checkpoint.digests.checkpoint if replica.checkpoint else None,
        capacity=replica.capacity,
        state=replica.state,
    )
