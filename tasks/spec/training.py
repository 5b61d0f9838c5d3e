"""Configuration of a training and of its evaluation: `TrainLmOnPodConfig`, `TrainAndEvaluateConfig`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from resources.config import Config, ResourceConfig, TpuConfig
from resources.storage import storage
from tasks.spec.evaluation import EvaluationConfig, StepsFrom
from tasks.spec.model_parts import ModelParts
from tasks.spec.names import in_few_words, is_relative, run_name_of
from tasks.spec.suites import SuiteName, SuiteRequest, load_suite

EXPORTS = "hf"
"""Folder of a run with its checkpoints in Hugging Face layout."""
_SECTIONS = ("data", "trainer", "model", "optimizer", "adapter", "eval_harness", "labeled_eval")
_FIELDS = (
    *_SECTIONS,
    *("train_seq_len", "initialize_from_hf", "use_hf_model_config", "pad_tokenizer_to_match_model", "z_loss_weight"),
    *("hf_save_path", "hf_upload", "hf_save_steps", "hf_save_dtype", "hf_generation_eos_token_ids"),
    *("peft_save_path", "peft_hf_upload", "merged_hf_save_path", "merged_hf_upload"),
    *("data_seed", "initialize_from_checkpoint_path", "eval_harness_steps", "log_entropy"),
)
"""Fields of `levanter.main.train_lm.TrainLmConfig` in the pinned version, to reject unknown names before a start."""


_HUB_FIELDS = ("tokenizer", "reference_checkpoint", "initialize_from_hf")
_PATH_FIELD = re.compile(rf"(^|\.)([a-z_]+_(path|dir|urls)|initialize_from|{'|'.join(_HUB_FIELDS)})$")


class TrainLmOnPodConfig(Config):
    """A training by Levanter's `train_lm` on any job backend."""

    train_config: dict[str, Any] | str
    """Levanter's own configuration of `train_lm`, or a YAML file with it, in any store."""
    resources: ResourceConfig = ResourceConfig()
    """Its resources; a TPU slice is a single replica."""
    output_path: str | None = None
    """Folder for checkpoints/, hf/ and logs/, local, gs:// or s3://; the paths of train_config apply when unset."""
    impute_run_id_from_output_path: bool = True
    """Name the run after the last part of output_path, unless an id is given; else each run gets a folder below it."""
    env_vars: dict[str, str] = Field(default={}, repr=False)
    """Environment variables of the training, which override all defaults."""
    auto_build_caches: bool = False
    """Tokenize data without a cache instead of refusing it."""
    temporary_path: str | None = None
    """Folder for temporary checkpoints (ttl=14d/) and compiled programs (ttl=30d/), which its store deletes after so
    many days; tmp/ in the bucket of output_path when unset.
    """

    @field_validator("train_config")
    @classmethod
    def _is_one_of_levanter(cls, config: dict[str, Any] | str) -> dict[str, Any] | str:
        if isinstance(config, dict):
            check_train_config(config)
        return config

    @field_validator("output_path")
    @classmethod
    def _without_slash(cls, path: str | None) -> str | None:
        return path.rstrip("/") if path else None

    @model_validator(mode="after")
    def _replicas_train_together(self) -> TrainLmOnPodConfig:
        if self.resources.replicas > 1 and not isinstance(self.resources.device, TpuConfig):
            raise ValueError(
                f"expected a single replica, found {self.resources.replicas}: only TPU slices find each other; these "
                "would train apart and write into the same folder"
            )
        return self

    @property
    def exports(self) -> str | None:
        """The folder of checkpoints in Hugging Face layout; None if this configuration alone does not determine it."""
        if self.output_path is None or not self.impute_run_id_from_output_path:
            return None
        return storage.join(self.output_path, EXPORTS)


def check_train_config(config: dict[str, Any]) -> None:
    """Checks what needs no import of Levanter, which reads the rest minutes later. Raises ValueError if it is not a
    configuration of `train_lm`."""
    for name in config:
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(_FIELDS)}"
            raise ValueError(f"expected a configuration of Levanter's train_lm, found the key {name!r}; {hint}")
    for name in _SECTIONS:
        if not isinstance(config.get(name, {}), dict | None):
            raise ValueError(f"expected keys and values in {name}, found {config[name]!r}")
    trainer = config.get("trainer") or {}
    for name, steps in (
        ("trainer.num_train_steps", trainer.get("num_train_steps", 1)),
        ("hf_save_steps", config.get("hf_save_steps", 1)),
    ):
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"expected a number of steps above 0 as {name}, found {steps!r}")
    for place, path in _paths_in(config):
        if _is_relative(path, named=place.rsplit(".", 1)[-1]):
            raise ValueError(
                f"expected a whole path as {place}, found {path!r}: a training runs in a folder of its own, where that "
                "is another place"
            )
    if not isinstance(trainer.get("id"), str | None):
        raise ValueError(f"expected a text as trainer.id, found {trainer['id']!r}: put it into quotes")


def _paths_in(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    match value:
        case dict():
            for name, field in value.items():
                yield from _paths_in(field, f"{at}.{name}" if at else str(name))
        case list() | tuple():
            for field in value:
                yield from _paths_in(field, at)
        case str() if _PATH_FIELD.search(at):
            yield at, value
        case _:
            pass


def _is_relative(path: str, *, named: str) -> bool:
    if named in _HUB_FIELDS:
        return path.startswith((".", "~"))
    return bool(path) and is_relative(path)


class ExportsEvaluation(EvaluationConfig):
    """An evaluation of every checkpoint that a training exports."""

    model_path: str = ""
    """Leave unset: the exports of the training."""


class ExportsRequest(SuiteRequest):
    """A suite request for every checkpoint that a training exports."""

    model_path: str = ""
    """Leave unset: the exports of the training."""


class TrainAndEvaluateConfig(Config):
    """A training and the evaluations, or suite, of its checkpoints."""

    training: TrainLmOnPodConfig
    """The training; it needs an output_path."""
    evaluations: tuple[ExportsEvaluation, ...] = ()
    """Evaluations that share a single pool."""
    suite: SuiteName | None = None
    """A suite by its name or file, in place of evaluations."""
    request: ExportsRequest | None = None
    """As for a suite: the folder of its records, the resources of its engines."""
    every_n_steps: int | None = Field(default=None, ge=1)
    """Evaluate only the first step at or past each multiple of this, and the last step."""
    steps_from: StepsFrom | None = None
    """An expression for the steps in the names of the exports, as in a selection of checkpoints."""
    poll_seconds: float = Field(default=2.0, gt=0)
    """Time between two listings of the exports; a checkpoint is evaluated once two listings agree about it."""

    @model_validator(mode="before")
    @classmethod
    def _checkpoints_of_training(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        try:
            exports = TrainLmOnPodConfig.model_validate(values.get("training")).exports
        except ValidationError:
            return values  # reported when the field itself is validated
        if exports is None:
            raise ValueError(
                "expected a training with an output_path that names the run (impute_run_id_from_output_path), since "
                "its checkpoints are looked for below it"
            )
        evaluations = [_of(evaluation, exports) for evaluation in values.get("evaluations") or ()]
        filled = {**values, "evaluations": evaluations}
        return {**filled, "request": _of(values.get("request") or {}, exports)} if values.get("suite") else filled

    @model_validator(mode="after")
    def _something_is_asked(self) -> TrainAndEvaluateConfig:
        if bool(self.evaluations) == (self.suite is not None):
            raise ValueError(f"expected evaluations or a suite, found {'both' if self.suite else 'neither'}")
        if any(asked.base_url is not None for asked in (*self.evaluations, *filter(None, [self.request]))):
            raise ValueError("expected a pool, found base_url: an endpoint serves no checkpoint that comes later")
        return self

    @property
    def exports(self) -> str:
        exports = self.training.exports
        assert exports is not None, "checked when it was made"
        return exports

    @property
    def place(self) -> str:
        asked = self.suite or in_few_words(evaluation.asked for evaluation in self.evaluations)
        return f"{run_name_of(self.exports)} · {asked}"

    def asked(self) -> tuple[EvaluationConfig, ...]:
        if self.suite is None:
            return self.evaluations
        assert self.request is not None
        return load_suite(self.suite).evaluations_of(self.request)


def _of(asked: Any, exports: str) -> Any:
    values = asked.model_dump(exclude_unset=True) if isinstance(asked, Config) else asked
    if not isinstance(values, dict):
        return values
    if parts := [name for name in ModelParts.model_fields if values.get(name)]:
        raise ValueError(
            f"expected exports with all their parts, found {', '.join(parts)}: let the training write them"
        )
    given = values.get("model_path")
    if given and given.rstrip("/") != exports:
        raise ValueError(f"expected model_path to be left out, or {exports}, found {given}")
    named = {} if values.get("pool_config") else {"model_name": run_name_of(exports)}
    return {**named, **values, "model_path": exports}
