"""Sets of instructions for AlpacaEval: their names, files and checks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from resources.errors import BadInput, not_there, unknown
from resources.storage import storage
from tasks.errors import UnknownBenchmark
from tasks.evaluators.alpaca_eval.options import AlpacaEvalOptions
from tasks.spec.benchmarks import BUNDLED
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

OFFICIAL = "alpaca_eval"
"""AlpacaEval's own 805 instructions with the outputs of its baseline, on the hub."""
BUNDLED_SETS = BUNDLED / "alpaca_eval"


@dataclass(frozen=True)
class InstructionSet:
    """The files of a set; without `uri` it is the official set."""

    key: str
    uri: str | None
    references: str | None


class Instruction(BaseModel):
    """An entry of a set; its other fields remain in the file."""

    instruction: str
    output: str | None = None
    dataset: str = ""


_INSTRUCTIONS: TypeAdapter[list[Instruction]] = TypeAdapter(list[Instruction])


def instruction_sets(config: EvaluationConfig) -> tuple[InstructionSet, ...]:
    """Returns the sets of an evaluation, by the names in `evals`, without reading them."""
    options = config.options(AlpacaEvalOptions)
    return tuple(
        InstructionSet(task.metric_key, options.instructions_path or _uri(task, config), options.reference_outputs_path)
        for task in config.evals
    )


def _uri(task: EvalTaskConfig, config: EvaluationConfig) -> str | None:
    if task.name == OFFICIAL:
        return None
    return storage.join(config.benchmarks_path or str(BUNDLED_SETS), f"{task.name}.json")


def check_instructions(config: EvaluationConfig) -> None:
    """Reads every set of an evaluation but the official set, and raises for unusable settings and files."""
    options = config.options(AlpacaEvalOptions)
    given = (options.instructions_path, options.reference_outputs_path, options.length_control_path)
    remote = [path for path in given if path is not None and not storage.is_local(path)]
    if remote:
        raise BadInput(
            expected="files on this machine as instructions_path, reference_outputs_path and length_control_path",
            found=", ".join(remote),
            remedy="Copy them here; or put instructions with outputs into benchmarks_path, which may lie in a store",
        )
    controlled = options.length_control_path
    if controlled is not None and not storage.local_path(controlled).is_file():
        remedy = "Correct the path, or leave it out: the plain win rate needs none"
        raise not_there("AlpacaEval's df_gamed.csv as length_control_path", controlled, remedy)
    if options.instructions_path is not None and len(config.evals) > 1:
        raise BadInput(
            expected="a single name in evals, since instructions_path is a single set",
            found=f"{len(config.evals)} names",
            remedy="Leave the others out, or put the sets into benchmarks_path, a file NAME.json each",
        )
    for task, chosen in zip(config.evals, instruction_sets(config), strict=True):
        if task.num_fewshot or task.task_kwargs:
            raise BadInput(
                expected=f"neither num_fewshot nor task_kwargs for {task.name}: AlpacaEval has no use for them",
                found="at least one of them",
                remedy="Leave them out; evaluator.generation_params sets how outputs are sampled",
            )
        references = _read(chosen.references, content="outputs to compare with") if chosen.references else None
        if chosen.uri is None:
            continue
        if options.instructions_path is None and not storage.exists(chosen.uri):
            raise _unknown(task.name, config)
        instructions = _read(chosen.uri, content="instructions")
        _check_references(chosen, instructions, references)


def _check_references(chosen: InstructionSet, instructions: list[Instruction], given: list[Instruction] | None) -> None:
    known = {entry.instruction for entry in (instructions if given is None else given) if entry.output is not None}
    missing = [entry for entry in instructions if entry.instruction not in known]
    if missing:
        raise BadInput(
            expected=f"an output to compare with for each instruction of {chosen.key}",
            found=f"none for {len(missing)} of {len(instructions)} in {chosen.references or chosen.uri}",
            remedy="Add them as `output`, or name a file that has them as evaluator.reference_outputs_path",
        )


def _read(uri: str, *, content: str) -> list[Instruction]:
    expected = f"{content} in {uri}: a JSON list of objects with `instruction` and `output`"
    remedy = "Correct the file, or the path"
    if storage.content_digest(uri) is None:
        raise BadInput(expected=expected, found="no such file, or none that can be read", remedy=remedy)
    try:
        instructions = _INSTRUCTIONS.validate_python(json.loads(storage.read_bytes(uri, within="/")))
    except ValidationError as error:
        first: Any = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise BadInput(expected=expected, found=f"{place}: {first['msg']}", remedy=remedy) from error
    except ValueError as error:  # not JSON, or not text
        raise BadInput(expected=expected, found=str(error), remedy=remedy) from error
    if not instructions:
        raise BadInput(expected=expected, found="an empty list", remedy=remedy)
    return instructions


def _unknown(name: str, config: EvaluationConfig) -> BadInput:
    place = config.benchmarks_path or str(BUNDLED_SETS)
    names = [Path(storage.basename(file.uri)).stem for file in storage.list_files(place) if file.uri.endswith(".json")]
    remedy = "Correct its name in evals, or set benchmarks_path to the folder with its JSON file"
    expected = f"a set of instructions in {place}, or {OFFICIAL}"
    return unknown(expected, name, [*names, OFFICIAL], remedy, kind=UnknownBenchmark)
