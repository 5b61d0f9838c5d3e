"""HELM, driven by our program in its environment, and checks of its run entries: its own, and those in a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel

from pools.endpoint import RunningModel
from resources.errors import BadInput, not_there, unknown
from resources.settings import settings
from resources.storage import storage
from tasks.errors import HarnessFailed, UnknownBenchmark
from tasks.evaluators.evaluator import Evaluator, benchmarks_of
from tasks.evaluators.helm.environment import HELM
from tasks.evaluators.helm.options import HelmOptions
from tasks.evaluators.helm.results import read_results
from tasks.evaluators.helm.runs import RESULTS_FOLDER
from tasks.evaluators.listings import listed, remembered
from tasks.records.record import SCOPE_NAME
from tasks.spec.benchmarks import benchmarks_uri
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

ALL_ENTRIES = "all"  # the benchmark that means every entry of a file
OWN_FOLDER = "helm"  # of a user's own run entries, inside the benchmarks folder
_PROGRAM = Path(__file__).parent / "programs" / "list_helm.py"


class _Arguments(BaseModel):
    needed: list[str]
    optional: list[str]
    any: bool


class _Known(BaseModel):
    entries: dict[str, _Arguments]
    expanders: list[str]


def check_entries(config: EvaluationConfig, python: Path) -> None:
    """Looks up every benchmark with its arguments."""
    _check_folder(config)
    path = config.options(HelmOptions).run_specs_path
    own = _own_names(config) if path is None else set()
    foreign = [task for task in config.evals if task.name not in own]
    if not foreign:
        return
    known = remembered(python, _PROGRAM, kind=_Known)
    if path is None:
        for task in foreign:
            if task.name not in known.entries:
                raise _unknown(
                    task.name, {*own, *known.entries}, place=f"HELM, or a benchmark in {benchmarks_uri(config)}"
                )
            _check_arguments(task, known)
            _check_needed(task, known)
        return
    present = _names_in(path, python)
    for name in sorted(present - set(known.entries)):
        raise _unknown(name, known.entries, place=f"HELM, as {path} has it")
    for task in config.evals:
        if task.name == ALL_ENTRIES:
            continue
        if task.name not in present:
            raise _unknown(task.name, present, place=path)
        _check_arguments(task, known)


def read_entries_file(uri: str) -> bytes:
    """Returns the content of a file of run entries."""
    if storage.content_digest(uri) is None:
        raise not_there("a file of run entries", f"run_specs_path={uri}", "Correct the path")
    return storage.read_bytes(uri, within="/")


def _check_folder(config: EvaluationConfig) -> None:
    path = config.benchmarks_path
    if path is not None and storage.is_local(path) and not storage.local_path(path).is_dir():
        expected = "a folder with the files that task_kwargs name"
        raise not_there(expected, f"benchmarks_path={path}", "Correct the path, or leave it out")


def _own_names(config: EvaluationConfig) -> set[str]:
    folder = storage.join(benchmarks_uri(config), OWN_FOLDER)
    names = {storage.basename(file.uri) for file in storage.list_files(folder)}
    return {name.removesuffix(".json") for name in names if name.endswith(".json")}


def _check_needed(task: EvalTaskConfig, known: _Known) -> None:
    needed = known.entries[task.name].needed
    missing = [name for name in needed if name not in task.task_kwargs]
    if missing:
        raise BadInput(
            expected=f"all arguments that {task.name} needs: {', '.join(needed)}",
            found=f"none for {', '.join(missing)}",
            remedy="Give them in task_kwargs",
        )


def _check_arguments(task: EvalTaskConfig, known: _Known) -> None:
    entry = known.entries[task.name]
    own = [*entry.needed, *entry.optional]
    for name in [] if entry.any else sorted(set(task.task_kwargs) - {*own, *known.expanders}):
        expected = f"arguments of {task.name} ({', '.join(own) or 'none'}) or of every run entry"
        raise unknown(expected, name, [*own, *known.expanders], "Correct task_kwargs")


def _unknown(name: str, known: Iterable[str], *, place: str) -> BadInput:
    remedy = "Correct its name in evals; arguments belong into task_kwargs"
    return unknown(f"a run entry of {place}", name, known, remedy, kind=UnknownBenchmark)


def _names_in(uri: str, python: Path) -> set[str]:
    content = read_entries_file(uri)
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "run_specs.conf"
        copy.write_bytes(content)
        try:
            descriptions: list[str] = json.loads(listed(python, _PROGRAM, str(copy)))
        except HarnessFailed as error:
            raise BadInput(
                expected="run entries as HELM reads them: entries: [{description: ..., priority: 1}]",
                found=error.found.splitlines()[-1],
                remedy=f"Correct {uri}",
            ) from error
    return {description.partition(":")[0] for description in descriptions}


_MOST_THREADS = 64
"""HELM uses a thread per request; more than 64 slow each other down."""


def _job(model: RunningModel, config: EvaluationConfig, output: Path, _: object) -> dict[str, Any]:
    options = config.options(HelmOptions)
    entries = read_entries_file(options.run_specs_path).decode() if options.run_specs_path is not None else None
    same = ("priority", "groups", "num_train_trials", "request_retries", "exit_on_error", "skip_completed_runs")
    return {
        "benchmarks": [{**benchmark, "arguments": benchmark["task_kwargs"]} for benchmark in benchmarks_of(config)],
        "run_specs": entries,
        **options.model_dump(mode="json", include={*same, "failed_control", "site"}),
        "num_threads": options.num_threads or max(1, min(model.capacity, _MOST_THREADS)),
        "begun_with": str(output.parent / SCOPE_NAME),
        "max_truncated": config.max_truncated,
        "model": model.model,
        "base_url": model.base_url.rstrip("/"),
        "tokenizer": model.tokenizer,
        "apply_chat_template": model.apply_chat_template,
        "prompt_logprobs": model.prompt_logprobs,
        **model.scoring.model_dump(),
        "trust_folder": str(settings().cache_dir / "loglikelihood"),
        "max_model_len": model.max_model_len,
        "request_timeout_seconds": model.request_timeout_seconds,
        "scenarios_path": str(settings().cache_dir / "helm" / "scenarios"),
        "results_folder": RESULTS_FOLDER,
    }


EVALUATOR = Evaluator(
    name="helm",
    environments=(HELM,),
    program=Path(__file__).parent / "programs" / "run_helm.py",
    job=_job,
    read=read_results,
    bar=re.compile(r"Answered (?P<done>\d{1,15}) of (?P<total>\d{1,15}) requests of (?P<stage>[^\r\n]+)"),
    check=check_entries,
    import_variables={"TOKENIZERS_PARALLELISM": "false"},
)
"""HELM 0.5."""
