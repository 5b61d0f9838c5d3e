"""Loads and checks the Inspect tasks of a job before the first request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from inspect_ai import Task, task_with
from inspect_ai._eval.loader import load_task_spec, solver_from_spec
from inspect_ai._util.registry import registry_params
from inspect_ai.solver import SolverSpec
from refusals import Refused

SANDBOXED_TOOLS = {
    *("bash", "bash_session", "code_execution", "computer", "grep", "list_files", "python", "read_file", "skill"),
    *("text_editor", "web_browser"),
}
"""Inspect's own tools that work in a sandbox."""
SHOWN_CHARACTERS = 300


def load_tasks(job: dict[str, Any]) -> dict[str, Task]:
    """Returns the tasks, keyed and named by the names that their metrics are published under."""
    tasks = {}
    for benchmark in job["benchmarks"]:
        task = _loaded(benchmark, job)
        _check(task, benchmark["name"], job)
        tasks[benchmark["key"]] = task_with(task, name=benchmark["key"])
    return tasks


def questions_of(task: Task, *, limit: int | None, epochs: int | None) -> int:
    """Returns the number of requested questions, over all epochs."""
    number = len(task.dataset) if limit is None else min(limit, len(task.dataset))
    return number * (epochs or task.epochs or 1)


def load_solver(job: dict[str, Any]) -> SolverSpec | None:
    """Returns the solver that replaces the tasks' own, if any; refuses a solver that cannot be created."""
    if job["solver"] is None:
        return None
    spec = SolverSpec(job["solver"], job["solver_args"], job["solver_args"])
    try:
        solver_from_spec(spec)
    except Exception as error:  # noqa: BLE001 - as with tasks
        _unusable(job["solver"], error)
    return spec


def _loaded(benchmark: dict[str, Any], job: dict[str, Any]) -> Task:
    name, file = benchmark["name"], benchmark["file"]
    spec = f"{Path(job['benchmarks_path']).absolute() / file}@{benchmark['task']}" if file else benchmark["task"]
    working_directory = os.getcwd()  # noqa: PTH109 - Inspect leaves a folder that a task's file goes to
    try:
        tasks = load_task_spec(spec, benchmark["task_kwargs"])
    except Exception as error:  # noqa: BLE001 - the code of a user's file may raise anything
        _unusable(name, error)
    finally:
        os.chdir(working_directory)
    if len(tasks) != 1:
        raise Refused(
            expected=f"a task {name} of Inspect, in the benchmarks folder or in a package of its environment",
            found=f"{len(tasks)} of that name",
            remedy="Correct its name in evals: task, file@task, or package@task",
            kind="UnknownBenchmark",
        )
    return tasks[0]


def _unusable(name: str, problem: str | Exception) -> NoReturn:
    if isinstance(problem, Exception):
        problem = f"{type(problem).__name__}: {str(problem)[:SHOWN_CHARACTERS]}"
    raise Refused(
        expected=f"a task or solver {name} that can be loaded, with its arguments",
        found=problem,
        remedy="Correct it, task_kwargs or evaluator.solver; `inspect eval` says more",
    )


def _check(task: Task, name: str, job: dict[str, Any]) -> None:
    if task.sample_source is not None:
        _unusable(name, "samples that are made while it runs, so their number is not known beforehand")
    if not len(task.dataset):
        _unusable(name, "no samples")
    tools = set(_tools_in(_params(task.solver), _params(task.setup)))
    sandboxes = {spec.type for spec in _sandboxes(task)}
    needs = {f"the sandbox {sandbox}" for sandbox in sandboxes}
    needs |= {f"the tool {tool}" for tool in tools & SANDBOXED_TOOLS}
    if needs and name not in job["allow_code_execution"]:
        raise Refused(
            expected=f"evaluator.allow_code_execution to name {name}, which lets the model act in a sandbox",
            found=f"it uses {', '.join(sorted(needs))}",
            remedy=f"Add {name} to evaluator.allow_code_execution (--allow-code {name}) if this machine may run what "
            "the model writes: it runs in Inspect's local sandbox, isolated as Assay isolates such code",
        )
    if needs and sandboxes != {"local"}:
        _unusable(name, f"it uses {', '.join(sorted(needs))}, and Assay runs the sandbox `local` alone")
    if tools and job["takes_tools"] is False and not job["emulate_tools"]:
        raise Refused(
            expected="an engine that takes requests with tools: enable_auto_tool_choice and tool_call_parser in "
            "engine_kwargs",
            found=f"{name} uses {', '.join(sorted(tools))}, and the pool's engine is started without them",
            remedy="Add --engine enable_auto_tool_choice=true --engine tool_call_parser=... with the parser of the "
            "model, or set evaluator.emulate_tools",
        )
    if tools and not job["chat"]:
        _unusable(name, "tools, and no chat template: apply_chat_template is not set")


def _sandboxes(task: Task) -> Iterator[Any]:
    if task.sandbox is not None:
        yield task.sandbox
    yield from (sample.sandbox for sample in task.dataset if sample.sandbox is not None)


def _params(part: Any) -> Any:
    parts = part if isinstance(part, list) else [part]
    return [getattr(each, "__registry_params__", None) and registry_params(each) for each in parts if each is not None]


def _tools_in(*values: Any) -> Iterator[str]:
    for value in values:
        if isinstance(value, dict):
            if value.get("type") == "tool" and isinstance(value.get("name"), str):
                yield value["name"].rpartition("/")[2]
            yield from _tools_in(*value.values())
        elif isinstance(value, list | tuple):
            yield from _tools_in(*value)
