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
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # -I leaves it out
_EVALUATORS = Path(__file__).parents[2] / "evaluators"
sys.path += [str(_EVALUATORS / "lm_eval" / "programs"), str(_EVALUATORS / "programs")]

gc.disable()  # collection would take a quarter of the time and find no garbage
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from stage_hub import Pinned, Staging, call_it_main, patiently, prove_each, repository_folder, size_of

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
    staging = Staging(job, PARTS)
    pinned = Pinned({**staging.known(), **job["revisions"]})
    load = cache(lambda: loader(job))

    def benchmark(name: str) -> tuple[dict[str, Any], str]:
        pinned.used = {}
        load()(name)
        staging.staged["datasets"].update({path: {"revision": commit} for path, commit in pinned.used.items()})
        fetched = ", ".join(f"{path}@{commit[:10]}" for path, commit in pinned.used.items()) or "nothing to fetch"
        return dict(pinned.used), fetched

    def tokenizer(name: str, revision: str) -> tuple[dict[str, Any], str]:
        commit = fetch_tokenizer(name, revision or None)
        size = size_of(repository_folder("models", name))
        return {"asked": revision, "revision": commit, "bytes": size}, f"@{commit[:10]}"

    def dataset_files(path: str, files: list[str]) -> tuple[dict[str, Any], str]:
        commit = fetch_files(path, files, pinned.revisions.get(path))
        size = size_of(repository_folder("datasets", path))
        return {"revision": commit, "files": files, "bytes": size}, f"@{commit[:10]}"

    for name in job["benchmarks"]:
        staging.attempt("benchmarks", name, partial(benchmark, name))
    for name, _, revision in (asked.partition("@") for asked in job["tokenizers"]):
        staging.attempt("tokenizers", name, partial(tokenizer, name, revision), again=True)
    for path, files in job["files_of_datasets"].items():
        staging.attempt("files_of_datasets", path, partial(dataset_files, path, files), again=True)
    libraries = ("datasets", "huggingface_hub", "lm_eval")
    staging.staged["libraries"] = {name: metadata.version(name) for name in libraries}
    staging.finish()


def prove(job: dict[str, Any]) -> None:
    """Loads everything as an offline worker does; writes the failures by name."""
    load = cache(lambda: loader(job))
    tokenizers = [asked.partition("@")[0] for asked in job["tokenizers"]]
    proofs: list[tuple[str, Callable[[], Any]]] = [(name, partial(load_tokenizer, name)) for name in tokenizers]
    proofs += [(name, lambda name=name: load()(name)) for name in job["benchmarks"]]
    for path, files in job["files_of_datasets"].items():
        proofs += [(path, partial(hf_hub_download, path, file, repo_type="dataset")) for file in files]
    prove_each(job, proofs)


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
