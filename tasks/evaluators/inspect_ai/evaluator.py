"""Inspect, driven by our program in its environment, and the reader of our program's files.

Its tasks are in files of the benchmarks folder, which are parsed and never imported, or in a package. Our program
writes a plan before the first request, a row for each sample, and results.
"""

from __future__ import annotations

import ast
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from pools.endpoint import RunningModel
from resources.errors import BadInput, unknown
from resources.storage import storage
from resources.storage.regular_files import open_regular
from tasks.errors import UnknownBenchmark
from tasks.evaluators.environments import INSPECT_AI
from tasks.evaluators.evaluator import Evaluator, Parsed, benchmarks_of, endpoint_of, is_same_endpoint
from tasks.evaluators.inspect_ai.options import InspectOptions
from tasks.evaluators.reading import (
    PLAN_NAME,
    Unanswered,
    finish_of,
    invalid_results,
    is_unclosed,
    read_result,
    require_plan_of,
)
from tasks.records.details import Asking, BenchmarkDetails
from tasks.records.record import Counts, Metric
from tasks.records.samples import MOST_BYTES_OF_A_LINE, Sample
from tasks.spec.benchmarks import benchmarks_uri
from tasks.spec.evaluation import EvaluationConfig

_FOLDER = "inspect_ai"
"""Folder of tasks inside the benchmarks folder; they may also lie directly in that."""


@dataclass(frozen=True)
class FoundTask:
    """A task: its name in Inspect, and the file that defines it; None for a task of a package."""

    task: str
    file: str | None


def find_tasks(config: EvaluationConfig) -> list[FoundTask]:
    """Returns the tasks of an evaluation, in order: named `task`, `file@task` without .py, or `package@task`."""
    own = list(_own_tasks(config))
    return [_found(task.name, own, config) for task in config.evals]


def installed(package: str, python: Path) -> bool:
    """Returns True if a package is in an environment, or the environment is not built yet."""
    libraries = list(python.absolute().parents[1].glob("lib/python3*/site-packages"))
    return not libraries or any((library / package).is_dir() for library in libraries)


def _found(name: str, own: list[FoundTask], config: EvaluationConfig) -> FoundTask:
    before, at, task = name.partition("@")
    if not at:
        matching = [candidate for candidate in own if candidate.task == name]
        if len(matching) > 1:
            raise BadInput(
                expected=f"a single file with a task {name}",
                found=", ".join(str(candidate.file) for candidate in matching),
                remedy=f"say which: {_stem(matching[0])}@{name}",
            )
        if matching:
            return matching[0]
        expected = f"a task of Inspect in {benchmarks_uri(config)}, or package@task"
        names = {candidate.task for candidate in own}
        remedy = "Correct its name in evals, or benchmarks_path"
        raise unknown(expected, name, names, remedy, kind=UnknownBenchmark)
    matching = [candidate for candidate in own if candidate.task == task and _stem(candidate) == before]
    return matching[0] if matching else FoundTask(f"{before}/{task}", None)


def _stem(task: FoundTask) -> str:
    return storage.basename(task.file or "").removesuffix(".py")


def _own_tasks(config: EvaluationConfig) -> Iterator[FoundTask]:
    root = benchmarks_uri(config).rstrip("/")
    for file in storage.list_files(root):
        relative = file.uri.removeprefix(f"{root}/")
        if file.regular and relative.endswith(".py") and storage.parent(relative) in ("", _FOLDER):
            yield from (FoundTask(task, relative) for task in _defined(storage.read_bytes(file.place)))


def _defined(code: bytes) -> Iterator[str]:
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError):
        return
    for node in body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(called, ast.Name) and called.id == "task":
                yield node.name


_LONGEST_ANSWER = 2048
"""Default limit of tokens of an answer to a plain prompt; half of a shorter context."""


def _job(model: RunningModel, config: EvaluationConfig, output: Path, judge: RunningModel | None) -> dict[str, Any]:
    options = config.options(InspectOptions)
    pairs = zip(benchmarks_of(config), find_tasks(config), strict=True)
    engine_kwargs = config.pool_config.model.engine_kwargs if config.pool_config else {}
    given = {name.replace("-", "_") for name, value in engine_kwargs.items() if value}
    return {
        "benchmarks": [{**benchmark, "task": task.task, "file": task.file} for benchmark, task in pairs],
        **options.model_dump(mode="json", exclude={"name", "judge", "higher_is_better"}),
        "model": endpoint_of(model),
        "chat": model.apply_chat_template,
        "tokenizer": model.tokenizer,
        "takes_tools": {"enable_auto_tool_choice", "tool_call_parser"} <= given if config.pool_config else None,
        "longest_answer": min(_LONGEST_ANSWER, max(1, (model.max_model_len or 2 * _LONGEST_ANSWER) // 2)),
        "judge": {**endpoint_of(judge), "same_endpoint": is_same_endpoint(judge, model)} if judge is not None else None,
    }


def _check(config: EvaluationConfig, python: Path) -> None:
    for task, inspect_task in zip(config.evals, find_tasks(config), strict=True):
        package = inspect_task.task.partition("/")[0]
        if inspect_task.file is None and not installed(package, python):
            raise UnknownBenchmark(
                expected=f"a file of tasks called {package}.py, or the package {package} in Inspect's environment",
                found=f"{task.name!r}, and neither",
                remedy="Correct its name in evals, or name a pinned list that has the package in "
                "ASSAY_PINNED_LISTS, as that of inspect-ai",
            )
        if task.num_fewshot is not None:
            raise BadInput(
                expected=f"no num_fewshot of {task.name}: examples are the task's own affair in Inspect",
                found=str(task.num_fewshot),
                remedy="Leave it out, or pass the task's own argument for it, if any, in task_kwargs",
            )
    options = config.options(InspectOptions)
    if options.allow_code_execution and options.judge is not None and options.judge.elsewhere:
        raise BadInput(
            expected="no judge elsewhere where the model's code runs: nothing is reached there but the model",
            found="both evaluator.judge and evaluator.allow_code_execution",
            remedy="Evaluate tasks with a sandbox and tasks with a judge in separate evaluations",
        )


_HARNESS = "Inspect"
_NO_CONTROL = "no control: its scorers take no known answers"
_ROUNDING = 1e-9
LOGS = "inspect"  # folder of Inspect's own logs, for `inspect view --log-dir`


class _Plan(BaseModel):
    questions: dict[str, int]  # by benchmark, over all epochs
    asking: Asking = Asking()


class _Group(BaseModel):
    field: str
    template: str
    name: str

    def has(self, row: _Row) -> bool:
        return self.template.replace("{group_name}", row.metadata.get(self.field, "None")) == self.name


class _Number(BaseModel):
    name: str
    value: float
    stderr: float | None
    n: int | None
    better: bool | None
    score: str
    cluster: str | None
    group: _Group | None = None


class _Results(BaseModel):
    metrics: dict[str, list[_Number]]  # by benchmark; empty if its metrics failed
    logs: dict[str, str]
    problems: dict[str, str] = {}
    versions: dict[str, str] = {}
    unanswered: Unanswered = Unanswered()


class _Row(BaseModel):
    benchmark: str
    id: str
    epoch: int
    context: str
    prompt: str
    choices: list[str]
    target: str
    output: str
    answered: bool
    graded: bool
    scores: dict[str, float]
    finish: list[str]
    tokens: int | None
    metadata: dict[str, str]


def read_results(output: Path, config: EvaluationConfig) -> tuple[Parsed, Iterable[Sample]]:
    """Reads metrics and counts of the run in `output`, and a sample for each question in each epoch."""
    plan = read_result(_HARNESS, output / PLAN_NAME, _Plan)
    require_plan_of(plan.questions, config, harness=_HARNESS, output=output)
    results = read_result(_HARNESS, output / "results.json", _Results)
    rows, better = _rows(output), config.options(InspectOptions).higher_is_better
    details: dict[str, BenchmarkDetails] = {}
    answered = scored = errors = 0
    for key, questions in plan.questions.items():
        score_names = {number.score for number in results.metrics.get(key, ())}
        answers = [row for row in rows[key] if row.answered]
        without = [row for row in answers if not row.scores or not score_names <= set(row.scores)]
        answered, scored = answered + len(answers), scored + len(answers) - len(without)
        errors += sum(row.graded for row in without)
        unclosed = sum(is_unclosed(row.output) for row in rows[key])
        details[key] = BenchmarkDetails(questions=questions, unclosed=unclosed, control=_NO_CONTROL)
    requested = sum(plan.questions.values())
    if requested == answered == scored and not all(results.metrics.get(key) for key in plan.questions):
        problem = "; ".join(f"{key}: {why}" for key, why in results.problems.items())
        raise invalid_results(_HARNESS, output, problem or "no usable number")
    parsed = Parsed(
        metrics=tuple(
            _metric(key, number, better, rows[key]) for key, numbers in results.metrics.items() for number in numbers
        ),
        counts=Counts(requested=requested, answered=answered, scored=scored, judge_errors=errors),
        versions=results.versions,
        links={f"Inspect log of {key}": f"{LOGS}/{log}" for key, log in results.logs.items()},
        details=details,
        asking=plan.asking,
        unanswered=results.unanswered,
    )
    return parsed, _samples(results, {key: rows[key] for key in plan.questions}, config)


def _samples(results: _Results, rows: Mapping[str, Sequence[_Row]], config: EvaluationConfig) -> Iterator[Sample]:
    # A score is named after each metric that is its mean, else after the scorer. Questions are clustered by the
    # metadata field that the benchmark or the task's own error names; else the epochs of a question are a cluster.
    fields = {task.metric_key: task.cluster_by for task in config.evals}
    for key in rows:
        numbers = results.metrics.get(key, [])
        behind = {number.name: _behind(number, rows[key]) for number in numbers}
        means = {number.name: number.score for number in numbers if _is_mean(number, behind[number.name])}
        among = {name: {id(row) for row in behind[name]} for name in means}
        field = fields[key] or next((number.cluster for number in numbers if number.cluster), None)
        epochs = len({row.epoch for row in rows[key]}) > 1
        for row in rows[key]:
            own = {name: score for name, score in means.items() if score in row.scores and id(row) in among[name]}
            scores = {name: row.scores[score] for name, score in own.items()}
            others = {
                name.replace("\n", "_"): value for name, value in row.scores.items() if name not in means.values()
            }
            yield Sample(
                benchmark=key,
                id=f"{row.id}/epoch {row.epoch}" if epochs else row.id,
                prompt=row.prompt,
                context=row.context,
                output=row.output,
                target=row.target,
                choices=tuple(row.choices),
                scores={**others, **scores} if row.answered else {},
                cluster=row.metadata.get(field) if field else row.id if epochs else None,
                finish=finish_of(row.finish),
                tokens=row.tokens,
            )


def _metric(key: str, number: _Number, better: Mapping[str, bool], rows: Sequence[_Row]) -> Metric:
    within = {row.id for row in _behind(number, rows) if number.score in row.scores} if number.group else ()
    return Metric(
        benchmark=key,
        name=number.name,
        value=number.value,
        stderr=number.stderr,
        n=len(within) or number.n or 0,
        higher_is_better=better.get(number.name, number.better),
    )


def _behind(number: _Number, rows: Sequence[_Row]) -> Sequence[_Row]:
    return [row for row in rows if number.group and number.group.has(row)] or rows


def _is_mean(number: _Number, rows: Sequence[_Row]) -> bool:
    scores = [row.scores[number.score] for row in rows if number.score in row.scores]
    return bool(scores) and math.isclose(math.fsum(scores) / len(scores), number.value, abs_tol=_ROUNDING)


def _rows(output: Path) -> dict[str, list[_Row]]:
    rows: dict[str, list[_Row]] = defaultdict(list)
    path = output / "samples.jsonl"
    try:
        with open_regular(output, path.name) as lines:
            while line := lines.readline(MOST_BYTES_OF_A_LINE):  # the rest of a longer line is not a row
                row = _Row.model_validate_json(line)
                rows[row.benchmark].append(row)
    except OSError as error:
        raise invalid_results(_HARNESS, output, f"no readable {path.name} ({error})") from error
    except ValidationError as error:
        raise invalid_results(_HARNESS, output, f"a line of {path.name} that is not what our program writes") from error
    return rows


EVALUATOR = Evaluator(
    name="inspect_ai",
    environments=(INSPECT_AI,),
    program=Path(__file__).parent / "programs" / "run_inspect.py",
    job=_job,
    read=read_results,
    bar=re.compile(r"Answered (?P<done>\d{1,15}) of (?P<total>\d{1,15}) (?P<stage>samples)"),
    check=_check,
)
"""Inspect 0.3."""
