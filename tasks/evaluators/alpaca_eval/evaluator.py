"""AlpacaEval: our program generates outputs through the endpoint; a judge compares them with a baseline's.

Any of the program's files may be incomplete. Instructions are counted in the plan, written before the first request;
outputs and verdicts in their files.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from pools.endpoint import RunningModel
from resources.errors import BadInput, not_there, unknown
from resources.storage import storage
from tasks.errors import UnknownBenchmark
from tasks.evaluators.alpaca_eval.options import AlpacaEvalOptions
from tasks.evaluators.environments import ALPACA_EVAL
from tasks.evaluators.evaluator import Evaluator, Parsed, endpoint_of, is_same_endpoint
from tasks.evaluators.reading import PLAN_NAME, Unanswered, invalid_results, is_unclosed, read_result, require_plan_of
from tasks.records.details import Asking, BenchmarkDetails
from tasks.records.record import Counts, Metric
from tasks.records.samples import Sample
from tasks.spec.benchmarks import BUNDLED, COPIED, benchmarks_here, copied_benchmarks
from tasks.spec.evaluation import EvaluationConfig

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
    options, folder = config.options(AlpacaEvalOptions), config.benchmarks_path or str(BUNDLED_SETS)
    sets = []
    for task in config.evals:
        own = storage.join(folder, f"{task.name}.json") if task.name != OFFICIAL else None
        sets.append(InstructionSet(task.metric_key, options.instructions_path or own, options.reference_outputs_path))
    return tuple(sets)


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
    own_folder = [benchmarks_here(config)] if config.benchmarks_path is not None else []
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
            "annotator_folders": [*own_folder, str(_BUNDLED_ANNOTATORS)],
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


_HARNESS = "AlpacaEval"

RESULTS_NAME = "results.json"
OUTPUTS_NAME = "model_outputs.json"
REFERENCES_NAME = "reference_outputs.json"
ANNOTATIONS_NAME = "annotations.json"
_LENGTH = "avg_length"
_NO_CONTROL = "no control: a judge compares answers, and none is right"
WIN_RATE = "win_rate"


class _Plan(BaseModel):
    sets: dict[str, int]
    asking: Asking = Asking()


class _Results(BaseModel):
    metrics: dict[str, dict[str, float | None]]  # by set; empty for a set that was not judged
    versions: dict[str, str] = {}
    unanswered: Unanswered = Unanswered()


def folder_of(output: Path, key: str, config: EvaluationConfig) -> Path:
    """Returns the folder with a set's files: the attempt's folder itself, unless there are several sets."""
    return output if len(config.evals) == 1 else output / key


def read_results(output: Path, config: EvaluationConfig) -> tuple[Parsed, Iterable[Sample]]:
    """Reads metrics and counts of the run in `output`, and a sample for each instruction, answered or not."""
    plan = read_result(_HARNESS, output / PLAN_NAME, _Plan)
    require_plan_of(plan.sets, config, harness=_HARNESS, output=output)
    results = read_result(_HARNESS, output / RESULTS_NAME, _Results)
    samples: list[Sample] = []
    requested = answered = scored = errors = left_out = 0
    metrics: list[Metric] = []
    details: dict[str, BenchmarkDetails] = {}
    for key, questions in plan.sets.items():
        judged, answers = _judged(folder_of(output, key, config), key)
        samples += judged
        usable = sum(bool(sample.scores) for sample in judged)
        numbers = results.metrics.get(key, {})
        requested, answered, scored = requested + questions, answered + answers, scored + usable
        without = answers - usable if numbers else 0
        errors += without
        if answers == questions and 0 < without <= config.options(AlpacaEvalOptions).max_judge_errors * questions:
            left_out += without
        metrics += _metrics(key, numbers, judged=usable, answered=answers)
        unclosed = sum(is_unclosed(sample.output) for sample in judged)
        details[key] = BenchmarkDetails(questions=questions, unclosed=unclosed, control=_NO_CONTROL)
    with_win_rate = {metric.benchmark for metric in metrics if metric.name == WIN_RATE}
    if requested == answered and scored + left_out == requested and with_win_rate != set(plan.sets):
        raise invalid_results(_HARNESS, output, "no usable win rate")
    # Outputs that max_judge_errors leaves out of the win rate do not count as requested.
    counts = Counts(requested=requested - left_out, answered=answered - left_out, scored=scored, judge_errors=errors)
    parsed = Parsed(
        metrics=tuple(metrics),
        counts=counts,
        versions=results.versions,
        details=details,
        asking=plan.asking,
        unanswered=results.unanswered,
    )
    return parsed, samples


def _metrics(key: str, numbers: dict[str, float | None], *, judged: int, answered: int) -> Iterator[Metric]:
    for name, value in numbers.items():
        if name.endswith("_stderr") or value is None or not math.isfinite(value):
            continue
        error = numbers.get(f"{name}_stderr")
        yield Metric(
            benchmark=key,
            name=name,
            value=value,
            stderr=error if error is not None and math.isfinite(error) else None,
            n=answered if name == _LENGTH else judged,
            higher_is_better=None if name == _LENGTH else True,
        )


def _judged(folder: Path, key: str) -> tuple[list[Sample], int]:
    # Also the number of outputs.
    references: dict[str, list[Any]] = defaultdict(list)
    for row in _rows(folder / REFERENCES_NAME):
        references[row["instruction"]].append(row.get("output"))
    preferences: dict[tuple[str, Any], dict[Any, float | None]] = defaultdict(dict)
    for row in _rows(folder / ANNOTATIONS_NAME):
        preference = row.get("preference")
        share = preference - 1 if isinstance(preference, int | float) and 1 <= preference <= 2 else None
        preferences[row["instruction"], str(row.get("output_2"))][str(row.get("output_1"))] = share
    judged: list[Sample] = []
    seen: Counter[str] = Counter()
    outputs = _rows(folder / OUTPUTS_NAME)
    for row in outputs:
        instruction, output, prompt = row["instruction"], row.get("output"), row.get("prompt")
        reason, tokens = row.get("finish_reason"), row.get("completion_tokens")
        is_answered = isinstance(output, str)
        # An instruction may occur twice, with another output to compare with each time.
        reference = references[instruction].pop(0) if references[instruction] else None
        preference = _verdict(preferences[instruction, output], reference) if is_answered else None
        digest = hashlib.sha256(instruction.encode()).hexdigest()[:12]
        seen[digest] += 1
        asked = prompt if isinstance(prompt, str) else instruction
        before = max(asked.rfind(instruction), 0)
        judged.append(
            Sample(
                benchmark=key,
                id=digest if seen[digest] == 1 else f"{digest}-{seen[digest]}",
                prompt=asked[before:],
                output=output if is_answered else "",
                target=reference if isinstance(reference, str) else None,
                scores={} if preference is None else {WIN_RATE: preference},
                finish=reason if is_answered and isinstance(reason, str) else None,
                context=asked[:before],
                tokens=tokens if is_answered and isinstance(tokens, int) else None,
            )
        )
    return judged, sum(isinstance(row.get("output"), str) for row in outputs)


def _verdict(by_reference: dict[Any, float | None], reference: Any) -> float | None:
    if isinstance(reference, str):
        return by_reference.get(reference)
    return next(iter(by_reference.values())) if len(by_reference) == 1 else None


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    rows = content if isinstance(content, list) else []
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("instruction"), str)]


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
