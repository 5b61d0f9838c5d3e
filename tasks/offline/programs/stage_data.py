"""Fetches the data sets of benchmarks, and tokenizers, into the hub's cache. Executed in the lm-eval environment.

    python stage_data.py fetch <job file>     writes the manifest that the job names
    python stage_data.py prove <job file>     loads everything again without a network; writes the failures

Each benchmark is loaded as by a worker, so that all data that lm-eval fetches for it, by any code, is in the cache
afterwards. Only `datasets.load_dataset` is wrapped, to fetch a fixed revision of a data set and to record it.
Benchmarks that are in the manifest are skipped.
"""

# ruff: noqa: E402 - the libraries are imported without the garbage collector
from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # -I leaves it out
_EVALUATORS = Path(__file__).parents[2] / "evaluators"
sys.path += [str(_EVALUATORS / "lm_eval" / "programs"), str(_EVALUATORS / "programs")]

gc.disable()  # collection would take a quarter of the time and find no garbage
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from stage_hub import (
    Pinned,
    begun,
    call_it_main,
    describe_datasets,
    patiently,
    repository_folder,
    shown,
    size_of,
    tell,
    write,
)

gc.freeze()
gc.enable()

PARTS = ("benchmarks", "datasets", "tokenizers", "files_of_datasets")
"""Parts of the manifest that this program writes; other parts are left unchanged."""
TOKENIZER_FILES = (
    "tokenizer*",
    "*.model",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "config.json",
    "generation_config.json",
    "tekken.json",
)


def main(arguments: list[str]) -> None:
    """Fetches, or proves."""
    action, path = arguments
    job = json.loads(Path(path).read_text())
    {"fetch": fetch, "prove": prove}[action](job)


def fetch(job: dict[str, Any]) -> None:
    """Fetches data that the manifest lacks; the manifest is written last."""
    staged, done, unfinished = begun(job, PARTS)
    problems: dict[str, str] = {}
    known = {} if job["refresh"] else {path: dataset["revision"] for path, dataset in staged["datasets"].items()}
    pinned = Pinned({**known, **job["revisions"]})
    names = [name for name in job["benchmarks"] if job["refresh"] or name not in done.get("benchmarks", {})]
    load = loader(job) if names else None
    for number, name in enumerate(names, 1):
        pinned.used = {}
        try:
            assert load is not None
            load(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any code of any benchmark; the others are wanted
            problems[name] = shown(error)
            tell(f"{number} of {len(names)} {name}: {problems[name]}")
            continue
        staged["benchmarks"][name] = dict(pinned.used)
        staged["datasets"].update({path: {"revision": revision} for path, revision in pinned.used.items()})
        write(unfinished, staged)
        at = ", ".join(f"{path}@{revision[:10]}" for path, revision in pinned.used.items()) or "nothing to fetch"
        tell(f"{number} of {len(names)} {name}: {at}")
    for asked in job["tokenizers"]:
        name, _, revision = asked.partition("@")
        try:
            commit = fetch_tokenizer(name, revision or None)
        except Exception as error:  # noqa: BLE001 - as above
            problems[name] = shown(error)
            continue
        size = size_of(repository_folder("models", name))
        staged["tokenizers"][name] = {"asked": revision, "revision": commit, "bytes": size}
        write(unfinished, staged)
        tell(f"{name}@{commit[:10]}")
    for path, files in job["files_of_datasets"].items():
        try:
            commit = fetch_files(path, files, pinned.revisions.get(path))
        except Exception as error:  # noqa: BLE001 - as above
            problems[path] = shown(error)
            continue
        size = size_of(repository_folder("datasets", path))
        staged["files_of_datasets"][path] = {"revision": commit, "files": files, "bytes": size}
        tell(f"{path}@{commit[:10]}")
    describe_datasets(staged)
    staged["libraries"] = {name: metadata.version(name) for name in ("datasets", "huggingface_hub", "lm_eval")}
    write(Path(job["problems"]), problems)
    write(unfinished, staged)
    unfinished.replace(job["manifest"])


def prove(job: dict[str, Any]) -> None:
    """Loads everything as an offline worker does; writes the failures by name."""
    problems: dict[str, str] = {}
    load = loader(job) if job["benchmarks"] else None
    for name in job["benchmarks"]:
        try:
            assert load is not None
            load(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            problems[name] = shown(error)
    for asked in job["tokenizers"]:
        name = asked.partition("@")[0]
        try:
            load_tokenizer(name)
        except Exception as error:  # noqa: BLE001 - as above
            problems[name] = shown(error)
    for path, files in job["files_of_datasets"].items():
        try:
            for file in files:
                hf_hub_download(path, file, repo_type="dataset")
        except Exception as error:  # noqa: BLE001 - as above
            problems[path] = shown(error)
    write(Path(job["problems"]), problems)


def loader(job: dict[str, Any]) -> Callable[[str], Any]:
    """Returns a function that loads a benchmark with all its parts, as the evaluating program does."""
    gc.disable()
    from lm_eval.tasks import TaskManager
    from lm_eval_index import use_remembered_index
    from lm_eval_loading import folder_of

    use_remembered_index()
    manager = TaskManager(include_path=job["benchmarks_path"])
    gc.freeze()
    gc.enable()

    def load(name: str) -> None:
        if name not in manager.task_index:
            raise LookupError("lm-eval knows no benchmark of that name")
        with contextlib.chdir(folder_of(name, manager)):  # data files are named relative to it
            manager.load([name])

    return load


def fetch_tokenizer(name: str, revision: str | None) -> str:
    """Fetches a tokenizer and returns its commit."""
    commit = str(patiently(lambda: HfApi().model_info(name, revision=revision).sha))
    patiently(lambda: snapshot_download(name, revision=commit, allow_patterns=list(TOKENIZER_FILES)))
    patiently(lambda: load_tokenizer(name, revision=commit))  # records which optional files are missing
    call_it_main(repository_folder("models", name), commit)
    return commit


def load_tokenizer(name: str, **options: Any) -> None:
    """Loads a tokenizer, as the evaluating program does."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(name, **options)


def fetch_files(path: str, files: list[str], revision: str | None) -> str:
    """Fetches some files of a data set and returns its commit."""
    commit = str(patiently(lambda: HfApi().dataset_info(path, revision=revision).sha))
    for file in files:
        patiently(lambda file=file: hf_hub_download(path, file, repo_type="dataset", revision=commit))
    call_it_main(repository_folder("datasets", path), commit)
    return commit


if __name__ == "__main__":
    main(sys.argv[1:])
