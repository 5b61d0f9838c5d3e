"""Refuses benchmarks that lm-eval cannot load: due to their data, the hub, or themselves. Runs in its environment."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Kind
from lm_eval_index import BUILT_IN
from refusals import Refused, causes

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
