"""The sinks there are, and the base of their configurations. Keys and passwords never stand here.

A sink is a module with `CONFIG`, its kind of configuration, and `send`, which sends an announcement and returns the
place where it can be seen. It is imported when a configuration with sinks is first read, or by the process that sends.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, model_validator

from resources.config import AnyOfInForms, Config
from resources.errors import BadInput
from tasks.spec.registered import OneOfTheRegistered

SINKS: dict[str, str] = {
    "object_store": "tasks.sinks.object_store",
    "wandb": "tasks.sinks.weights_and_biases",
    "mlflow": "tasks.sinks.mlflow_runs",
    "hugging_face": "tasks.sinks.hugging_face",
}
"""The module of each sink, by the kind that its configuration names."""

_KEY_FIELD = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_KEY_VALUE = re.compile(
    r"://[^/@\s]+@"  # user:password@ in an address
    r"|[?&][\w.-]*(?:key|token|secret|sig|signature|password)="
    r"|^[0-9a-f]{40}$|^wandb_v\d|^hf_\w{20}|^sk-\w{8}|^AIza|^ya29\.|-----BEGIN",
    re.IGNORECASE,
)
_REMEDY = (
    "take it out, and change the key if the file was shared: keys are read from the environment, "
    "or from the Prefect block that a field ending in _block names"
)


@dataclass(frozen=True)
class Access:
    """Keys and places from outside the configuration."""

    variables: dict[str, str] = field(default_factory=dict)
    """Variables for the environment of the process that sends."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the sink's `send`, as JSON has them."""
    secrets: tuple[str, ...] = ()
    """Texts in the arguments that are kept out of what is written."""


class SinkConfig(Config):
    """Configuration of a sink, which holds no key. A kind adds `kind: Literal[...]`, its tag, and its options."""

    secret_variables: ClassVar[tuple[str, ...]] = ()
    """Variables of the environment that hold keys of this sink; their values are kept out of what is written."""
    variables: ClassVar[tuple[str, ...]] = ()
    """Further variables that the process which sends inherits; a name may hold `*`."""
    client_lasts: ClassVar[bool] = False
    """Tells that a process which has sent a record sends the next as well as a new one would."""
    takes_alerts: ClassVar[bool] = False
    """Tells that it has curves, and says beside them what left them."""

    timeout_seconds: float = Field(default=120.0, gt=0)
    """Time limit of one record; after it the sink has failed for this record."""
    kind: Any
    """The sink's kind, as its registry has it; each configuration has a Literal of its own."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in records."""

    @property
    def shown_by(self) -> str | None:
        """Command, or address, that shows people what it has; None where its records say."""
        return None

    def access(self) -> Access:
        """Return what `send` needs beside the configuration; called where Prefect's blocks can be loaded."""
        return Access()

    def check(self) -> None:
        """Pass if the place can take records, as far as that can be told before there are any."""

    @model_validator(mode="before")
    @classmethod
    def _holds_no_key(cls, values: Any) -> Any:
        # Not a ValueError: pydantic would print the value beside it.
        if not isinstance(values, dict):
            return values
        for name, value in values.items():
            if str(name) not in cls.model_fields and _KEY_FIELD.search(str(name)):
                raise BadInput(expected=f"a {cls.__name__} without keys", found=f"the field {name}", remedy=_REMEDY)
            if any(_KEY_VALUE.search(text) for text in _texts(value)):
                found = f"what looks like a key or a password in {name}"
                raise BadInput(expected=f"a {cls.__name__} without keys", found=found, remedy=_REMEDY)
        return values


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        # A tag called api_key is as good as a field of that name, whatever its value looks like; and a commit looks
        # like a key.
        parts = [(f"?{key}=", [] if str(key).endswith("git_sha") else _texts(item)) for key, item in value.items()]
        return [text for key, texts in parts for text in (key, *texts)]
    return [text for item in value for text in _texts(item)] if isinstance(value, list | tuple) else []


def web_address(address: str) -> str:
    """Return an address of a server without a slash at its end; a ValueError where it is none."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", address):
        raise ValueError(f"expected an address that begins with http:// or https://, found {address!r}")
    return address.rstrip("/")


def sink_kinds() -> tuple[type[SinkConfig], ...]:
    """Return the configuration of each registered sink."""
    return tuple(import_module(module).CONFIG for module in SINKS.values())


Sink = Annotated[SinkConfig, OneOfTheRegistered(sink_kinds, tag="kind"), AnyOfInForms()]
"""A place where results are announced; `kind` tells them apart."""


def _distinct(sinks: tuple[Sink, ...]) -> tuple[Sink, ...]:
    names = [sink.name for sink in sinks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"expected each sink once, found twice: {', '.join(twice)}")
    return sinks


Sinks = Annotated[tuple[Sink, ...], AfterValidator(_distinct)]
"""Sinks, no two of them the same place."""
