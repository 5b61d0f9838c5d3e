"""Groups of options, as dataclasses, and their expansion to options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from resources.errors import BadInput

PoolKeyBlock = Annotated[
    str | None, typer.Option(help="Prefect secret block with the key of that pool; ASSAY_POOL_KEY when left out.")
]


@dataclass(frozen=True)
class EngineOptions:
    """Engines of a new pool."""

    replicas: Annotated[int | None, typer.Option(help="Engines side by side, 1 when left out.")] = None
    cpu: Annotated[
        int | None, typer.Option(help="CPU cores per engine; as its device needs when left out, 2 without a device.")
    ] = None
    engine: Annotated[tuple[str, ...], typer.Option("--engine", help="Engine argument key=value; repeatable.")] = ()
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the model's chat template.")] = False


@dataclass(frozen=True)
class MachineOptions:
    """The machine of each engine, except its cores."""

    gpu: Annotated[str | None, typer.Option(help="GPU of each engine, such as H100:2 or auto.")] = None
    tpu: Annotated[
        str | None, typer.Option(help="TPU slice of each engine, such as v5litepod-8; or several that do, with commas.")
    ] = None
    hosts: Annotated[int | None, typer.Option(min=1, help="Machines of each engine, each with such a GPU.")] = None
    ram: Annotated[str | None, typer.Option(help="Memory per engine, such as 32g; as its device needs else.")] = None
    disk: Annotated[str | None, typer.Option(help="Local disk per engine; as its device needs else.")] = None
    region: Annotated[tuple[str, ...], typer.Option("--region", help="Region allowed, best first; repeatable.")] = ()
    zone: Annotated[str | None, typer.Option(help="A zone of the region.")] = None
    on_demand: Annotated[bool, typer.Option("--on-demand/--preemptible", help="No machine that can be taken away.")] = (
        False
    )
    image: Annotated[str | None, typer.Option(help="Container image, on backends that run containers.")] = None


POOL_OPTIONS = (
    "replicas",
    "cpu",
    "engine",
    "gpu",
    "tpu",
    "hosts",
    "ram",
    "disk",
    "region",
    "zone",
    "on_demand",
    "image",
)
"""Options that describe a new pool, and nothing else."""


@dataclass(frozen=True)
class EvaluationOptions(EngineOptions, MachineOptions):
    """An evaluation, or a suite; `evals` as name or name:shots."""

    model: Annotated[str | None, typer.Option(help="A checkpoint, or a run that holds them as hf/step-N.")] = None
    evals: Annotated[tuple[str, ...], typer.Option("--eval", help="Benchmark or benchmark:shots; repeatable.")] = ()
    force_fewshot: Annotated[
        bool, typer.Option("--force-fewshot", help="Put shots also in front of a benchmark that takes none.")
    ] = False
    evaluator: Annotated[
        str | None, typer.Option(help="lm-eval (when left out), helm, alpaca-eval, inspect-ai, levanter.")
    ] = None
    suite: Annotated[str | None, typer.Option(help="A suite by its name, or a YAML file; see assay suites.")] = None
    only: Annotated[tuple[str, ...], typer.Option("--only", help="A part of the suite; repeatable.")] = ()
    output: Annotated[str | None, typer.Option(help="Folder for records, evaluations when left out.")] = None
    name: Annotated[str | None, typer.Option(help="Name of the run in records and reports.")] = None
    limit: Annotated[int | None, typer.Option(help="Questions per benchmark.")] = None
    max_truncated: Annotated[float | None, typer.Option(help="Share of prompts that may be cut to fit.")] = None
    max_at_limit: Annotated[float | None, typer.Option(help="Share of answers that may end at the limit.")] = None
    benchmarks: Annotated[str | None, typer.Option(help="Folder with benchmarks of your own (YAML).")] = None
    base_url: Annotated[str | None, typer.Option(help="An endpoint that serves the checkpoint already.")] = None
    served_name: Annotated[str | None, typer.Option(help="The checkpoint's name at the endpoint, if different.")] = None
    pool: Annotated[str | None, typer.Option(help="A kept pool, by name or https:// address: see assay pool.")] = None
    pool_key_block: PoolKeyBlock = None
    allow_code: Annotated[
        tuple[str, ...], typer.Option("--allow-code", help="A benchmark that may run code the model wrote.")
    ] = ()
    judge_url: Annotated[str | None, typer.Option(help="Endpoint of a judge; its own pool when left out.")] = None
    judge_pool: Annotated[str | None, typer.Option(help="A kept pool as the judge.")] = None
    judge_model: Annotated[str | None, typer.Option(help="Name of the judge there.")] = None
    judge_annotator: Annotated[str | None, typer.Option(help="AlpacaEval's configuration of the judge.")] = None
    sinks: Annotated[str | None, typer.Option(help="YAML file with sinks, where results are announced.")] = None
    mlflow: Annotated[
        bool, typer.Option("--mlflow", help="Show results in MLflow too: in mlruns next to the records.")
    ] = False
    mlflow_uri: Annotated[
        str | None, typer.Option(help="Tracking server, sqlite:///FILE or folder for that.", metavar="URI")
    ] = None

    def given(self, *names: str) -> list[str]:
        """Returns the given options, among `names` or all, in command-line form."""
        asked = names or tuple(annotations_of(type(self)))
        given = [name for name in asked if getattr(self, name) not in (None, ()) and getattr(self, name) is not False]
        return [f"--{name.removesuffix('s') if name == 'evals' else name.replace('_', '-')}" for name in given]


@dataclass(frozen=True)
class SelectionOptions:
    """Checkpoints of a run, as in `CheckpointSelection`."""

    which: Annotated[str, typer.Option(help="all, latest or first.")] = "all"
    every: Annotated[
        int | None, typer.Option(help="Only the first step at or past each multiple of this, and the last.")
    ] = None
    step: Annotated[tuple[int, ...], typer.Option("--step", help="Only this training step; repeatable.")] = ()
    wait: Annotated[float, typer.Option(help="Seconds to wait for checkpoints that are being written.")] = 0.0


@dataclass(frozen=True)
class WorkPoolOptions:
    """Execution at a work pool of another region."""

    on_work_pool: Annotated[
        bool, typer.Option("--on-work-pool", help="At the work pool of the best region, not here; waits for it.")
    ] = False
    max_egress_usd: Annotated[
        float | None,
        typer.Option(help="Most that reading from another region may cost; ASSAY_MAX_EGRESS_USD when left out.", min=0),
    ] = None


@dataclass(frozen=True)
class BudgetOptions:
    """Cost limit of an evaluation."""

    max_usd: Annotated[
        float | None,
        typer.Option(
            help="Begin nothing with a higher or unknown expected cost; ASSAY_MAX_USD when left out.",
            min=0,
        ),
    ] = None


@dataclass(frozen=True)
class PromptOptions:
    """Prompts, and the conversion of input rows to prompts."""

    prompts: Annotated[
        tuple[str, ...],
        typer.Option("--prompts", help="JSON lines, Parquet or a saved data set; wildcards; repeatable."),
    ] = ()
    column: Annotated[str | None, typer.Option(help="Column with the prompt; prompt, or messages in a chat.")] = None
    template: Annotated[str | None, typer.Option(help="Jinja template over the columns, or @FILE.")] = None
    system: Annotated[str | None, typer.Option(help="System message of each conversation.")] = None
    id_column: Annotated[str | None, typer.Option(help="Column that names each prompt; its number else.")] = None
    keep: Annotated[tuple[str, ...], typer.Option("--keep", help="Column to copy to the answers; repeatable.")] = ()
    limit: Annotated[int | None, typer.Option(help="The first so many prompts only.")] = None


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling of the answers."""

    samples: Annotated[int, typer.Option(help="Answers to each prompt.")] = 1
    seed: Annotated[int | None, typer.Option(help="Seed of the first sample; the k-th gets k more.")] = None
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 256
    temperature: Annotated[float | None, typer.Option(help="Randomness; the engine's own when left out.")] = None
    top_p: Annotated[float | None, typer.Option(help="Share of the probability to choose from.")] = None
    stop: Annotated[tuple[str, ...], typer.Option("--stop", help="Text that ends an answer; repeatable.")] = ()
    json_schema: Annotated[str | None, typer.Option(help="File with a JSON schema that answers follow.")] = None
    tools: Annotated[str | None, typer.Option(help="File with a list of tools, as OpenAI's API has them.")] = None
    extra: Annotated[
        tuple[str, ...], typer.Option("--extra", help="Further field of requests, key=value; repeatable.")
    ] = ()


@dataclass(frozen=True)
class GenerationOutputOptions:
    """Output of the answers, and the parallelism of the requests."""

    output: Annotated[str | None, typer.Option(help="Folder for the answers; local, gs:// or s3://.")] = None
    output_format: Annotated[str, typer.Option("--format", help="parquet or jsonl.")] = "parquet"
    prompts_per_shard: Annotated[int, typer.Option(help="Prompts per file of answers.")] = 1000
    max_errors: Annotated[str, typer.Option(help="Errors before it stops: a number, a share, or any.")] = "0.05"
    workers: Annotated[int, typer.Option(help="Processes that ask the pool.")] = 1
    in_flight: Annotated[int | None, typer.Option(help="Requests at once; as the pool has room when left out.")] = None


def tpu_asked(text: str) -> dict[str, Any]:
    """Returns the device of `--tpu`, a type or several with commas, as input for `TpuConfig`."""
    variant, *alternatives = (name.strip() for name in text.split(","))
    return {"kind": "tpu", "variant": variant, "alternatives": alternatives}


def refuse_with_config(given: Sequence[str], described: str) -> None:
    """Raises BadInput if options are given in addition to a file that sets them."""
    if given:
        raise BadInput(
            expected=f"either --config or the options that describe {described}",
            found=f"--config and {', '.join(given)}",
            remedy="write them into the file",
        )


def annotations_of(kind: type) -> dict[str, Any]:
    """Returns the annotated fields of a dataclass, its own before those of its bases."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for part in kind.__mro__ for name in vars(part).get("__annotations__", {})}


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command for typer with the fields of its dataclass parameters as options of its own."""
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if not is_dataclass(kind := parameter.annotation):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(kind, type)
        groups[parameter.name] = kind
        parameters += [_parameter(name, hint, getattr(kind, name)) for name, hint in annotations_of(kind).items()]

    def flat(**given: Any) -> None:
        made = {
            name: kind(**{field: _value(given.pop(field), getattr(kind, field)) for field in annotations_of(kind)})
            for name, kind in groups.items()
        }
        command(**given, **made)

    flat.__name__, flat.__doc__, flat.__module__ = command.__name__, command.__doc__, command.__module__
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    flat.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return flat


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    kind, *notes = get_args(hint)
    if get_origin(kind) is tuple:  # typer gives a tuple a fixed number of values
        hint, default = Annotated[list[get_args(kind)[0]] | None, *notes], None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _value(given: Any, default: Any) -> Any:
    return tuple(given or ()) if isinstance(default, tuple) else given
