"""Starts of an engine server for a checkpoint: only this module knows that vLLM needs its own environment."""

from __future__ import annotations

import json
import random
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pools.config import InferencePoolConfig
from pools.engine.engines import (
    CHECK,
    CHECK_PROGRAM,
    ENGINES,
    SLICE_PROGRAM,
    engine_kwargs,
    engine_variables,
    for_text_alone,
    interpreter_arguments,
    server_arguments,
    with_last_token,
)
from pools.protocol import ServedModel
from pools.settings import ENGINE_KEY_VARIABLE
from pools.weights.layouts import inspect_checkpoint
from pools.weights.making import python_with_torch
from pools.weights.merges import locations_of, with_each_location
from pools.weights.model_files import (
    IGNORED_CONFIG_KEYS,
    ModelDigests,
    ModelFolder,
    digest_model_folder,
    inspect_staged_folder,
    read_tensors,
)
from pools.weights.staging import Staging
from resources.backends.processes import device_variables
from resources.config import ResourceConfig, TpuConfig
from resources.environments.environments import Environment
from resources.jobs import inheritance
from resources.jobs.jobs import Client, Command, JobRequest, create_environment
from resources.settings import settings
from resources.storage import storage
from resources.tracing import traces_endpoint
from resources.warm.fork_server import WarmProgram, fork_server

_ANY_NAME = {"VLLM_SKIP_MODEL_NAME_VALIDATION": "1"}
"""An engine serves many checkpoints in turn; the proxy maps names to weights."""
_OVER_HTTP = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
"""Traces use the same protocol as an evaluation's; vLLM's default is gRPC."""


@dataclass(frozen=True)
class Servable:
    """A checkpoint for a pool, at any location; `tokenizer` is a local folder with its tokenizer and config."""

    name: str
    uri: str
    digests: ModelDigests = field(repr=False)
    tokenizer: Path

    @classmethod
    def from_uri(cls, name: str, uri: str) -> Servable:
        """Returns a complete checkpoint at any location; see `from_folder`."""
        folder = inspect_checkpoint(uri)
        return cls.from_folder(name, folder, digest_model_folder(folder))

    @classmethod
    def from_folder(cls, name: str, folder: ModelFolder, digests: ModelDigests) -> Servable:
        """Returns an inspected and digested checkpoint; copies its small files, and resolves links to it."""
        uri = with_each_location(folder.uri, storage.resolved)
        return cls(name, uri, digests, staging().stage_small_files(uri, digests))

    @property
    def locations(self) -> tuple[str, ...]:
        return locations_of(self.uri)

    @property
    def described(self) -> dict[str, Any]:
        return json.loads((self.tokenizer / "config.json").read_bytes())

    @property
    def served(self) -> ServedModel:
        return ServedModel(digest=self.digests.checkpoint, uri=self.uri, **asdict(self.digests))


@dataclass(frozen=True)
class ServedCheckpoint:
    """A checkpoint in a local folder, as an engine loads it.

    `verify` raises a `CheckpointError` or a `StorageError` if its files do not match its digests any more. `elsewhere`
    has its folder on further hosts of the replica. `caches_prefixes` is False if a prefix cache would crash its engine.
    """

    name: str
    folder: Path
    files: ModelFolder = field(repr=False)
    digests: ModelDigests = field(repr=False)
    verify: Callable[[], None] = field(repr=False, compare=False)
    elsewhere: tuple[str, ...] = ()
    caches_prefixes: bool = True

    @property
    def folders(self) -> list[str]:
        return [str(self.folder), *self.elsewhere]

    @property
    def architecture(self) -> tuple[str, str]:
        """Its config's digest, and the names of its tensors: a config may not mention an output layer."""
        return self.digests.config, json.dumps(sorted(read_tensors(self.files)))

    @classmethod
    def from_folder(
        cls,
        name: str,
        folder: Path,
        digests: ModelDigests,
        *,
        verify: Callable[[], None] = lambda: None,
        elsewhere: Sequence[str] = (),
    ) -> ServedCheckpoint:
        return cls(name, folder, inspect_staged_folder(folder), digests, verify, tuple(elsewhere))


def digests_of(served: ServedModel) -> ModelDigests:
    """Returns the digests of a served checkpoint."""
    return ModelDigests(weights=served.weights, tokenizer=served.tokenizer, config=served.config)


def staging(environment: str | None = None, *, trusted: bool = False) -> Staging:
    """Returns this machine's storage for copies of checkpoints. `environment` is that of `python_with_torch`; `trusted`
    is True if code in checkpoints may run."""
    python = partial(python_with_torch, environment)
    folder, max_bytes = settings().staging_dir, settings().staging_max_bytes
    return Staging(folder, max_bytes=max_bytes, python=python, trusted=trusted)


def why_not_reload(running: ServedCheckpoint, checkpoint: ServedCheckpoint) -> str | None:
    """Returns the reason that `checkpoint` cannot be loaded into an engine that runs `running`, or None.

    An engine dies on unexpected parameters, and keeps tokenizer, template and generation defaults of the checkpoint it
    was started with.
    """
    if running.digests.tokenizer != checkpoint.digests.tokenizer:
        return "its tokenizer or chat template differs"
    if running.digests.config != checkpoint.digests.config:
        before, after = dict(running.files.config), dict(checkpoint.files.config)
        changed = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
        if set(changed) - set(IGNORED_CONFIG_KEYS) or not changed:
            return f"its config differs ({', '.join(changed) or 'generation_config.json'})"
    before, after = read_tensors(running.files), read_tensors(checkpoint.files)
    if before.keys() != after.keys():
        return f"its parameters differ ({', '.join(sorted(before.keys() ^ after.keys())[:3])})"
    for name, tensor in after.items():
        if before[name] != tensor:
            return f"its parameter {name} is {tensor}, not {before[name]}"
    return None


@dataclass(frozen=True)
class HostPart:
    """A host's part, by its `rank`, of an engine that runs on several `hosts`; host 0 has the server.

    `meeting` is the address and a free port of host 0, where the parts connect; `address` is the host's own.
    """

    rank: int
    hosts: int
    meeting: tuple[str, int]
    address: str


@dataclass(frozen=True)
class Launch:
    """A start of an engine server as data."""

    command: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str]

    def by_hand(self) -> str:
        """Returns it as a shell command, for finding out manually why it fails."""
        assigned = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(self.variables.items()))
        return f"{assigned} {shlex.join([self.command, *self.arguments])}"


class Launcher(Protocol):
    """Builds the start of a server for a checkpoint; can be sent to the process that starts it."""

    @property
    def identity(self) -> str:
        """Identity of the engine build; another build may behave differently."""
        ...

    def launch(self, checkpoint: ServedCheckpoint, *, port: int, part: HostPart | None = None) -> Launch:
        """Returns the start of a server on loopback at `port` that accepts any model name; or of a host's part."""
        ...

    def check(self, order: Path, answer: Path) -> Launch | None:
        """Returns the start of `programs/check_tensors.py`; None without such a program."""
        ...

    def warmed(self, client: Client) -> AbstractContextManager[Launcher]:
        """Yields a launcher with quick starts while the block lasts; must return immediately."""
        ...


@dataclass(frozen=True)
class VllmLauncher:
    """Starts vLLM from its environment."""

    config: InferencePoolConfig
    environment: Environment
    server: WarmProgram | None = None
    """The imported engine, forked for each start; None for cold starts."""

    @property
    def identity(self) -> str:
        return self.environment.identity

    def launch(self, checkpoint: ServedCheckpoint, *, port: int, part: HostPart | None = None) -> Launch:
        kwargs = for_text_alone({**_tracing_arguments(), **engine_kwargs(self.config)}, checkpoint.files.config)
        if not checkpoint.caches_prefixes:
            kwargs["enable_prefix_caching"] = False
        if self.config.device != "tpu":  # TPUs have no prompt log-probabilities, and compile for each length
            kwargs = with_last_token(kwargs, checkpoint.files.config)
            kwargs |= part_arguments(part) if part is not None else {}
        folder, name = str(checkpoint.folder), self.config.model.name
        served = server_arguments(kwargs, folder=folder, name=name, port=port)
        if self.config.device == "tpu" and part is not None:
            return self._launch_on_slice(served, part)
        return self._started(ENGINES[self.config.device].program, served, part)

    def check(self, order: Path, answer: Path) -> Launch | None:
        kind = (CHECK,) if self.server is not None else ()
        return self._started(CHECK_PROGRAM, (*kind, str(order), str(answer)))

    def _started(self, program: Path | None, arguments: tuple[str, ...], part: HostPart | None = None) -> Launch:
        if self.server is not None:
            command = self.server.command(*arguments)
            return Launch(command.command, command.args, self._variables(part))
        start = (*interpreter_arguments(program), *arguments)
        return Launch(str(self.environment.python), start, self._variables(part))

    def _launch_on_slice(self, served: tuple[str, ...], part: HostPart) -> Launch:
        device = self.config.resource_config.device
        assert isinstance(device, TpuConfig)
        place = (part.hosts, part.rank, *part.meeting, part.address, device.slice.chips_per_vm)
        return self._started(SLICE_PROGRAM, (*map(str, place), *(() if part.rank else served)), part)

    @contextmanager
    def warmed(self, client: Client) -> Iterator[Launcher]:
        program = ENGINES[self.config.device].program
        if program is None or self.server is not None:
            yield self
            return
        python = self.environment.python
        variables = self._variables()
        with fork_server(
            program, python=python, client=client, variables=variables, inherited=inheritance.ENGINE
        ) as server:
            yield replace(self, server=server)

    def _variables(self, part: HostPart | None = None) -> dict[str, str]:
        variables = engine_variables(
            self.config.device,
            cache=settings().engine_cache_dir / self.environment.identity,
            cpu=self.config.resource_config.cpu,
            kwargs=engine_kwargs(self.config),
        )
        if part is not None:  # none is read at import, so a fork server need not have them
            variables["ASSAY_ENGINE_HOST"] = part.address
            if self.config.device == "tpu":
                variables["TPU_MULTIHOST_BACKEND"] = "ray"
        if self.config.device == "cpu" and self.config.resource_config.hosts_per_replica > 1:
            # vLLM would bind each rank to its own cores, by NUMA nodes, of which there may be fewer than ranks.
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        return {**(self.config.model.engine_variables or {}), **variables, **_ANY_NAME, **_OVER_HTTP}


def engine_job(name: str, config: InferencePoolConfig, launch: Launch, *, key: str | None = None) -> JobRequest:
    """Returns the job of an engine, or of a host's part of it, started by its agent; a server requires `key`."""
    own = {ENGINE_KEY_VARIABLE: key} if key is not None else {}
    device = device_variables(config.resource_config.device)
    return job_of(f"engine-{name}", launch, {**device, **launch.variables, **own})


def job_of(name: str, launch: Launch, variables: Mapping[str, str]) -> JobRequest:
    """Returns the job of a program that an agent starts on its own machine."""
    return JobRequest(
        name=f"{name}-{random.randrange(16**6):06x}",
        entrypoint=Command(launch.command, launch.arguments),
        resources=ResourceConfig(),  # no device: its agent has its machine
        environment=create_environment(env_vars=variables, inherited=inheritance.ENGINE),
        max_retries_preemption=0,  # the agent decides about a restart, since the model must be proved again
    )


def environment_name(config: InferencePoolConfig) -> str:
    """Returns the pinned list of the engine that serves this pool."""
    return ENGINES[config.device].environment


def _tracing_arguments() -> dict[str, Any]:
    endpoint = traces_endpoint()
    return {} if endpoint is None or not {"@", "?"}.isdisjoint(endpoint) else {"otlp_traces_endpoint": endpoint}


def part_arguments(part: HostPart) -> dict[str, Any]:
    """Returns engine arguments of a host's part, for vLLM's executor of processes."""
    host, port = part.meeting
    arguments = {"nnodes": part.hosts, "node_rank": part.rank, "master_addr": host, "master_port": port}
    return {**arguments, "headless": True} if part.rank else arguments


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a free port of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
