"""Serving of a model: `ModelConfig` and `InferencePoolConfig`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import AliasChoices, Field, field_validator, model_validator

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
"""Those it does not: evaluators that say how to sample put them into each request."""

_NAMES_FILES = {
    *("generation_config", "hf_config_path", "tokenizer", "speculative_config"),
    *("lora_modules", "tool_parser_plugin", "reasoning_parser_plugin"),
}
"""Engine arguments in which a text without a slash may be a file."""


def is_setting(name: str) -> bool:
    """Tells whether a variable is one of those that can change what an engine answers."""
    return fnmatchcase(name, ENGINE_SETTINGS) and not any(fnmatchcase(name, other) for other in NO_ENGINE_SETTINGS)


def check_name(name: str) -> str:
    """A name that may become part of a path or a URL.

    Raises:
        ValueError: it may not.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"expected a name of letters, digits and . _ + = @ - that starts with a letter or digit, found {name!r}"
        )
    return name


def is_address(pool: str) -> bool:
    """Returns True if a pool is named by its address rather than by its name."""
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
    """One model, or every checkpoint of one run, as an engine serves it."""

    name: str
    """Name that requests use; for the checkpoints of a run, the beginning of their names."""
    path: str | None = None
    """Folder in Hugging Face layout, or a run that holds such folders; local or gs://, s3://."""
    device: Literal["auto", "cpu", "cuda", "tpu"] = "auto"
    """Engine family; "auto" follows the device of the resources."""
    engine_kwargs: JsonObject = {}
    """Engine arguments as vLLM names them, such as max_model_len; true becomes a flag without a value."""
    engine_variables: dict[str, str] | None = None
    """Variables VLLM_* of the engine that can change an answer; when unset, those of the process that plans."""
    apply_chat_template: bool = False
    """Ask through the model's own chat template."""
    generation_params: JsonObject | None = None
    """Sampling defaults, such as temperature, for requests that set none; AlpacaEval sends them, and stop_token_ids."""

    @field_validator("name")
    @classmethod
    def _name_is_usable(cls, name: str) -> str:
        return check_name(name)

    @field_validator("engine_kwargs")
    @classmethod
    def _engine_kwargs_leave_ours_alone(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        normal = {key.replace("-", "_"): value for key, value in kwargs.items()}
        if "chat_template" in normal:
            raise ValueError(
                "chat_template would replace the model's own template: put the right one into the checkpoint"
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

    def unnamed_inputs(self) -> dict[str, Any]:
        """All that can change an answer beside build, device and arguments: variables, and files that these name.

        A folder counts by names, sizes and times of its files, since it may hold a model. Empty where there is nothing.
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
    """Replicas of one model behind one proxy; `resource_config.replicas` says how many."""

    resource_config: ResourceConfig = ResourceConfig()
    """Resources of each replica, and the number of replicas."""
    model: ModelConfig = Field(validation_alias=AliasChoices("model", "model_config"))
    """The model to serve. In Python, YAML and JSON `model_config` is accepted too."""
    proxy_host: str = "auto"
    """Address the proxy listens on; auto is loopback, or the proxy's machine's where jobs run elsewhere. Beyond
    loopback it needs --insecure."""
    proxy_port: int = Field(default=0, ge=0, le=65535)
    """Port of the proxy; 0 takes a free one."""
    startup_timeout_seconds: float = Field(default=1800, gt=0)
    """Longest time until a replica's model answers."""
    engine_timeout_seconds: float = Field(default=600, gt=0)
    """Longest time of a request at a replica, before it is sent to another."""
    proxy_timeout_seconds: float = Field(default=1800, gt=0)
    """Longest time that a request is held while no replica is ready."""
    client_timeout_seconds: float = Field(default=7200, gt=0)
    """Longest time that an evaluator waits for one answer."""
    max_pending_requests: int = Field(default=20_000, ge=1)
    """Requests that the proxy holds at once; one more is answered 429."""
    max_replica_restarts: int = Field(default=2, ge=0)
    """Most restarts in ten minutes of a replica whose engine dies."""
    reload_in_place: bool = True
    """Load the next checkpoint into the running engine where that is possible; else restart it."""
    reload_audit_share: float = Field(default=0.01, ge=0, le=1)
    """Share of such loads that is compared with a cold start, beside those that are to prove it right."""
    lease_seconds: float = Field(default=30, gt=0)
    """Longest silence of a replica before its requests go to another."""
    longest_wait_seconds: float = Field(default=60, gt=0)
    """Longest time that a checkpoint is asked for in vain while others keep every replica busy; then it gets one."""
    journal: bool = True
    """Keep every whole answer, and give it again when the same request comes. Without it the pool writes nothing of
    prompts and answers: for confidential sets."""
    journal_max_bytes: int = Field(default=4 * 2**30, ge=2**20)
    """Bound on the journal's size on this machine; the oldest answers go first."""
    journal_prompts: bool = False
    """Keep prompts beside their answers; else a hash of each request. An answer that echoes its prompt is kept whole
    either way."""

    @model_validator(mode="after")
    def _timeouts_are_ordered(self) -> InferencePoolConfig:
        if not self.engine_timeout_seconds < self.proxy_timeout_seconds < self.client_timeout_seconds:
            raise ValueError(
                "time-outs must grow outwards: engine_timeout_seconds < proxy_timeout_seconds < "
                f"client_timeout_seconds, found {self.engine_timeout_seconds:g}, {self.proxy_timeout_seconds:g}, "
                f"{self.client_timeout_seconds:g}. Raise the outer ones"
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
        wanted = infer_device_from_resource_config(self.resource_config)
        if self.model.device not in ("auto", wanted):
            raise ValueError(
                f"model.device is {self.model.device!r} but the resources are for {wanted!r}: "
                "change one of them, or leave device at 'auto'"
            )
        return self

    @property
    def device(self) -> EngineDevice:
        """The engine family this pool runs."""
        return infer_device_from_resource_config(self.resource_config)
