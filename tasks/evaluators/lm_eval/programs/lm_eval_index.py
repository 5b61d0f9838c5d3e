"""Index of lm-eval's benchmarks: names, code that models write, refusals of broken benchmarks. In its environment."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import pickle
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from lm_eval.tasks import TaskManager
from lm_eval.tasks import manager as task_managers
from lm_eval.tasks._index import Entry, Kind, TaskIndex
from refusals import Refused, causes

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


HUB_ERRORS = ("ConnectionError", "LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout")
NO_SCRIPT = "exist on the Hugging Face Hub either"  # in the metrics library's message if it cannot reach the hub
_log = logging.getLogger("lm_eval")


def refuse_unloadable(item: dict[str, Any], manager: TaskManager, error: Exception) -> NoReturn:
    """Refuses a benchmark that failed to load, with the cause: its data, the hub, or itself."""
    _log.error("%s cannot be loaded", item["name"], exc_info=error)
    name = item["name"]
    chain = list(causes(error))
    message = f"{type(error).__name__}: {error}"
    if any(type(cause).__name__ in HUB_ERRORS or NO_SCRIPT in str(cause) for cause in chain):
        offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
        # Unless set offline, the hub should be reachable, and may be so the next time.
        raise Refused(
            expected=f"the data of {name} on this machine" + ("" if offline else ", or the hub that has it"),
            found=f"{message}{' (offline)' if offline else ''}",
            remedy=f"Run `assay stage` for {name} where the hub can be reached, or correct the name of its data set",
            kind="BadInput" if offline else "StorageError",
        )
    contents = list(_contents_of(name, manager))
    built_in = bool(contents) and all(path.is_relative_to(BUILT_IN) for path, _ in contents)
    missing = next((cause for cause in chain if isinstance(cause, ImportError)), None)
    if built_in and missing is not None:
        needed = f", but for those in the folders {importing(missing.name)}" if missing.name else ""
        raise Refused(
            expected="a benchmark that can run in the environment of lm-eval",
            found=f"{name} cannot: {missing}",
            remedy=f"Evaluate another benchmark: all that come with lm-eval do without that import{needed}",
        )
    damage = next((place for path, content in contents if (place := _damaged_data(content, path)) is not None), None)
    raise Refused(
        expected=f"a benchmark {name} that lm-eval can load",
        found=damage or message,
        remedy=f"Correct task_kwargs, or take another benchmark; to undo changes in {sys.prefix}, delete that folder"
        if built_in
        else f"Mend {contents[0][0] if contents else 'its file'} or the data it names; see the error in harness.log",
    )


def _contents_of(name: str, manager: TaskManager) -> Iterator[tuple[Path, dict[str, Any]]]:
    entry = manager.task_index.get(name)
    if entry is None:
        return
    if entry.yaml_path is not None:
        yield entry.yaml_path, entry.cfg or {}
    parts = entry.tags if entry.kind is Kind.TAG else (entry.cfg or {}).get("task")
    for part in sorted(parts) if isinstance(parts, set) else parts if isinstance(parts, list) else []:
        if isinstance(part, str) and part != name:
            yield from _contents_of(part, manager)


def _damaged_data(content: dict[str, Any], path: Path) -> str | None:
    named = (content.get("dataset_kwargs") or {}).get("data_files")
    groups = named.values() if isinstance(named, dict) else [named]
    files = [file for group in groups for file in (group if isinstance(group, list) else [group])]
    for file in (file for file in files if isinstance(file, str) and "://" not in file and "*" not in file):
        place = path.parent / file
        if not place.is_file():
            return f"no file {place}"
        if content.get("dataset_path") != "json" or place.suffix != ".jsonl":
            continue
        for number, line in enumerate(place.read_text(errors="replace").splitlines(), start=1):
            try:
                json.loads(line or "{}")
            except ValueError as error:
                return f"line {number} of {place}, which is no JSON ({error})"
    return None


def importing(module: str) -> str:
    """Returns the folders of lm-eval's own benchmarks with code that imports a module."""
    line = re.compile(rf"^\s*(?:from|import)\s+{re.escape(module)}\b", re.MULTILINE)
    files = (path.relative_to(BUILT_IN) for path in BUILT_IN.rglob("*.py") if line.search(path.read_text("utf-8")))
    return ", ".join(sorted({path.parts[0] for path in files}))
