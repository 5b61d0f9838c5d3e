"""Registry of sinks, and the base class of their configurations, which never contain keys or passwords. A sink is a
module with `CONFIG`, its configuration class, and `send`, which sends an announcement and returns its address at the
sink. It is imported when a configuration with sinks is first read, or by the sender process."""

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
"""The module of each sink, by `kind` in its configuration."""

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
    """Keys and addresses from outside the configuration."""

    variables: dict[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of the sender process; in `credentials_of` its whole environment."""
    arguments: dict[str, Any] = field(default_factory=dict, repr=False)
    """Further arguments of the sink's `send`, as JSON."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Texts that must not occur in outputs."""


class SinkConfig(Config):
    """Configuration of a sink, without keys. Subclasses add `kind: Literal[...]` as tag, and options."""

    secret_variables: ClassVar[tuple[str, ...]] = ()
    """Environment variables with keys of this sink; their values are removed from outputs."""
    variables: ClassVar[tuple[str, ...]] = ()
    """Further variables that the sender process inherits; a name may contain `*`."""
    client_lasts: ClassVar[bool] = False
    """True if a sender process can be reused for the next record."""
    takes_alerts: ClassVar[bool] = False
    """True if it has curves and shows alerts on them."""

    timeout_seconds: float = Field(default=120.0, gt=0)
    """Time limit of a record, after which it is marked failed at this sink."""
    kind: Any
    """The sink's kind in the registry; a Literal in each subclass."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Returns its name in records."""

    @property
    def shown_by(self) -> str | None:
        """Command or address that displays its content; None if the records have the address."""
        return None

    def access(self) -> Access:
        """Returns the inputs of `send` beyond the configuration; called where Prefect's blocks can be loaded."""
        return Access()

    def check(self) -> None:
        """Raises an error if the sink cannot accept records, as far as can be checked in advance."""

    @model_validator(mode="before")
    @classmethod
    def _holds_no_key(cls, values: Any) -> Any:
        # Not a ValueError: pydantic would print the value with it.
        if not isinstance(values, dict):
            return values
        for name, value in values.items():
            if str(name) not in cls.model_fields and _KEY_FIELD.search(str(name)):
                raise BadInput(expected=f"a {cls.__name__} without keys", found=f"the field {name}", remedy=_REMEDY)
            if any(_KEY_VALUE.search(text) for text in _texts(value)):
                problem = f"a text that looks like a key or a password in {name}"
                raise BadInput(expected=f"a {cls.__name__} without keys", found=problem, remedy=_REMEDY)
        return values


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        # Keys count too: a tag called api_key is treated as a field of that name, regardless of its value;
        # commits look like keys and are exempt.
        parts = [(f"?{key}=", [] if str(key).endswith("git_sha") else _texts(item)) for key, item in value.items()]
        return [text for key, texts in parts for text in (key, *texts)]
    return [text for item in value for text in _texts(item)] if isinstance(value, list | tuple) else []


def web_address(address: str) -> str:
    """Returns a server's address without a trailing slash. Raises ValueError if it is no http or https address."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", address):
        raise ValueError(f"expected an address that begins with http:// or https://, found {address!r}")
    return address.rstrip("/")


def sink_kinds() -> tuple[type[SinkConfig], ...]:
    """Returns the configuration class of each registered sink."""
    return tuple(import_module(module).CONFIG for module in SINKS.values())


Sink = Annotated[SinkConfig, OneOfTheRegistered(sink_kinds, tag="kind"), AnyOfInForms()]
"""A destination of results, discriminated by `kind`."""


def _distinct(sinks: tuple[Sink, ...]) -> tuple[Sink, ...]:
    names = [sink.name for sink in sinks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"expected each sink once, found twice: {', '.join(twice)}")
    return sinks


Sinks = Annotated[tuple[Sink, ...], AfterValidator(_distinct)]
"""Sinks with distinct names."""
