"""Lists lm-eval's benchmarks, and which of them run model-written code. Runs in its environment, alone too."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import pickle
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager
from lm_eval.tasks import manager as task_managers
from lm_eval.tasks._index import Entry, Kind, TaskIndex

BUILT_IN = Path(task_managers.__file__).parent
INDEX_NAME = "benchmark-index.pickle"
BUILT_IN_OPTION = "--built-in"
UNMARKED = ("cruxeval",)
"""Folders of lm-eval with benchmarks that run code without being marked so."""


class RememberedIndex(TaskIndex):
    """An index that reads the files of lm-eval's own benchmarks once per environment."""

    @staticmethod
    def build(paths: Iterable[Path], *, resolve_includes: bool = True) -> dict[str, Entry]:
        index: dict[str, Entry] = {}
        for path in paths:
            remembered = path == BUILT_IN and resolve_includes
            entries = built_in_index() if remembered else TaskIndex.build([path], resolve_includes=resolve_includes)
            for name in index.keys() & entries.keys():
                logging.getLogger("lm_eval").warning(
                    "%s of %s replaces the benchmark that comes with lm-eval", name, path
                )
            index |= entries
        return index


@cache
def built_in_index() -> dict[str, Entry]:
    """Returns lm-eval's own benchmarks: 13 s from its fifteen thousand files, 1 s from a file next to its packages."""
    path, collects = Path(sys.prefix) / INDEX_NAME, gc.isenabled()
    gc.disable()  # garbage collection would take half of the time, for nothing
    try:
        return pickle.loads(path.read_bytes())
    except (OSError, EOFError, ValueError, AttributeError, ImportError, pickle.UnpicklingError):
        index = TaskIndex.build([BUILT_IN])
    finally:
        if collects:
            gc.enable()
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a read-only environment
        unfinished.write_bytes(pickle.dumps(index))
        unfinished.replace(path)
    return index


def preload_for(arguments: list[str], late_modules: Iterable[str]) -> None:
    """Imports modules that are otherwise imported late; with --built-in reads the index of lm-eval's benchmarks."""
    for name in late_modules:
        importlib.import_module(name)
    if BUILT_IN_OPTION in arguments:
        built_in_index()


def use_remembered_index() -> None:
    """Makes task managers read lm-eval's own benchmarks only once."""
    task_managers.TaskIndex = RememberedIndex


def listing() -> dict[str, list[str]]:
    """Returns all names that lm-eval has, and the names of benchmarks that run model-written code."""
    manager = TaskManager()
    runners = [name for name in manager.all_tasks if code_runners(name, manager.task_index)]
    return {"benchmarks": manager.all_tasks, "run_code": runners}


def is_complete(name: str, index: dict[str, Entry]) -> bool:
    """Returns True if a benchmark exists, and for a group also all its parts."""
    entry = index.get(name)
    if entry is None:
        return False
    parts = (entry.cfg or {}).get("task")
    if not isinstance(parts, list):
        return True
    names = [part if isinstance(part, str) else part.get("task") or part.get("group") for part in parts]
    return all(isinstance(part, str) and is_complete(part, index) for part in names)


def code_runners(name: str, index: dict[str, Entry]) -> set[str]:
    """Returns the benchmarks behind a name that run model-written code, by their files: some run code when imported."""

    def is_unmarked(path: Path | None) -> bool:
        return path is not None and path.is_relative_to(BUILT_IN) and path.relative_to(BUILT_IN).parts[0] in UNMARKED

    return {
        part
        for part, path, content in entries_behind(name, index)
        if content.get("unsafe_code", False) is not False or is_unmarked(path)
    }


def entries_behind(name: str, index: dict[str, Entry]) -> Iterator[tuple[str, Path | None, dict[str, Any]]]:
    """Yields name, file and content of a benchmark, and of all parts of a group or a tag, as far as they exist.

    Parts that are described in a group's file have no file.
    """
    left: list[Any] = [name]
    seen: set[str] = set()
    while left:
        part = left.pop(0)
        if isinstance(part, dict):
            own, path, content, parts = part.get("group") or part.get("task"), None, part, part.get("task")
            left.append(own)  # its own file may have parts, too
        elif isinstance(part, str) and part in index and part not in seen:
            seen.add(part)
            entry = index[part]
            own, path, content = part, entry.yaml_path, entry.cfg or {}
            parts = sorted(entry.tags) if entry.kind is Kind.TAG else content.get("task")
        else:
            continue
        if isinstance(own, str):
            yield own, path, content
        left += parts if isinstance(parts, list) else []
