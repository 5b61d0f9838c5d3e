"""Inspect, driven by our program in its environment.

Its tasks are in files of the benchmarks folder, which are parsed and never imported, or in a package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pools.endpoint import RunningModel
from resources.errors import BadInput, unknown
from resources.storage import storage
from tasks.errors import UnknownBenchmark
from tasks.evaluators.evaluator import (
    Evaluator,
    benchmarks_of,
    endpoint_of,
    is_same_endpoint,
)
from tasks.evaluators.inspect_ai.environment import INSPECT_AI
from tasks.evaluators.inspect_ai.options import InspectOptions
from tasks.evaluators.inspect_ai.results import read_results
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
    return {
        "benchmarks": [{**benchmark, "task": task.task, "file": task.file} for benchmark, task in pairs],
        **options.model_dump(mode="json", exclude={"name", "judge", "higher_is_better"}),
        "model": endpoint_of(model),
        "chat": model.apply_chat_template,
        "tokenizer": model.tokenizer,
        "takes_tools": _takes_tools(config),
        "longest_answer": min(_LONGEST_ANSWER, max(1, (model.max_model_len or 2 * _LONGEST_ANSWER) // 2)),
        "judge": {**endpoint_of(judge), "same_endpoint": is_same_endpoint(judge, model)} if judge is not None else None,
    }


def _takes_tools(config: EvaluationConfig) -> bool | None:
    if config.pool_config is None:
        return None
    given = {name.replace("-", "_") for name, value in config.pool_config.model.engine_kwargs.items() if value}
    return {"enable_auto_tool_choice", "tool_call_parser"} <= given


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
