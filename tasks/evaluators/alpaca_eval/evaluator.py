"""AlpacaEval: our program generates outputs through the endpoint; a judge compares them with a baseline's."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from pools.endpoint import RunningModel
from resources.errors import BadInput, not_there, unknown
from resources.storage import storage
from tasks.errors import UnknownBenchmark
from tasks.evaluators.alpaca_eval.environment import ALPACA_EVAL
from tasks.evaluators.alpaca_eval.options import AlpacaEvalOptions
from tasks.evaluators.alpaca_eval.results import folder_of, read_results
from tasks.evaluators.evaluator import Evaluator, endpoint_of, is_same_endpoint
from tasks.spec.benchmarks import BUNDLED, COPIED, benchmarks_here, copied_benchmarks
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


_BUNDLED_ANNOTATORS = BUNDLED_SETS / "annotators"
_DEFAULT_NEW_TOKENS = 2048
"""AlpacaEval's own default; half of what the model holds where that is less, so that prompts have room."""


def _job(model: RunningModel, config: EvaluationConfig, output: Path, judge: RunningModel | None) -> dict[str, Any]:
    options = config.options(AlpacaEvalOptions)
    judged_by = judge or model  # without a judge, the model judges itself
    key_variable = "OPENAI_API_KEY" if is_same_endpoint(judged_by, model) else "ASSAY_JUDGE_API_KEY"
    return {
        "sets": [
            {
                "key": instruction_set.key,
                "path": _path_here(instruction_set.uri, config),
                "references": _absolute(instruction_set.references),
                "folder": str(folder_of(output, instruction_set.key, config)),
            }
            for instruction_set in instruction_sets(config)
        ],
        "model": endpoint_of(model),
        "chat": model.apply_chat_template,
        "tokenizer": model.tokenizer,
        "prompt_template": options.prompt_template,
        "prompt_stops": options.prompt_stops,
        "sampling": _sampling(config, model),
        "engine_parameters": options.engine_parameters,
        "judge": {
            **endpoint_of(judged_by),
            "key_variable": key_variable,
            "elsewhere": options.judge.base_url is not None,
            "annotator": options.judge.annotator,
            "annotator_folders": _annotator_folders(config),
            "constrained": options.judge.constrained,
        },
        "length_control": _absolute(options.length_control_path),
    }


def _sampling(config: EvaluationConfig, model: RunningModel) -> dict[str, Any]:
    given = config.pool_config.model.generation_params if config.pool_config else None
    room = model.max_model_len // 2 if model.max_model_len else _DEFAULT_NEW_TOKENS
    longest = {"max_new_tokens": max(1, min(_DEFAULT_NEW_TOKENS, room))}
    return {**longest, **config.options(AlpacaEvalOptions).sampling(given)}


def _absolute(path: str | None) -> str | None:
    return str(storage.local_path(path).absolute()) if path is not None else None


def _path_here(uri: str | None, config: EvaluationConfig) -> str | None:
    if uri is not None and copied_benchmarks(config) and config.options(AlpacaEvalOptions).instructions_path is None:
        return f"{COPIED}/{storage.basename(uri)}"
    return _absolute(uri)


def _annotator_folders(config: EvaluationConfig) -> list[str]:
    if config.benchmarks_path is None:
        return [str(_BUNDLED_ANNOTATORS)]
    return [benchmarks_here(config), str(_BUNDLED_ANNOTATORS)]


def _check(config: EvaluationConfig, python: Path) -> None:
    check_instructions(config)
    annotator = config.options(AlpacaEvalOptions).judge.annotator
    own = [config.benchmarks_path] if config.benchmarks_path else []
    if any(
        storage.exists(storage.join(place, annotator, "configs.yaml")) for place in (*own, str(_BUNDLED_ANNOTATORS))
    ):
        return
    theirs = list(python.absolute().parents[1].glob("lib/python3*/site-packages/alpaca_eval/evaluators_configs"))
    if not theirs or (theirs[0] / annotator / "configs.yaml").is_file():
        return
    names = [path.parent.name for place in (_BUNDLED_ANNOTATORS, theirs[0]) for path in place.glob("*/configs.yaml")]
    expected = f"a configuration of a judge: {', '.join(sorted(names))}; or a folder in benchmarks_path"
    raise unknown(expected, annotator, names, "Correct evaluator.judge.annotator")


EVALUATOR = Evaluator(
    name="alpaca_eval",
    environments=(ALPACA_EVAL,),
    program=Path(__file__).parent / "programs" / "run_alpaca_eval.py",
    job=_job,
    read=read_results,
    bar=re.compile(
        r"(?P<stage>[^\r\n]{1,200}, (?:answers|verdicts)):[^\r\n]*?(?P<done>\d{1,15})/(?P<total>\d{1,15}) \["
    ),
    check=_check,
    import_variables={"TOKENIZERS_PARALLELISM": "false"},
)
"""AlpacaEval 0.6: our program generates outputs through the endpoint; a judge compares them with a baseline's."""
