"""`assay generate`: prompts answered by checkpoints, written in shards."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from flows.cli.options.groups import (
    AcceleratorOptions,
    EngineOptions,
    EvaluationOptions,
    SelectionOptions,
    annotations_of,
    flattened,
)
from flows.console.console import ERR, OUT, Json, print_json

Texts = tuple[str, ...]


@dataclass(frozen=True)
class PromptOptions:
    """Prompts, and how a row becomes one."""

    prompts: Annotated[
        Texts, typer.Option("--prompts", help="JSON lines, Parquet or a saved data set; wildcards; repeatable.")
    ] = ()
    column: Annotated[str | None, typer.Option(help="Column with the prompt; prompt, or messages in a chat.")] = None
    template: Annotated[str | None, typer.Option(help="Jinja template over the columns, or @FILE with one.")] = None
    system: Annotated[str | None, typer.Option(help="System message of each conversation.")] = None
    id_column: Annotated[str | None, typer.Option(help="Column that names each prompt; its number else.")] = None
    keep: Annotated[Texts, typer.Option("--keep", help="Column that is copied beside the answers; repeatable.")] = ()
    limit: Annotated[int | None, typer.Option(help="The first so many prompts only.")] = None


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling of the answers."""

    samples: Annotated[int, typer.Option(help="Answers to each prompt.")] = 1
    seed: Annotated[int | None, typer.Option(help="Seed of the first sample; the k-th gets k more.")] = None
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 256
    temperature: Annotated[float | None, typer.Option(help="Randomness; the engine's own when left out.")] = None
    top_p: Annotated[float | None, typer.Option(help="Share of the probability to choose from.")] = None
    stop: Annotated[Texts, typer.Option("--stop", help="Text that ends an answer; repeatable.")] = ()
    json_schema: Annotated[str | None, typer.Option(help="File with a JSON schema that answers follow.")] = None
    tools: Annotated[str | None, typer.Option(help="File with a list of tools, as OpenAI's API has them.")] = None
    extra: Annotated[Texts, typer.Option("--extra", help="Further field of requests, key=value; repeatable.")] = ()


@dataclass(frozen=True)
class OutputOptions:
    """The place of the answers, and the work on them."""

    output: Annotated[str | None, typer.Option(help="Folder for the answers; local, gs:// or s3://.")] = None
    output_format: Annotated[str, typer.Option("--format", help="parquet or jsonl.")] = "parquet"
    prompts_per_shard: Annotated[int, typer.Option(help="Prompts whose answers are one file.")] = 1000
    max_errors: Annotated[str, typer.Option(help="Errors before it stops: a number, a share, or any.")] = "0.05"
    workers: Annotated[int, typer.Option(help="Processes that ask the pool.")] = 1
    in_flight: Annotated[int | None, typer.Option(help="Requests at once; as the pool has room when left out.")] = None


@flattened
def generate(
    model: Annotated[str | None, typer.Option(help="A checkpoint, or a run that holds them as hf/step-N.")] = None,
    *,
    pool: Annotated[str | None, typer.Option(help="A pool that is kept up, by its name: see assay pool.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run in the output.")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file with a GenerationConfig, in place of options.")] = None,
    asked: PromptOptions,
    sampling: SamplingOptions,
    writing: OutputOptions,
    selecting: SelectionOptions,
    engines: EngineOptions,
    accelerator: AcceleratorOptions,
    as_json: Json = False,
) -> None:
    """Write text in bulk: prompts answered by checkpoints, each answer written once."""
    from flows.cli.options.generations import generation_from_options
    from flows.console.running import run_generation
    from resources.errors import BadInput
    from tasks.generation.config import GenerationConfig
    from tasks.spec.loading import load_config

    groups = (asked, sampling, writing, selecting, engines, accelerator)
    if config is not None:
        given = [field for group in groups for field in annotations_of(type(group)) if _was_given(group, field)]
        given += [field for field, value in (("model", model), ("pool", pool), ("name", name)) if value is not None]
        if given:
            raise BadInput(
                expected="either --config or the options that describe a generation",
                found=f"--config and {', '.join(given)}",
                remedy="write them into the file",
            )
        wanted = load_config(config, GenerationConfig)
    else:
        served = EvaluationOptions(model=model, name=name, pool=pool, **asdict(engines), **asdict(accelerator))
        wanted = generation_from_options(served, asked, sampling, writing, selecting)
    written = run_generation(wanted, console=ERR)
    if as_json:
        print_json(written)
        return
    for row in written:
        counted = f"{row['rows']:,} answers, {row['errors']:,} errors, {row['completion_tokens']:,} tokens"
        OUT.print(f"{row['checkpoint']}: {counted}, in {row['folder']}", highlight=False, soft_wrap=True)
    for page in dict.fromkeys(row["samples_page"] for row in written):
        OUT.print(f"Samples: {page}", highlight=False, soft_wrap=True)


def _was_given(group: Any, field: str) -> bool:
    return getattr(group, field) != getattr(type(group), field)
