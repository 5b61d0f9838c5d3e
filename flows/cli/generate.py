"""`assay generate`: prompts answered by checkpoints, written in shards."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from flows.cli.options.groups import (
    EngineOptions,
    EvaluationOptions,
    GenerationOutputOptions,
    MachineOptions,
    PoolKeyBlock,
    PromptOptions,
    SamplingOptions,
    SelectionOptions,
    annotations_of,
    flattened,
    refuse_with_config,
)
from flows.console.console import ERR, OUT, Json, print_json


@flattened
def generate(
    model: Annotated[str | None, typer.Option(help="A checkpoint, or a run that holds them as hf/step-N.")] = None,
    *,
    pool: Annotated[str | None, typer.Option(help="A kept pool, by name or https:// address: see assay pool.")] = None,
    pool_key_block: PoolKeyBlock = None,
    name: Annotated[str | None, typer.Option(help="Name of the run in the output.")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file with a GenerationConfig, in place of options.")] = None,
    asked: PromptOptions,
    sampling: SamplingOptions,
    writing: GenerationOutputOptions,
    selecting: SelectionOptions,
    engines: EngineOptions,
    machine: MachineOptions,
    as_json: Json = False,
) -> None:
    """Generate text in bulk: prompts answered by checkpoints, each answer written once."""
    from flows.cli.options.generations import generation_from_options
    from flows.console.running import run_generation
    from tasks.generation.config import GenerationConfig
    from tasks.spec.loading import load_config

    groups = (asked, sampling, writing, selecting, engines, machine)
    if config is not None:
        given = [field for group in groups for field in annotations_of(type(group)) if _was_given(group, field)]
        alone = {"model": model, "pool": pool, "pool_key_block": pool_key_block, "name": name}
        given += [field for field, value in alone.items() if value is not None]
        refuse_with_config(given, "a generation")
        generation = load_config(config, GenerationConfig)
    else:
        pools = {"pool": pool, "pool_key_block": pool_key_block}
        served = EvaluationOptions(model=model, name=name, **pools, **asdict(engines), **asdict(machine))
        generation = generation_from_options(served, asked, sampling, writing, selecting)
    written = run_generation(generation, console=ERR)
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
