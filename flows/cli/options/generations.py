"""Converts options of `assay generate` to a configuration."""

from __future__ import annotations

from typing import Any

import yaml

from flows.cli.options.evaluations import key_and_value, pool_content, require_pool_of_key_block
from flows.cli.options.groups import (
    POOL_OPTIONS,
    EvaluationOptions,
    GenerationOutputOptions,
    PromptOptions,
    SamplingOptions,
    SelectionOptions,
)
from resources.errors import BadInput
from resources.storage import storage
from resources.storage.yaml_text import load_yaml
from tasks.generation.config import GenerationConfig
from tasks.spec.loading import build_config


def generation_from_options(
    served: EvaluationOptions,
    asked: PromptOptions,
    sampling: SamplingOptions,
    writing: GenerationOutputOptions,
    selecting: SelectionOptions,
) -> GenerationConfig:
    """Returns the generation for command-line options."""
    if (served.model is None and served.pool is None) or not asked.prompts or writing.output is None:
        raise BadInput(
            expected="--model or --pool, --prompts and --output; or --config FILE",
            found="not all of them",
            remedy="for example: assay generate --model runs/a --prompts prompts.jsonl --output generated",
        )
    require_pool_of_key_block(served)
    if served.pool is not None and (unused := served.given(*POOL_OPTIONS)):
        raise BadInput(
            expected="only options that apply with --pool",
            found=f"--pool and {', '.join(unused)}",
            remedy="leave them out: the pool serves as its owner chose",
        )
    schema = _read(sampling.json_schema) if sampling.json_schema else None
    content: dict[str, Any] = {
        "model_path": served.model,
        "model_name": served.name,
        "pool_name": served.pool,
        "pool_key_block": served.pool_key_block,
        "selection": {
            "which": selecting.which,
            "every_n_steps": selecting.every,
            "steps": selecting.step,
            "wait_for_incomplete_seconds": selecting.wait,
        },
        "prompts": {
            "files": asked.prompts,
            "column": asked.column,
            "template": _text(asked.template),
            "chat": served.chat,
            "system": asked.system,
            "id_column": asked.id_column,
            "keep": asked.keep,
            "limit": asked.limit,
        },
        "sampling": {
            "samples": sampling.samples,
            "seed": sampling.seed,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": sampling.stop,
            "response_format": schema
            and {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
            "tools": _read(sampling.tools) if sampling.tools else (),
            "extra_body": dict(key_and_value("--extra", text) for text in sampling.extra),
        },
        "output_path": writing.output,
        "output_format": writing.output_format,
        "prompts_per_shard": writing.prompts_per_shard,
        "max_errors": _most_errors(writing.max_errors),
        "workers": writing.workers,
        "in_flight": writing.in_flight,
    }
    if served.pool is None:
        content["pool_config"] = pool_content(served)
    return build_config(content, GenerationConfig, source="the options")


def _most_errors(text: str) -> float | None:
    if text == "any":
        return None
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise BadInput(
            expected="--max-errors with a number, a share or any",
            found=text,
            remedy="for example --max-errors 100, --max-errors 1% or --max-errors any",
        ) from None


def _text(given: str | None) -> str | None:
    if given is None or not given.startswith("@"):
        return given
    return _content(given[1:]).decode()


def _read(file: str) -> Any:
    try:
        return load_yaml(_content(file))
    except yaml.YAMLError as error:
        raise BadInput(expected=f"JSON or YAML in {file}", found=str(error), remedy="correct it") from error


def _content(file: str) -> bytes:
    try:
        return storage.read_bytes(file, within="/")
    except FileNotFoundError:
        raise BadInput(expected="a file", found=f"{file} is not there", remedy="check the path") from None
