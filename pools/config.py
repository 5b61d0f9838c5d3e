"""Serving of a model: `ModelConfig` and `InferencePoolConfig`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, Field, field_validator, model_validator

from resources.config import Config, JsonObject, ResourceConfig, infer_device_from_resource_config
from resources.jobs.inheritance import ENGINE_SETTINGS, NO_ENGINE_SETTINGS
from resources.storage import storage
from resources.storage.tree_signature import list_tree

EngineDevice = Literal["cpu", "cuda", "tpu"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]*")
ENGINE_GENERATION_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_new_tokens",
)
"""Sampling parameters for which vLLM keeps a server-wide default."""
REQUEST_GENERATION_PARAMS = ("stop_token_ids",)
"""Sampling parameters without a server-wide default: evaluators with sampling settings put them into each request."""

_NAMES_FILES = {
    *("generation_config", "hf_config_path", "tokenizer", "speculative_config"),
    *("lora_modules", "tool_parser_plugin", "reasoning_parser_plugin"),
}
"""Engine arguments in which text without a slash may be a file."""


def is_setting(name: str) -> bool:
    """Returns True if an environment variable can change an engine's answers."""
    return fnmatchcase(name, ENGINE_SETTINGS) and not any(fnmatchcase(name, other) for other in NO_ENGINE_SETTINGS)


def check_name(name: str) -> str:
    """Returns the name if it may become part of a path or a URL."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"expected a name of letters, digits and . _ + = @ - that starts with a letter or digit, found {name!r}"
        )
    return name


Name = Annotated[str, AfterValidator(check_name)]
"""A name that may become part of a path or a URL."""


def is_address(pool: str) -> bool:
    """Returns True if a pool is given by its address, not by its name."""
    return "://" in pool


def _named_files(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _named_files(part)
    elif isinstance(value, str):
        try:
            if isinstance(inner := json.loads(value), dict | list):
                return (yield from _named_files(inner))
        except (ValueError, RecursionError):
            pass
        yield from {text.removeprefix("file://") for text in (value, value.partition("=")[2]) if text}


def _state_of(path: str) -> str | None:
    return list_tree(path).signature if storage.is_folder(path) else storage.content_digest(path)


class ModelConfig(Config):
    """A model, or every checkpoint of a run, as an engine serves it."""

    name: Name
    """Name that requests use; for the checkpoints of a run, the prefix of their names."""
    path: str | None = None
    """Folder in Hugging Face layout, or a run that holds such folders; local or gs://, s3://."""
    device: Literal["auto", "cpu", "cuda", "tpu"] = "auto"
    """Engine family; "auto" follows the device of the resources."""
    engine_kwargs: JsonObject = {}
    """Engine arguments as vLLM names them, such as max_model_len; true becomes a flag without a value."""
    engine_variables: dict[str, str] | None = None
    """VLLM_* variables of the engine that can change an answer; defaults to those of the planning process."""
    apply_chat_template: bool = False
    """Send prompts through the model's own chat template."""
    generation_params: JsonObject | None = None
    """Sampling defaults, such as temperature, for requests without them; AlpacaEval sends them, and stop_token_ids."""

    @field_validator("engine_kwargs")
    @classmethod
    def _engine_kwargs_leave_ours_alone(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        normal = {key.replace("-", "_"): value for key, value in kwargs.items()}
        if "chat_template" in normal:
            raise ValueError(
                "chat_template would replace the model's own template: put the right template into the checkpoint"
            )
        if "hf_token" in normal:
            raise ValueError(
                "hf_token is a key, and arguments are shown in lists of processes and in records: set the variable "
                "HF_TOKEN where assay runs, which fetches checkpoints itself"
            )
        if "config" in normal:
            raise ValueError("config names a file that may set any of these: write what it says into engine_kwargs")
        ours = {"host", "port", "model", "served_model_name", "api_key", "override_generation_config"} & set(normal)
        if ours:
            raise ValueError(f"{', '.join(sorted(ours))} is set by the pool: remove it from engine_kwargs")
        if of_hosts := {"nnodes", "node_rank", "master_addr", "master_port", "headless"} & set(normal):
            raise ValueError(
                f"{', '.join(sorted(of_hosts))} follows from the resources: remove it from engine_kwargs, and say how "
                "many machines a replica has as hosts of resource_config"
            )
        for key, value in normal.items():
            for text in _named_files(value):
                may_be_here = "://" not in text and not text.startswith(("/", "~"))
                if may_be_here and ("/" in text or key in _NAMES_FILES) and _state_of(text) is not None:
                    raise ValueError(f"{key} names {text}, and engines run in another folder: write its whole path")
        return normal

    @field_validator("engine_variables")
    @classmethod
    def _engine_variables_are_settings(cls, variables: dict[str, str] | None) -> dict[str, str] | None:
        refused = [name for name in variables or () if not is_setting(name)]
        if refused:
            raise ValueError(f"expected names VLLM_* of settings that can change an answer, found {', '.join(refused)}")
        return variables

    @property
    def trusts_code(self) -> bool:
        """True if code of the checkpoint may run."""
        return bool(self.engine_kwargs.get("trust_remote_code"))

    def unnamed_inputs(self) -> dict[str, Any]:
        """Returns the other inputs that can change an answer: engine variables, and files in them or in arguments.

        A folder counts by the names, sizes and times of its files, since it may hold a model. Empty if there are none.
        """
        named = sorted(set(_named_files([self.engine_kwargs, self.engine_variables])))
        whole = [text for text in named if text.startswith(("/", "~"))]
        files = {text: state for text in whole if (state := _state_of(text)) is not None}
        inputs = {"engine_variables": self.engine_variables, "engine_files": files}
        return {name: value for name, value in inputs.items() if value}

    @field_validator("generation_params")
    @classmethod
    def _generation_params_have_engine_defaults(cls, params: dict[str, Any] | None) -> dict[str, Any] | None:
        known = (*ENGINE_GENERATION_DEFAULTS, *REQUEST_GENERATION_PARAMS)
        unknown = sorted(set(params or {}) - set(known))
        if unknown:
            raise ValueError(f"expected some of {', '.join(known)}, found {', '.join(unknown)}: remove it")
        return params


class InferencePoolConfig(Config):
    """Replicas of a model behind a shared proxy; `resource_config.replicas` sets their number."""

    resource_config: ResourceConfig = ResourceConfig()
    """Resources of each replica, and the number of replicas."""
    model: ModelConfig = Field(validation_alias=AliasChoices("model", "model_config"))
    """The model to serve. In Python, YAML and JSON `model_config` is accepted too."""
    proxy_host: str = "auto"
    """Address the proxy listens on. auto is loopback, or the address of the proxy's machine if jobs run elsewhere.
    Beyond loopback it needs --insecure."""
    proxy_port: int = Field(default=0, ge=0, le=65535)
    """Port of the proxy; 0 takes a free port."""
    startup_timeout_seconds: float = Field(default=1800, gt=0)
    """Longest time until a replica's model answers."""
    engine_timeout_seconds: float = Field(default=600, gt=0)
    """Time limit of a request at a replica, before it is sent to another replica."""
    proxy_timeout_seconds: float = Field(default=1800, gt=0)
    """Longest time that a request is held while no replica is ready."""
    client_timeout_seconds: float = Field(default=7200, gt=0)
    """Time limit for an answer, as seen by an evaluator."""
    max_pending_requests: int = Field(default=20_000, ge=1)
    """Requests that the proxy holds at once; further requests are answered 429."""
    max_replica_restarts: int = Field(default=2, ge=0)
    """Maximum of restarts in ten minutes after deaths of a replica's engine."""
    reload_in_place: bool = True
    """Load the next checkpoint into the running engine where that is possible; else restart it."""
    reload_audit_share: float = Field(default=0.01, ge=0, le=1)
    """Share of in-place loads that are compared with a cold start, in addition to the first, which always are."""
    lease_seconds: float = Field(default=30, gt=0)
    """Silence of a replica after which its requests go to another replica."""
    longest_wait_seconds: float = Field(default=60, gt=0)
    """Time that requests for a checkpoint may wait while others keep every replica busy; then it gets a replica."""
    journal: bool = True
    """Keep every complete answer, and return it when the same request comes again. Without it the pool writes no
    prompts or answers to disk: for confidential sets."""
    journal_max_bytes: int = Field(default=4 * 2**30, ge=2**20)
    """Limit of the journal's size on this machine in bytes; the oldest answers are deleted first."""
    journal_prompts: bool = False
    """Keep prompts with their answers; otherwise only a hash of each request. An answer that echoes its prompt is
    always kept in full."""

    @model_validator(mode="after")
    def _timeouts_are_ordered(self) -> InferencePoolConfig:
        if not self.engine_timeout_seconds < self.proxy_timeout_seconds < self.client_timeout_seconds:
            raise ValueError(
                "time-outs must grow outwards: engine_timeout_seconds < proxy_timeout_seconds < "
                f"client_timeout_seconds, found {self.engine_timeout_seconds:g}, {self.proxy_timeout_seconds:g}, "
                f"{self.client_timeout_seconds:g}. Raise the outer time-outs"
            )
        if not self.lease_seconds < self.proxy_timeout_seconds:
            raise ValueError(
                f"lease_seconds ({self.lease_seconds:g}) must be below proxy_timeout_seconds "
                f"({self.proxy_timeout_seconds:g}), or requests of a silent replica end before they can move. "
                "Lower the former or raise the latter"
            )
        return self

    @model_validator(mode="after")
    def _device_fits_resources(self) -> InferencePoolConfig:
        device = infer_device_from_resource_config(self.resource_config)
        if self.model.device not in ("auto", device):
            raise ValueError(
                f"model.device is {self.model.device!r} but the resources are for {device!r}: "
                "change one of them, or leave device at 'auto'"
            )
        return self

    @property
    def device(self) -> EngineDevice:
        return infer_device_from_resource_config(self.resource_config)
