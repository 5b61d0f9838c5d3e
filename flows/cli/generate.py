"""`assay generate`: prompts answered by checkpoints, written in shards."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import yaml
from cyclopts import Parameter

from flows.cli.options.evaluations import SelectionOptions, ServedOptions
from flows.cli.options.pools import (
    POOL_OPTIONS,
    OptionGroup,
    PoolOptions,
    key_and_value,
    pool_content,
    refuse_with,
    refuse_with_config,
)
from flows.console.console import Json, print_json, say
from flows.console.running import run_generation
from resources.errors import BadInput
from resources.storage import storage
from resources.storage.yaml_text import load_yaml
from tasks.generation.config import GenerationConfig
from tasks.spec.loading import build_config, load_config


@Parameter(name="*")
@dataclass(frozen=True)
class PromptOptions(OptionGroup):
    """Prompts, and the conversion of input rows to prompts."""

    files: Annotated[tuple[str, ...], Parameter("--prompts")] = ()
    """JSON lines, Parquet or a saved data set; wildcards; repeatable."""
    column: str | None = None
    """Column with the prompt; prompt, or messages in a chat."""
    template: str | None = None
    """Jinja template over the columns, or @FILE."""
    system: str | None = None
    """System message of each conversation."""
    id_column: str | None = None
    """Column that names each prompt; its number when left out."""
    keep: tuple[str, ...] = ()
    """Column to copy to the answers; repeatable."""
    limit: int | None = None
    """The first so many prompts only."""


@Parameter(name="*")
@dataclass(frozen=True)
class SamplingOptions(OptionGroup):
    """Sampling of the answers."""

    samples: int = 1
    """Answers to each prompt."""
    seed: int | None = None
    """Seed of the first sample; the k-th gets k more."""
    max_tokens: int = 256
    """Longest answer in tokens."""
    temperature: float | None = None
    """Randomness; the engine's own when left out."""
    top_p: float | None = None
    """Share of the probability to choose from."""
    stop: tuple[str, ...] = ()
    """Text that ends an answer; repeatable."""
    json_schema: str | None = None
    """File with a JSON schema that answers follow."""
    tools: str | None = None
    """File with a list of tools, as OpenAI's API has them."""
    extra: tuple[str, ...] = ()
    """Further field of requests, key=value; repeatable."""


@Parameter(name="*")
@dataclass(frozen=True)
class GenerationOutputOptions(OptionGroup):
    """Output of the answers, and the parallelism of the requests."""

    output_path: Annotated[str | None, Parameter("--output")] = None
    """Folder for the answers; local, gs:// or s3://."""
    output_format: Annotated[str, Parameter("--format")] = "parquet"
    """parquet or jsonl."""
    prompts_per_shard: int = 1000
    """Prompts per file of answers."""
    max_errors: str = "0.05"
    """Errors before it stops: a number, a share, or any."""
    workers: int = 1
    """Processes that ask the pool."""
    in_flight: int | None = None
    """Requests at once; as the pool has room when left out."""
    protect: Annotated[bool, Parameter(negative="--no-protect")] = True
    """Keep files of checkpoints until they have answered, though their trainer removes them."""


def generate(
    *,
    served: ServedOptions = ServedOptions(),
    config: str | None = None,
    asked: PromptOptions = PromptOptions(),
    sampling: SamplingOptions = SamplingOptions(),
    writing: GenerationOutputOptions = GenerationOutputOptions(),
    selecting: SelectionOptions = SelectionOptions(),
    engines: PoolOptions = PoolOptions(),
    as_json: Json = False,
) -> None:
    """Generate text in bulk: prompts answered by checkpoints, each answer written once.

    Args:
        config: YAML file with a GenerationConfig, in place of options.
    """
    if config is not None:
        groups = (served, asked, sampling, writing, selecting, engines)
        refuse_with_config([option for group in groups for option in group.given()], "a generation")
        generation = load_config(config, GenerationConfig)
    else:
        generation = generation_from_options(served, asked, sampling, writing, selecting, engines)
    written = run_generation(generation)
    if as_json:
        print_json(written)
        return
    for row in written:
        counted = f"{row['rows']:,} answers, {row['errors']:,} errors, {row['completion_tokens']:,} tokens"
        say(f"{row['checkpoint']}: {counted}, in {row['folder']}")
    say(*(f"Samples: {page}" for page in dict.fromkeys(row["samples_page"] for row in written)))


def generation_from_options(
    served: ServedOptions,
    asked: PromptOptions,
    sampling: SamplingOptions,
    writing: GenerationOutputOptions,
    selecting: SelectionOptions = SelectionOptions(),
    engines: PoolOptions = PoolOptions(),
) -> GenerationConfig:
    """Returns the generation for command-line options."""
    if (served.model is None and served.pool is None) or not asked.files or writing.output_path is None:
        raise BadInput(
            expected="--model or --pool, --prompts and --output; or --config FILE",
            found="not all of them",
            remedy="for example: assay generate --model runs/a --prompts prompts.jsonl --output generated",
        )
    served.require_pool_of_key_block()
    if served.pool is not None:
        refuse_with("--pool", engines.given(*POOL_OPTIONS), "the pool serves as its owner chose")
    requests = asdict(sampling)
    schema, extra = _read(requests.pop("json_schema")), requests.pop("extra")
    content: dict[str, Any] = {
        **served.parts(),
        "model_path": served.model,
        "model_name": served.name,
        "pool_name": served.pool,
        "pool_key_block": served.pool_key_block,
        "selection": asdict(selecting),
        "prompts": {**asdict(asked), "template": _text(asked.template), "chat": engines.chat},
        "sampling": {
            **requests,
            "response_format": schema
            and {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
            "tools": _read(sampling.tools) or (),
            "extra_body": dict(key_and_value("--extra", text) for text in extra),
        },
        **asdict(writing),
        "max_errors": _most_errors(writing.max_errors),
    }
    if served.pool is None and served.model is not None:
        content["pool_config"] = pool_content(engines, model=served.model, name=served.name)
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


def _read(file: str | None) -> Any:
    try:
        return load_yaml(_content(file)) if file else None
    except yaml.YAMLError as error:
        raise BadInput(expected=f"JSON or YAML in {file}", found=str(error), remedy="correct it") from error


def _content(file: str) -> bytes:
    try:
        return storage.read_bytes(file, within="/")
    except FileNotFoundError:
        raise BadInput(expected="a file", found=f"{file} is not there", remedy="check the path") from None
