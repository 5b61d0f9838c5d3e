"""The sinks and their options. Keys and passwords never stand here."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from resources.config import AnyOfInForms, Config
from resources.errors import BadInput
from resources.storage import storage

_KEY_FIELD = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_KEY_VALUE = re.compile(
    r"://[^/@\s]+@"  # user:password@ in an address
    r"|[?&][\w.-]*(?:key|token|secret|sig|signature|password)="
    r"|^[0-9a-f]{40}$|^wandb_v\d|^hf_\w{20}|^sk-\w{8}|^AIza|^ya29\.|-----BEGIN",
    re.IGNORECASE,
)
_PROJECT = re.compile(r"[^/\\#?%:]{1,128}")
_REMEDY = (
    "take it out, and change the key if the file was shared: keys are read from the environment, "
    "or from the Prefect block that a field ending in _block names"
)


class _SinkConfig(Config):
    """A sink's configuration, which holds no key."""

    timeout_seconds: float = Field(default=120.0, gt=0)
    """Wall clock of one record; after it the sink counts as failed for this record."""

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
        # A tag called api_key is as good as a field of that name, whatever its value looks like.
        return [text for key, item in value.items() for text in (*_texts(item), f"?{key}=")]
    return [text for item in value for text in _texts(item)] if isinstance(value, list | tuple) else []


class ObjectStoreSink(_SinkConfig):
    """The tree of records, copied to an object store or any other place that fsspec can write."""

    kind: Literal["object_store"] = "object_store"
    """Says that this sink is an object store."""
    url: str | None = None
    """Folder that gets the tree, such as gs://bucket/evaluations; signed in to as the machine is."""
    block: str | None = None
    """Name of a Prefect block of type GCS Bucket, in place of url: its folder, and its credentials."""
    harness_output: bool = True
    """Copy the harness's own output too, which holds questions and answers."""
    timeout_seconds: float = Field(default=900.0, gt=0)
    """Wall clock of one record; what arrived by then is not sent again."""

    @model_validator(mode="after")
    def _one_place(self) -> ObjectStoreSink:
        if (self.url is None) == (self.block is None):
            raise ValueError("expected either url or block, found " + ("both" if self.url else "neither"))
        return self

    @property
    def name(self) -> str:
        """Its name in records."""
        return f"object_store:{self.url.rstrip('/') if self.url else f'block {self.block}'}"


class WeightsAndBiasesSink(_SinkConfig):
    """A run in Weights & Biases for each training run, over its training steps. The key is in WANDB_API_KEY."""

    kind: Literal["wandb"] = "wandb"
    """Says that this sink is Weights & Biases."""
    project: str
    """The project, which is made if it is not there."""
    entity: str | None = None
    """The team or user that the project belongs to; the key's own when unset."""
    base_url: str | None = None
    """Address of a server of one's own; WANDB_BASE_URL, or else the public one, when unset."""
    mode: Literal["online", "offline"] = "online"
    """Send to the server, or write files for `wandb sync`."""
    folder: str | None = None
    """Local folder for offline files; `wandb` beside the report when unset."""
    tags: tuple[str, ...] = ()
    """Tags of the run, beside those of the records."""
    max_samples: int = Field(default=50, ge=0)
    """Questions with answers that go into the table of a checkpoint; none with 0."""
    api_key_block: str | None = None
    """Name of a Prefect Secret block with the key, in place of WANDB_API_KEY."""

    @field_validator("project", "entity")
    @classmethod
    def _can_be_in_an_address(cls, name: str | None) -> str | None:
        if name is not None and not (_PROJECT.fullmatch(name) and name.strip() == name):
            raise ValueError(f"expected 1 to 128 characters, none of them / \\ # ? % :, found {name!r}")
        return name

    @field_validator("base_url")
    @classmethod
    def _is_web_address(cls, address: str | None) -> str | None:
        return _web_address(address) if address is not None else None

    @field_validator("folder")
    @classmethod
    def _is_local(cls, folder: str | None) -> str | None:
        if folder is not None and not storage.is_local(folder):
            raise ValueError(f"expected a local folder, found {folder!r}")
        return folder

    @property
    def name(self) -> str:
        """Its name in records."""
        where = f"{self.entity}/{self.project}" if self.entity else self.project
        return f"wandb:{where}" + (" offline" if self.mode == "offline" else "")


class MlflowSink(_SinkConfig):
    """A run in MLflow for each training run. User name, password or token are in MLflow's own variables."""

    kind: Literal["mlflow"] = "mlflow"
    """Says that this sink is MLflow."""
    tracking_uri: str
    """Address of the tracking server, such as http://10.0.0.15:5000."""
    experiment: str
    """The experiment, which is made if it is not there."""
    tags: dict[str, str] = {}
    """Tags of the run, beside Assay's own."""
    harness_output: bool = True
    """Send the harness's own output as artifacts too, which holds questions and answers."""
    username: str | None = None
    """User name, in place of MLFLOW_TRACKING_USERNAME."""
    password_block: str | None = None
    """Name of a Prefect Secret block, in place of MLFLOW_TRACKING_PASSWORD."""
    token_block: str | None = None
    """Name of a Prefect Secret block, in place of MLFLOW_TRACKING_TOKEN."""

    @field_validator("tracking_uri")
    @classmethod
    def _is_web_address(cls, address: str) -> str:
        return _web_address(address)

    @field_validator("experiment")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not name.strip() or name.strip() != name or len(name) > 500:
            raise ValueError(f"expected 1 to 500 characters without space around them, found {name!r}")
        return name

    @property
    def name(self) -> str:
        """Its name in records."""
        return f"mlflow:{self.tracking_uri.rstrip('/')} {self.experiment}"


class HuggingFaceSink(_SinkConfig):
    """The results as metadata of a model card, one card for each checkpoint. Nothing is uploaded."""

    kind: Literal["hugging_face"] = "hugging_face"
    """Says that this sink is a model card."""
    path: str | None = None
    """Folder that gets `<run>/step-<N>/README.md`; the folder of the records when unset."""
    task_type: str = "text-generation"
    """The hub's name for what the model does."""

    @property
    def name(self) -> str:
        """Its name in records."""
        return f"hugging_face:{self.path.rstrip('/') if self.path else 'beside the records'}"


def _web_address(address: str) -> str:
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", address):
        raise ValueError(f"expected an address that begins with http:// or https://, found {address!r}")
    return address.rstrip("/")


Sink = Annotated[
    ObjectStoreSink | WeightsAndBiasesSink | MlflowSink | HuggingFaceSink, Field(discriminator="kind"), AnyOfInForms()
]
"""A place where results are announced; `kind` tells them apart."""


def _distinct(sinks: tuple[Sink, ...]) -> tuple[Sink, ...]:
    names = [sink.name for sink in sinks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"expected each sink once, found twice: {', '.join(twice)}")
    return sinks


Sinks = Annotated[tuple[Sink, ...], AfterValidator(_distinct)]
"""Some sinks, no two of them the same place."""
