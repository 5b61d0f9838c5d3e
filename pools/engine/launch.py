"""Starts of an engine server for a checkpoint: the one place that knows vLLM needs an environment of its own."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from pools.config import InferencePoolConfig
from pools.engine.engines import (
    ENGINES,
    engine_arguments,
    engine_kwargs,
    engine_variables,
    hand_command,
    server_arguments,
    with_last_token,
)
from pools.protocol import ServedModel
from pools.weights.model_files import (
    ModelDigests,
    ModelFolder,
    Tensor,
    digest_model_folder,
    inspect_model_folder,
    read_tensors,
)
from pools.weights.shared_tensors import tensor_in_common
from pools.weights.staging import Staging
from resources.environments.environments import Environment
from resources.jobs import inheritance
from resources.jobs.jobs import Client
from resources.settings import settings
from resources.storage import storage
from resources.warm.fork_server import ForkServer, WarmProgram

_ANY_NAME = {"VLLM_SKIP_MODEL_NAME_VALIDATION": "1"}
"""One engine answers for checkpoint after checkpoint; which names mean which weights is the proxy's to say."""
_SAME_WHATEVER_THEY_SAY = ("_name_or_path", "transformers_version")


@dataclass(frozen=True)
class Servable:
    """A checkpoint that a pool may be asked for, wherever it lies, under the name that requests use for it.

    `tokenizer` is a folder of this machine that holds its tokenizer and config.
    """

    name: str
    uri: str
    digests: ModelDigests = field(repr=False)
    tokenizer: Path

    @classmethod
    def from_uri(cls, name: str, uri: str) -> Servable:
        """A complete checkpoint at any location; see `from_folder`.

        Raises:
            IncompleteCheckpoint: it is not complete.
        """
        folder = inspect_model_folder(uri)
        return cls.from_folder(name, folder, digest_model_folder(folder))

    @classmethod
    def from_folder(cls, name: str, folder: ModelFolder, digests: ModelDigests) -> Servable:
        """A checkpoint that was inspected and digested; its small files are copied, and links to it are resolved.

        Raises:
            StorageError: they could not be copied.
        """
        uri = storage.resolved(folder.uri)
        return cls(name, uri, digests, staging().stage_small_files(uri, digests))

    @property
    def described(self) -> dict[str, Any]:
        """Its config.json."""
        return json.loads((self.tokenizer / "config.json").read_bytes())

    @property
    def served(self) -> ServedModel:
        """Its description for the proxy and its replicas."""
        digests = self.digests
        return ServedModel(
            digest=digests.checkpoint,
            weights=digests.weights,
            tokenizer=digests.tokenizer,
            config=digests.config,
            uri=self.uri,
        )


@dataclass(frozen=True)
class ServedCheckpoint:
    """A checkpoint in a local folder, as an engine loads it.

    `verify` passes if the files in it are still those of its digests, and raises a `CheckpointError` or a
    `StorageError` otherwise.
    """

    name: str
    folder: Path
    files: ModelFolder = field(repr=False)
    digests: ModelDigests = field(repr=False)
    verify: Callable[[], None] = field(repr=False, compare=False)

    @property
    def architecture(self) -> tuple[str, str]:
        """Its config's digest, and the names of its tensors: a config may be silent about an output layer."""
        return self.digests.config, json.dumps(sorted(read_tensors(self.files)))

    @classmethod
    def from_folder(
        cls, name: str, folder: Path, digests: ModelDigests, *, verify: Callable[[], None] = lambda: None
    ) -> ServedCheckpoint:
        """A checkpoint that was staged into a folder of this machine."""
        return cls(name, folder, inspect_model_folder(str(folder)), digests, verify)


def digests_of(served: ServedModel) -> ModelDigests:
    """The digests of a checkpoint that somebody else has planned."""
    return ModelDigests(weights=served.weights, tokenizer=served.tokenizer, config=served.config)


def staging() -> Staging:
    """The place of this machine where checkpoints from object stores are copied to."""
    return Staging(settings().staging_dir, max_bytes=settings().staging_max_bytes)


def why_not_reload(running: ServedCheckpoint, wanted: ServedCheckpoint) -> str | None:
    """Returns the reason that `wanted` cannot be loaded into an engine that runs `running`; None if it can be.

    An engine dies on parameters it does not expect, and keeps tokenizer, template and generation defaults of the
    checkpoint it was started with.
    """
    if running.digests.tokenizer != wanted.digests.tokenizer:
        return "its tokenizer or chat template differs"
    if running.digests.config != wanted.digests.config:
        before, after = dict(running.files.config), dict(wanted.files.config)
        changed = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
        if set(changed) - set(_SAME_WHATEVER_THEY_SAY) or not changed:
            return f"its config differs ({', '.join(changed) or 'generation_config.json'})"
    before, after = read_tensors(running.files), read_tensors(wanted.files)
    if before.keys() != after.keys():
        return f"its parameters differ ({', '.join(sorted(before.keys() ^ after.keys())[:3])})"
    for name, tensor in after.items():
        if before[name] != tensor:
            return f"its parameter {name} is {_shown(tensor)}, not {_shown(before[name])}"
    return None


def why_unprovable(running: ServedCheckpoint, wanted: ServedCheckpoint) -> str | None:
    """Returns the reason that comparing a reload of `wanted` with a cold start would prove nothing; None if it might.

    A tensor that is the same in both could stay behind unnoticed.
    """
    same = tensor_in_common(running.files, wanted.files)
    return f"{same} is the same in both checkpoints" if same else None


def _shown(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


@dataclass(frozen=True)
class Launch:
    """A start of an engine server as data."""

    command: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str]

    def by_hand(self) -> str:
        """The start as a line for a shell."""
        return hand_command(self.command, self.arguments, self.variables)


class Launcher(Protocol):
    """Knows how to start a server for a checkpoint; can be sent to the process that does it."""

    @property
    def identity(self) -> str:
        """Names the build of the engine; another build may behave differently."""
        ...

    def launch(self, checkpoint: ServedCheckpoint, *, port: int) -> Launch:
        """The start of a server on loopback at `port` that answers to any model name."""
        ...

    def warmed(self, client: Client) -> AbstractContextManager[Launcher]:
        """A launcher whose starts are quick, for as long as the block lasts; must not take time itself."""
        ...


@dataclass(frozen=True)
class VllmLauncher:
    """Starts vLLM from an environment that holds it."""

    config: InferencePoolConfig
    environment: Environment
    server: WarmProgram | None = None
    """The engine, imported: it is started in a fork of that; it starts cold when None."""

    @property
    def identity(self) -> str:
        """See `Launcher.identity`."""
        return self.environment.identity

    def launch(self, checkpoint: ServedCheckpoint, *, port: int) -> Launch:
        """See `Launcher.launch`."""
        kwargs = engine_kwargs(self.config)
        if self.config.device != "tpu":  # has no log-probabilities of prompts, and compiles for each length
            kwargs = with_last_token(kwargs, checkpoint.files.config)
        # Answers carry this name, whichever checkpoint they are from: the proxy passes them on byte for byte.
        folder, names = str(checkpoint.folder), (self.config.model.name,)
        if self.server is not None:
            arguments = server_arguments(kwargs, folder=folder, served_names=names, host="127.0.0.1", port=port)
            command = self.server.command(*arguments)
            return Launch(command.command, command.args, self._variables())
        program = ENGINES[self.config.device].program
        arguments = engine_arguments(
            kwargs, folder=folder, served_names=names, host="127.0.0.1", port=port, program=program
        )
        return Launch(str(self.environment.python), arguments, self._variables())

    @contextmanager
    def warmed(self, client: Client) -> Iterator[Launcher]:
        """See `Launcher.warmed`."""
        program = ENGINES[self.config.device].program
        if program is None or self.server is not None:
            yield self
            return
        python = self.environment.python
        variables = self._variables()
        with ForkServer(
            program, python=python, client=client, variables=variables, inherited=inheritance.ENGINE
        ) as server:
            yield replace(self, server=server.warm)

    def _variables(self) -> dict[str, str]:
        variables = engine_variables(
            self.config.device,
            cache=settings().engine_cache_dir / self.environment.identity,
            cpu=self.config.resource_config.cpu,
            offline=True,  # the checkpoint is a local folder: there is nothing to ask a hub for
            kwargs=engine_kwargs(self.config),
        )
        return {**(self.config.model.engine_variables or {}), **variables, **_ANY_NAME}


def environment_name(config: InferencePoolConfig) -> str:
    """The pinned list of the engine that serves this pool."""
    return ENGINES[config.device].environment


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
