"""Inspect, driven by our program in its environment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pools.endpoint import RunningModel
from resources.errors import BadInput
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
from tasks.evaluators.inspect_ai.tasks import find_tasks, installed
from tasks.spec.evaluation import EvaluationConfig

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
