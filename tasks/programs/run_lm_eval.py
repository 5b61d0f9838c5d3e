"""Runs lm-eval on benchmarks listed in a job file. Executed by the interpreter of the lm-eval environment.

    python run_lm_eval.py <job file>
    python run_lm_eval.py --list        all benchmark names that come with lm-eval, as JSON

Also a program for `fork_server.py`: `preload` imports, and reads lm-eval's benchmarks if asked to, `main` evaluates.

A thin layer over lm-eval's own `simple_evaluate` and `EvaluationTracker`, which does what its command line cannot: it
leaves out the scan of all built-in benchmark files where none is wanted, gives each benchmark its own number of
examples and name, and says beforehand, in `plan.json`, how many questions will be asked. The key of the endpoint is
read by lm-eval itself from OPENAI_API_KEY.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import pickle
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from lm_eval import simple_evaluate
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.loggers import EvaluationTracker
from lm_eval.models import api_models
from lm_eval.tasks import TaskManager
from lm_eval.tasks import manager as task_managers
from lm_eval.tasks._index import Entry, TaskIndex
from lm_eval.utils import setup_logging

PLAN_NAME = "plan.json"
REFUSAL_NAME = "refused.json"
DEFAULT_CONTEXT = 2048
DEFAULT_GENERATED = 256
SAME_WARNINGS = 20
READ_AT_IMPORT = (
    "DISABLE_MULTIPROC",
    "HF_",
    "HUGGINGFACE_",
    "LMEVAL_",
    "TOKENIZERS_",
    "TRANSFORMERS_",
    "XDG_CACHE_HOME",
)
"""Beginnings of the variables that a fork server must have been started with, too."""
LATE_MODULES = (
    "datasets.packaged_modules.json.json",
    "lm_eval.models.openai_completions",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_fast",
)
"""What lm-eval imports when it is about to evaluate."""
REQUEST_TYPES = {"multiple_choice": "loglikelihood"}  # what a benchmark of that output type asks for
BUILT_IN = Path(task_managers.__file__).parent
BUILT_IN_OPTION = "--built-in"
INDEX_NAME = "benchmark-index.pickle"


def preload(arguments: list[str]) -> None:
    """Imports what lm-eval imports late, and with --built-in reads the index of its benchmarks."""
    for name in LATE_MODULES:
        importlib.import_module(name)
    if BUILT_IN_OPTION in arguments:
        built_in_index()


def main(arguments: list[str]) -> None:
    """Evaluates, or lists."""
    setup_logging("INFO")
    task_managers.TaskIndex = RememberedIndex
    if arguments == ["--list"]:
        print(json.dumps(TaskManager().all_tasks))
        return
    evaluate(json.loads(Path(arguments[0]).read_text()))


def evaluate(job: dict[str, Any]) -> None:
    """Asks, scores, and writes results and samples below `job["output"]`."""
    output = Path(job["output"])
    model_args = complete_model_args(job, output)
    manager = task_manager(job, model_args)
    benchmarks = load_benchmarks(job, manager, output)
    tasks = {key: leaves(item) for key, item in benchmarks.items()}
    check_tasks(job, tasks, model_args, output)
    write_json(output / PLAN_NAME, {"benchmarks": {key: plan(items, job["limit"]) for key, items in tasks.items()}})
    label_progress(tasks, job["prompts_per_request"])
    logging.getLogger("lm_eval.models.api_models").addFilter(few_of_each_kind())
    tracker = EvaluationTracker(output_path=str(output / job["results_folder"]))
    results = simple_evaluate(
        model="local-completions",
        model_args=model_args,
        tasks=[part for item in benchmarks.values() for part in item],
        task_manager=manager,
        batch_size=job["prompts_per_request"],
        limit=job["limit"],
        log_samples=True,
        evaluation_tracker=tracker,
        apply_chat_template=job["apply_chat_template"],
        fewshot_as_multiturn=job["apply_chat_template"],
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in results["configs"]:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    if not list(output.glob(f"{job['results_folder']}/*/results_*.json")):
        sys.exit("lm-eval could not write its results: see above")


def complete_model_args(job: dict[str, Any], output: Path) -> dict[str, Any]:
    """Adds what depends on the tokenizer and on how much the model holds."""
    from transformers import AutoTokenizer

    folder = job["model_args"]["tokenizer"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if job["apply_chat_template"] and not tokenizer.chat_template:
        refuse(
            output,
            kind="BadInput",
            expected="a tokenizer with a chat template, since apply_chat_template is set",
            found=f"none in {folder}",
            remedy="Add one to the checkpoint, or set apply_chat_template to false",
        )
    # As the model was trained, and as engines and the transformers library do it; a chat template brings its own.
    starts_with_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    max_length = job["max_model_len"] or context_of(Path(folder))
    return {
        **job["model_args"],
        "add_bos_token": starts_with_bos and not job["apply_chat_template"],
        "max_length": max_length,
        "max_gen_toks": min(DEFAULT_GENERATED, max_length // 2),
    }


def context_of(checkpoint: Path) -> int:
    """Tokens the model holds, by its own configuration; lm-eval's default where there is none."""
    try:
        return int(json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return DEFAULT_CONTEXT


def task_manager(job: dict[str, Any], model_args: dict[str, Any]) -> TaskManager:
    """Knows the folder of one's own alone where that is enough, else also all that comes with lm-eval."""
    path = job["benchmarks_path"]
    own = TaskManager(include_defaults=False, include_path=path, metadata=model_args)
    if all(is_complete(item["name"], own) for item in job["benchmarks"]):
        return own
    return TaskManager(include_path=path, metadata=model_args)


class RememberedIndex(TaskIndex):
    """An index that reads the files of lm-eval's own benchmarks once per environment."""

    @staticmethod
    def build(paths: Iterable[Path], *, resolve_includes: bool = True) -> dict[str, Entry]:
        """Entries by name; later folders win."""
        index: dict[str, Entry] = {}
        for path in paths:
            remembered = path == BUILT_IN and resolve_includes
            found = built_in_index() if remembered else TaskIndex.build([path], resolve_includes=resolve_includes)
            for name in index.keys() & found.keys():
                logging.getLogger("lm_eval").warning("%s of %s replaces the one that comes with lm-eval", name, path)
            index |= found
        return index


@cache
def built_in_index() -> dict[str, Entry]:
    """The benchmarks that come with lm-eval: fifteen thousand files, 13 s; from a file beside its packages 2 s."""
    path = Path(sys.prefix) / INDEX_NAME
    try:
        return pickle.loads(path.read_bytes())
    except (OSError, EOFError, ValueError, AttributeError, ImportError, pickle.UnpicklingError):
        index = TaskIndex.build([BUILT_IN])
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # an environment that may not be written to
        unfinished.write_bytes(pickle.dumps(index))
        unfinished.replace(path)
    return index


def is_complete(name: str, manager: TaskManager) -> bool:
    """Whether a benchmark is there, and if it is a group, all its parts too."""
    entry = manager.task_index.get(name)
    if entry is None:
        return False
    parts = (entry.cfg or {}).get("task")
    if not isinstance(parts, list):
        return True
    names = [part if isinstance(part, str) else part.get("task") or part.get("group") for part in parts]
    return all(isinstance(part, str) and is_complete(part, manager) for part in names)


def load_benchmarks(job: dict[str, Any], manager: TaskManager, output: Path) -> dict[str, list[Task | Group]]:
    """Every benchmark by its key, with its number of examples set and its tasks named so that no two collide."""
    benchmarks: dict[str, list[Task | Group]] = {}
    for item in job["benchmarks"]:
        name, key = item["name"], item["key"]
        if name not in manager.task_index:
            refuse(
                output,
                kind="UnknownBenchmark",
                expected=f"a benchmark in {job['benchmarks_path']} or one that comes with lm-eval",
                found=repr(name),
                remedy="Correct its name in evals, or set benchmarks_path to the folder with its YAML file",
            )
        with contextlib.chdir(folder_of(name, manager)):  # data files are named relative to it
            loaded = manager.load([name])
        parts = set(loaded["groups"]) - {child for group in loaded["groups"].values() for child in group.child_names}
        inside = {task.task_name for group in loaded["groups"].values() for task in group.get_all_tasks()}
        top: list[Task | Group] = [loaded["groups"][part] for part in sorted(parts)]
        top += [task for task_name, task in loaded["tasks"].items() if task_name not in inside]
        for task in loaded["tasks"].values():
            if item["num_fewshot"] is not None:
                task.set_config(key="num_fewshot", value=item["num_fewshot"])
        if key != name:
            for part in top:
                rename(part, key if name_of(part) == name else f"{key}.{name_of(part)}", prefix=key)
        benchmarks[key] = top
    return benchmarks


def folder_of(name: str, manager: TaskManager) -> Path:
    """Where the file of a benchmark lies; for a tag, that of one of its benchmarks."""
    entry = manager.task_index[name]
    if entry.yaml_path is None and entry.tags:
        return folder_of(min(entry.tags), manager)
    return entry.yaml_path.parent if entry.yaml_path else Path.cwd()


def name_of(item: Task | Group) -> str:
    """The name lm-eval reports it under."""
    return item.name if isinstance(item, Group) else item.task_name


def rename(item: Task | Group, name: str, *, prefix: str) -> None:
    """Publishes a task, or a group with all that is in it, under another name."""
    if isinstance(item, Task):
        item.config.task = name
        return
    for child in list(item):
        item.pop(name_of(child))
        rename(child, f"{prefix}.{name_of(child)}", prefix=prefix)
        item.add(child)
    item.name = name


def leaves(items: list[Task | Group]) -> list[Task]:
    """The tasks that ask questions."""
    return [task for item in items for task in (item.get_all_tasks() if isinstance(item, Group) else [item])]


def check_tasks(job: dict[str, Any], tasks: dict[str, list[Task]], model_args: dict[str, Any], output: Path) -> None:
    """Refuses what lm-eval would score wrongly, or fail at with a message nobody understands."""
    twice = [
        name
        for name, times in Counter(name_of(task) for items in tasks.values() for task in items).items()
        if times > 1
    ]
    if twice:
        refuse(
            output,
            kind="BadInput",
            expected="benchmarks that have no part in common",
            found=f"{', '.join(twice)} in more than one of {', '.join(tasks)}",
            remedy="Leave one of them out, or give it a task_alias",
        )
    for task in (task for items in tasks.values() for task in items):
        if task.OUTPUT_TYPE != "generate_until" and not job["prompt_logprobs"]:
            refuse(
                output,
                kind="EndpointUnusable",
                expected=f"an endpoint that returns log-probabilities of the prompt, which {name_of(task)} needs",
                found="one that does not (echo with logprobs)",
                remedy="Serve the model with vLLM, or leave this benchmark out: its score would be chance",
            )
        generated = (task.get_config("generation_kwargs") or {}).get("max_gen_toks", 0)
        if task.OUTPUT_TYPE == "generate_until" and generated >= model_args["max_length"] - 1:
            refuse(
                output,
                kind="BadInput",
                expected=f"room for a prompt beside the {generated} tokens that {name_of(task)} may generate",
                found=f"a model that holds {model_args['max_length']} tokens",
                remedy="Raise max_model_len in engine_kwargs if the model allows it, or leave this benchmark out",
            )


def plan(tasks: list[Task], limit: int | None) -> dict[str, Any]:
    """How many questions each task will ask, known before the first one."""
    asked = {name_of(task): len(task.eval_docs) for task in tasks}
    return {
        name_of(task): {
            "questions": asked[name_of(task)] if limit is None else min(limit, asked[name_of(task)]),
            "output_type": task.OUTPUT_TYPE,
        }
        for task in tasks
    }


def label_progress(tasks: dict[str, list[Task]], prompts_per_request: int) -> None:
    """Lets lm-eval's progress bars say which benchmarks they are about, and how much there is in all.

    The harness counts requests, people count prompts: the last request may hold fewer than the others, so the end of a
    bar may say a few too many.
    """
    stage = {"names": "", "before": 0, "all": 0}

    def note(record: logging.LogRecord) -> bool:
        if record.msg == "Running %s requests" and record.args:
            kind = record.args[0]
            instances = [instance for items in tasks.values() for task in items for instance in task.instances]
            stage["all"] = sum(instance.repeats for instance in instances)
            asking = [key for key, items in tasks.items() if any(request_type(task) == kind for task in items)]
            stage["names"] = ", ".join(asking)
        return True

    class LabelledBar(api_models.tqdm_asyncio):
        """The bar of one batch of requests; a request type may need several."""

        def __init__(self, *args: Any, **options: Any) -> None:
            label = f"Requesting API ({stage['names']}; {stage['before']} before, {stage['all']} in all)"
            super().__init__(*args, **{**options, "desc": label, "unit_scale": prompts_per_request})

        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            stage["before"] += (self.total or 0) * prompts_per_request

    logging.getLogger("lm_eval.evaluator").addFilter(note)
    api_models.tqdm_asyncio = LabelledBar


def request_type(task: Task) -> str:
    """What a task asks of a model."""
    return REQUEST_TYPES.get(task.OUTPUT_TYPE, task.OUTPUT_TYPE)


def few_of_each_kind() -> logging.Filter:
    """Lets the first warnings of a kind through: the harness writes one per request, prompts included."""
    seen: Counter[str] = Counter()

    class Few(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            kind = str(record.msg)[:24]
            seen[kind] += 1
            return seen[kind] <= SAME_WARNINGS

    return Few()


def refuse(output: Path, *, kind: str, expected: str, found: str, remedy: str) -> NoReturn:
    """Ends the program, with the reason in a file for the orchestrator and on standard error for people."""
    write_json(output / REFUSAL_NAME, {"kind": kind, "expected": expected, "found": found, "remedy": remedy})
    sys.exit(f"refused: expected {expected}, found {found}")


def write_json(path: Path, content: Any) -> None:
    """Writes a file that another program reads."""
    path.write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
