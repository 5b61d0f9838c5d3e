"""Inspect's tasks by name: in files of the benchmarks folder, which are parsed and never imported, or in a package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from resources.errors import BadInput, unknown
from resources.storage import storage
from tasks.errors import UnknownBenchmark
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
