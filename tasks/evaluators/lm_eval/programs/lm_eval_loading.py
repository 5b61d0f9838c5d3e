"""Loads a job's benchmarks for `run_lm_eval.py`; refuses broken benchmarks, and wrong prompts or scores."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import logging
import os
import random
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from importlib.machinery import SourceFileLoader
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from datasets import Dataset, data_files
from datasets.fingerprint import get_temporary_cache_files_directory
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.config.task import TaskConfig
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import Entry, Kind
from lm_eval.utils import set_torch_seed
from lm_eval_index import BUILT_IN, code_runners, entries_behind, is_complete
from refusals import Refused, causes

CODE_VARIABLE = "HF_ALLOW_CODE_EVAL"
"""Allows the library that runs most model-written code to run it."""
NOT_FOR_OVERRIDES = {
    "group": "name",
    "include": "name",
    "num_fewshot": "num_fewshot",
    "tag": "name",
    "task": "name",
    "task_alias": "task_alias",
    "unsafe_code": "evaluator.allow_code_execution",
}
"""Keys of a benchmark's file that other fields of the configuration set."""


def task_manager(job: dict[str, Any], metadata: dict[str, Any]) -> TaskManager:
    """Returns a manager of the user's folder if that is enough, else also of everything that comes with lm-eval."""
    path = str(Path(job["benchmarks_path"]).absolute())  # data files are read from another working directory
    own = TaskManager(include_defaults=False, include_path=path, metadata=metadata)
    if all(is_complete(item["name"], own.task_index) for item in job["benchmarks"]):
        return own
    return TaskManager(include_path=path, metadata=metadata)


class Overriding(TaskFactory):
    """Builds benchmarks with overrides of their own configuration, in every part of a group."""

    def __init__(self, overrides: dict[str, Any], *, metadata: dict[str, Any]) -> None:
        super().__init__(meta=metadata)
        self._overrides = overrides

    def _load_full_config(self, entry: Entry, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
        content = super()._load_full_config(entry, overrides)
        return content if entry.kind is Kind.GROUP else merged(content, self._overrides)

    def _build_group_members(
        self, member_list: list[Any], group_name: str, overrides: dict[str, Any] | None, registry: dict[str, Entry]
    ) -> list[Task | Group]:
        members: list[Any] = [
            merged(item, self._overrides)
            if isinstance(item, dict) and "task" in item and "group" not in item and item["task"] not in registry
            else item
            for item in member_list
        ]
        return super()._build_group_members(members, group_name, overrides, registry)


def merged(content: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration with overrides; merges mappings in it, replaces all else."""
    result = dict(content)
    for key, value in overrides.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def load_benchmarks(job: dict[str, Any], manager: TaskManager) -> dict[str, list[Task | Group]]:
    """Returns every benchmark by key, with its number of examples set and its tasks renamed to be unique."""
    read_as_it_is()
    for item in job["benchmarks"]:
        _check_item(job, item, manager)
    allowed = set(job.get("allow_code_execution", ()))
    # Set here, not inherited: a variable of the user's is no permission for this evaluation.
    os.environ[CODE_VARIABLE] = "0"
    if any(code_runners(item["name"], manager.task_index) or item["name"] in allowed for item in job["benchmarks"]):
        os.environ[CODE_VARIABLE] = "1"
    return {item["key"]: load(job, item, manager) for item in job["benchmarks"]}


def read_as_it_is() -> None:
    """Makes this process see each change of a benchmark's data and code, even with unchanged time and size.

    `datasets` identifies data files by time, and functions that it has applied by name alone; Python identifies
    bytecode by its source's time and size. The environment's own packages do not change.
    """
    known_origin, known_stats = data_files._get_single_origin_metadata, SourceFileLoader.path_stats
    packages = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))

    def origin(data_file: str, *args: Any, **options: Any) -> tuple[str, ...]:
        place = data_file.rpartition("::")[2].removeprefix("file://")  # the archive's, if it lies in an archive
        if not os.path.isfile(place):  # noqa: PTH113 - may be no path at all
            return known_origin(data_file, *args, **options)
        with Path(place).open("rb") as file:
            return (hashlib.file_digest(file, "sha256").hexdigest(),)

    def cache_file(self: Dataset, fingerprint: str) -> str:
        return f"{get_temporary_cache_files_directory()}/cache-{fingerprint}.arrow"  # deleted with this process

    def path_stats(self: SourceFileLoader, path: str) -> Mapping[str, Any]:
        if not path.startswith(packages):
            raise OSError(f"no bytecode of {path}")
        return known_stats(self, path)

    data_files._get_single_origin_metadata = origin
    Dataset._get_cache_file_path = cache_file  # results of functions on data: random functions run once
    SourceFileLoader.path_stats = path_stats


def _check_item(job: dict[str, Any], item: dict[str, Any], manager: TaskManager) -> None:
    name = item["name"]
    if name not in manager.task_index:
        raise Refused(
            expected=f"a benchmark in {job['benchmarks_path']}, or in lm-eval itself",
            found=repr(name),
            remedy="Correct its name in evals, or set benchmarks_path to the folder with its YAML file",
            kind="UnknownBenchmark",
        )
    _check_code(job, name, code_runners(name, manager.task_index))
    known = {field.name for field in fields(TaskConfig)}
    for key in item.get("task_kwargs", {}):
        if key in NOT_FOR_OVERRIDES or key not in known:
            close = difflib.get_close_matches(key, known - NOT_FOR_OVERRIDES.keys(), n=1)
            field = NOT_FOR_OVERRIDES.get(key)
            raise Refused(
                expected=f"task_kwargs of {name} with keys of a benchmark's own configuration",
                found=f"{key}" + (f"; did you mean {close[0]}?" if close and not field else ""),
                remedy=f"Use {field} for that" if field else "Correct it, or leave it out",
            )


def _check_code(job: dict[str, Any], name: str, runners: set[str]) -> None:
    allowed = set(job.get("allow_code_execution", ()))
    if name in allowed or runners <= allowed:
        return
    raise Refused(
        expected=f"evaluator.allow_code_execution to name {name}, which runs code the model writes on this machine",
        found=", ".join(sorted(allowed)) or "an empty list",
        remedy=f"Add {name} to evaluator.allow_code_execution if the machine may be put at risk, or leave it out",
    )


def load(job: dict[str, Any], item: dict[str, Any], manager: TaskManager) -> list[Task | Group]:
    """Loads a benchmark, or refuses it."""
    name, key = item["name"], item["key"]
    # Some, such as gpqa, shuffle choices when they are loaded, so lm-eval seeds before. Here each gets the seeds of
    # lm-eval's only benchmark, so its questions do not depend on others loaded before it.
    seed()
    manager._factory = Overriding(item.get("task_kwargs", {}), metadata=manager.metadata or {})
    with contextlib.chdir(folder_of(name, manager)):  # data files are named relative to it
        try:
            loaded = manager.load([name])
        except Exception as error:  # noqa: BLE001 - a benchmark is third-party code, and may fail in any way
            refuse_unloadable(item, manager, error)
    groups = loaded.get("groups", {})
    parts = set(groups) - {child for group in groups.values() for child in group.child_names}
    inside = {task.task_name for group in groups.values() for task in group.get_all_tasks()}
    top: list[Task | Group] = [groups[part] for part in sorted(parts)]
    top += [task for task_name, task in loaded["tasks"].items() if task_name not in inside]
    tasks = list(loaded["tasks"].values())
    _check_code(job, name, {task.task_name for task in tasks if getattr(task, "UNSAFE_CODE", False)})
    _check_effect(item, tasks)
    _check_clusters(item, tasks)
    for task in tasks:
        _set_fewshot(task, item)
        generation = task.get_config("generation_kwargs")
        if generation and "max_tokens" in generation:  # the same to an engine, but lm-eval leaves no room for it
            generation["max_gen_toks"] = generation.pop("max_tokens")
    if key != name:
        for part in top:
            rename(part, key if name_of(part) == name else f"{key}.{name_of(part)}", prefix=key)
    return top


def seed() -> None:
    """Seeds the generators that a benchmark's code may use, as lm-eval does before it loads any."""
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    set_torch_seed(DEFAULT_OTHER_SEED)


def _set_fewshot(task: Task, item: dict[str, Any]) -> None:
    shots = item["num_fewshot"]
    task.notes = []
    if shots and task.get_config("num_fewshot") == 0 and not item["force_fewshot"]:
        task.notes.append(
            f"Asked without examples, not with {shots}: its own file says 0, which lm-eval keeps unless force_fewshot."
        )
    elif shots is not None:
        task.set_config(key="num_fewshot", value=shots)


def _check_clusters(item: dict[str, Any], tasks: list[Task]) -> None:
    field = item.get("cluster_by")
    documents = [document for task in tasks for document in islice(task.eval_docs, 1)] if field else []
    if field and not any(field in document for document in documents):
        raise Refused(
            expected=f"cluster_by of {item['name']} to be a field of its documents",
            found=f"{field}; they have {', '.join(sorted({name for document in documents for name in document}))}",
            remedy="Name one of these, or leave it out",
        )


def _check_effect(item: dict[str, Any], tasks: list[Task]) -> None:
    kinds = {task.OUTPUT_TYPE for task in tasks}
    ignored = []
    if item["num_fewshot"] and kinds == {"loglikelihood_rolling"}:
        ignored.append("num_fewshot, though it weighs whole texts")
    if "generation_kwargs" in item.get("task_kwargs", {}) and "generate_until" not in kinds:
        ignored.append("generation_kwargs, though it generates nothing")
    if ignored:
        raise Refused(
            expected=f"settings of {item['name']} that have an effect",
            found=" and ".join(ignored),
            remedy="Leave them out",
        )


def folder_of(name: str, manager: TaskManager) -> Path:
    """Returns the folder of a benchmark's file; for a tag, that of one of its benchmarks."""
    entry = manager.task_index[name]
    if entry.yaml_path is None and entry.tags:
        return folder_of(min(entry.tags), manager)
    return entry.yaml_path.parent if entry.yaml_path else Path.cwd()


def name_of(item: Task | Group) -> str:
    """Returns the name that lm-eval reports it under."""
    return item.name if isinstance(item, Group) else item.task_name


def rename(item: Task | Group, name: str, *, prefix: str) -> None:
    """Renames a task, or a group with all its parts."""
    if isinstance(item, Task):
        item.config.task = name
        return
    for child in list(item):
        item.pop(name_of(child))
        rename(child, f"{prefix}.{name_of(child)}", prefix=prefix)
        item.add(child)
    item.name = name


def leaves(items: list[Task | Group]) -> list[Task]:
    """Returns the tasks that have questions."""
    return [task for item in items for task in (item.get_all_tasks() if isinstance(item, Group) else [item])]


def check_tasks(job: dict[str, Any], tasks: dict[str, list[Task]], model_args: dict[str, Any]) -> None:
    """Refuses tasks that lm-eval would score wrongly, or fail at with an obscure message."""
    max_length = model_args["max_length"]
    names = Counter(name_of(task) for items in tasks.values() for task in items)
    twice = [name for name, times in names.items() if times > 1]
    if twice:
        raise Refused(
            expected="benchmarks that have no part in common",
            found=f"{', '.join(twice)} in more than one of {', '.join(tasks)}",
            remedy="Leave one of them out, or give it a task_alias",
        )
    for task in (task for items in tasks.values() for task in items):
        generates = task.OUTPUT_TYPE == "generate_until"
        if not generates and job.get("conversations"):
            raise Refused(
                expected=f"an endpoint with /completions, since {name_of(task)} needs log-probabilities of prompts",
                found="lm_eval.endpoint=chat_completions, which returns none",
                remedy="Set lm_eval.endpoint to completions if the endpoint has that, or leave this benchmark out",
                kind="EndpointUnusable",
            )
        if not generates and not job["prompt_logprobs"]:
            raise Refused(
                expected=f"an endpoint that returns log-probabilities of the prompt, which {name_of(task)} needs",
                found="an endpoint without them (echo with logprobs)",
                remedy="Serve the model with vLLM, or leave this benchmark out: its score would be chance",
                kind="EndpointUnusable",
            )
        generated = (task.get_config("generation_kwargs") or {}).get("max_gen_toks", 0)
        if generates and generated >= max_length - 1:
            raise Refused(
                expected=f"room for a prompt in addition to the {generated} tokens that {name_of(task)} may generate",
                found=f"a model that holds {max_length} tokens",
                remedy="Raise max_model_len in engine_kwargs, lower max_gen_toks in task_kwargs, or leave it out",
            )


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
    entries = entries_behind(name, manager.task_index)
    contents = [(path, content) for _, path, content in entries if path is not None]
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
