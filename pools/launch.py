"""How an engine server is started for a checkpoint: the one place that knows vLLM needs an environment of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pools.config import InferencePoolConfig
from pools.engines import ENGINES, engine_arguments, engine_kwargs, engine_variables, hand_command
from pools.model_files import (
    ModelDigests,
    ModelFolder,
    Tensor,
    digest_model_folder,
    inspect_model_folder,
    read_tensors,
)
from resources import storage
from resources.environments import Environment
from resources.settings import settings

_SAME_WHATEVER_THEY_SAY = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


@dataclass(frozen=True)
class ServedCheckpoint:
    """A checkpoint in a local folder, under the name that requests use for it."""

    name: str
    folder: Path
    files: ModelFolder = field(repr=False)
    digests: ModelDigests = field(repr=False)

    @classmethod
    def from_uri(cls, name: str, uri: str) -> ServedCheckpoint:
        """A complete checkpoint at any location; see `from_folder`.

        Raises:
            IncompleteCheckpoint: it is not complete.
        """
        folder = inspect_model_folder(uri)
        return cls.from_folder(name, folder, digest_model_folder(folder))

    @classmethod
    def from_folder(cls, name: str, folder: ModelFolder, digests: ModelDigests) -> ServedCheckpoint:
        """A checkpoint that was inspected and digested; one in an object store is copied to this machine first.

        Raises:
            StorageError: it could not be copied.
        """
        if storage.is_local(folder.uri):
            return cls(name, storage.local_path(folder.uri).absolute(), folder, digests)
        copy = settings().staging_dir / digests.checkpoint
        if not copy.is_dir():
            storage.copy_to_local(folder.uri, copy)
        return cls(name, copy, inspect_model_folder(str(copy)), digests)


def why_not_reload(running: ServedCheckpoint, wanted: ServedCheckpoint) -> str | None:
    """Why `wanted` cannot be loaded into an engine that runs `running`; None if it can.

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


def _shown(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


@dataclass(frozen=True)
class Launch:
    """A start of an engine server as data."""

    command: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str]

    def by_hand(self) -> str:
        """The same start as a line for a shell."""
        return hand_command(self.command, self.arguments, self.variables)


class Launcher(Protocol):
    """Knows how to start a server for a checkpoint."""

    @property
    def identity(self) -> str:
        """Names the build of the engine; another build may behave differently."""
        ...

    def launch(self, checkpoint: ServedCheckpoint, *, served_names: Sequence[str], port: int) -> Launch:
        """The start of a server on loopback at `port` that answers to every one of `served_names`."""
        ...


@dataclass(frozen=True)
class VllmLauncher:
    """Starts vLLM from an environment that holds it."""

    config: InferencePoolConfig
    environment: Environment

    @property
    def identity(self) -> str:
        """See `Launcher.identity`."""
        return self.environment.identity

    def launch(self, checkpoint: ServedCheckpoint, *, served_names: Sequence[str], port: int) -> Launch:
        """See `Launcher.launch`."""
        device = self.config.device
        arguments = engine_arguments(
            engine_kwargs(self.config),
            folder=str(checkpoint.folder),
            served_names=served_names,
            host="127.0.0.1",
            port=port,
        )
        variables = engine_variables(
            device,
            cache=settings().engine_cache_dir / self.environment.identity,
            cpu=self.config.resource_config.cpu,
            offline=True,  # the checkpoint is a local folder: there is nothing to ask a hub for
        )
        return Launch(str(self.environment.python), arguments, variables)


def environment_name(config: InferencePoolConfig) -> str:
    """The pinned list of the engine that serves this pool."""
    return ENGINES[config.device].environment
