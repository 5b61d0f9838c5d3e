"""Lists lm-eval's benchmarks, and which of them run model-written code. Runs in its environment, alone too."""

from __future__ import annotations

import contextlib
import gc
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
    return set(_runners(name, index, set()))


def _runners(name: str, index: dict[str, Entry], seen: set[str]) -> Iterator[str]:
    entry = index.get(name)
    if entry is None or name in seen:
        return
    seen.add(name)
    if entry.kind is Kind.TAG:
        for part in entry.tags:
            yield from _runners(part, index, seen)
        return
    path = entry.yaml_path
    if path is not None and path.is_relative_to(BUILT_IN) and path.relative_to(BUILT_IN).parts[0] in UNMARKED:
        yield name
    yield from _runners_in(name, entry.cfg or {}, index, seen)


def _runners_in(name: str, content: dict[str, Any], index: dict[str, Entry], seen: set[str]) -> Iterator[str]:
    if content.get("unsafe_code", False) is not False:
        yield name
    parts = content.get("task")
    for part in parts if isinstance(parts, list) else []:
        if isinstance(part, str):
            yield from _runners(part, index, seen)
        elif isinstance(part, dict):
            inner = part.get("group") or part.get("task")
            if isinstance(inner, str):
                yield from _runners(inner, index, seen)
                yield from _runners_in(inner, part, index, seen)
