"""Fetches the data sets of benchmarks, and tokenizers, into the hub's cache. Executed in the lm-eval environment.

    python stage_data.py fetch <job file>     writes the manifest that the job names
    python stage_data.py prove <job file>     loads everything again without a network; writes what cannot be loaded

Each benchmark is loaded as a worker loads it, so whatever lm-eval fetches for it, by whichever code, is in the cache
afterwards. Only `datasets.load_dataset` is wrapped, to fetch one revision of a data set and to note which. A benchmark
that the manifest has already is not asked for again. A hub that answers 429 is waited for.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

sys.path.append(str(Path(__file__).parent))  # -I leaves it out

import datasets
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from lm_eval.tasks import TaskManager
from lm_eval_index import use_remembered_index
from lm_eval_loading import folder_of
from transformers import AutoTokenizer

PARTS = ("benchmarks", "datasets", "tokenizers", "files_of_datasets")
"""Of the manifest; other parts are not ours, and are left as they are."""
ATTEMPTS = 20
UNTOLD_WAIT_SECONDS = 60.0  # where a hub that answers 429 does not say how long
LONGEST_WAIT_SECONDS = 900.0
SHOWN_CHARACTERS = 300
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
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")

Result = TypeVar("Result")


class Pinned:
    """`datasets.load_dataset` at one revision of each data set, which is noted."""

    def __init__(self, revisions: dict[str, str]) -> None:
        self.revisions = dict(revisions)
        self.used: dict[str, str] = {}
        self._load = datasets.load_dataset
        datasets.load_dataset = datasets.load.load_dataset = self

    def __call__(self, path: str, name: str | None = None, *args: Any, **options: Any) -> Any:
        """Loads one configuration of one data set."""
        if is_on_hub(path):
            if path not in self.revisions or not is_commit(self.revisions[path]):
                wanted = options.get("revision") or self.revisions.get(path)
                self.revisions[path] = str(patiently(lambda: HfApi().dataset_info(path, revision=wanted).sha))
            self.used[path] = self.revisions[path]
            options["revision"] = self.revisions[path]
        return patiently(lambda: self._load(path, name, *args, **options))


def main(arguments: list[str]) -> None:
    """Fetches, or proves."""
    what, path = arguments
    job = json.loads(Path(path).read_text())
    {"fetch": fetch, "prove": prove}[what](job)


def fetch(job: dict[str, Any]) -> None:
    """Fetches what the manifest lacks; the manifest is written last."""
    manifest, unfinished = Path(job["manifest"]), Path(job["manifest"] + ".unfinished")
    before, begun = read(manifest) or {}, read(unfinished) or {}
    staged = {**before, **{part: {**before.get(part, {}), **begun.get(part, {})} for part in PARTS}}
    problems: dict[str, str] = {}
    known = {} if job["refresh"] else {path: one["revision"] for path, one in staged["datasets"].items()}
    pinned = Pinned({**known, **job["revisions"]})
    wanted = [name for name in job["benchmarks"] if job["refresh"] or name not in begun.get("benchmarks", {})]
    load = loader(job) if wanted else None
    for number, name in enumerate(wanted, 1):
        pinned.used = {}
        try:
            assert load is not None
            load(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any code of any benchmark; the others are wanted
            problems[name] = shown(error)
            tell(f"{number} of {len(wanted)} {name}: {problems[name]}")
            continue
        staged["benchmarks"][name] = dict(pinned.used)
        staged["datasets"].update({path: {"revision": revision} for path, revision in pinned.used.items()})
        write(unfinished, staged)
        at = ", ".join(f"{path}@{revision[:10]}" for path, revision in pinned.used.items()) or "nothing to fetch"
        tell(f"{number} of {len(wanted)} {name}: {at}")
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
    for path, one in staged["datasets"].items():
        folders = dataset_folders(path)
        one.update(folder=folders[1].name, bytes=size_of(*folders))
    staged["libraries"] = {name: metadata.version(name) for name in ("datasets", "huggingface_hub", "lm_eval")}
    write(Path(job["problems"]), problems)
    write(unfinished, staged)
    unfinished.replace(manifest)


def prove(job: dict[str, Any]) -> None:
    """Loads everything as an offline worker does; writes what cannot be loaded, by name."""
    problems: dict[str, str] = {}
    load = loader(job)
    for name in job["benchmarks"]:
        try:
            load(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            problems[name] = shown(error)
    for asked in job["tokenizers"]:
        name = asked.partition("@")[0]
        try:
            AutoTokenizer.from_pretrained(name)
        except Exception as error:  # noqa: BLE001 - as above
            problems[name] = shown(error)
    write(Path(job["problems"]), problems)


def loader(job: dict[str, Any]) -> Callable[[str], Any]:
    """Loads a benchmark with all its parts, as the program that evaluates does."""
    use_remembered_index()
    manager = TaskManager(include_path=job["benchmarks_path"])

    def load(name: str) -> None:
        if name not in manager.task_index:
            raise LookupError("lm-eval knows no benchmark of that name")
        with contextlib.chdir(folder_of(name, manager)):  # data files are named relative to it
            manager.load([name])

    return load


def fetch_tokenizer(name: str, revision: str | None) -> str:
    """Fetches one tokenizer; its commit."""
    commit = str(patiently(lambda: HfApi().model_info(name, revision=revision).sha))
    patiently(lambda: snapshot_download(name, revision=commit, allow_patterns=list(TOKENIZER_FILES)))
    patiently(lambda: AutoTokenizer.from_pretrained(name, revision=commit))  # notes which files it may do without
    call_it_main(repository_folder("models", name), commit)
    return commit


def fetch_files(path: str, files: list[str], revision: str | None) -> str:
    """Fetches some files of one data set; its commit."""
    commit = str(patiently(lambda: HfApi().dataset_info(path, revision=revision).sha))
    for file in files:
        patiently(lambda file=file: hf_hub_download(path, file, repo_type="dataset", revision=commit))
    call_it_main(repository_folder("datasets", path), commit)
    return commit


def call_it_main(folder: Path, commit: str) -> None:
    """Lets offline workers find a commit who ask for none."""
    reference = folder / "refs" / "main"
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)


def tell(line: str) -> None:
    """A line for whoever reads our output."""
    print(f"staging: {line}", flush=True)


def patiently(call: Callable[[], Result]) -> Result:
    """The result of a call to the hub, which is made again after the time that a 429 asks for."""
    for _ in range(ATTEMPTS - 1):
        try:
            return call()
        except Exception as error:
            seconds = seconds_to_wait(error)
            if seconds is None:
                raise
            tell(f"the hub asks to wait for {seconds:g} s")
            time.sleep(seconds)
    return call()


def seconds_to_wait(error: BaseException | None) -> float | None:
    """How long a 429 somewhere behind an error asks to wait; None where there is none."""
    while error is not None:
        response = getattr(error, "response", None)
        if getattr(response, "status_code", None) == 429:
            told = str(response.headers.get("Retry-After", ""))
            return min(float(told), LONGEST_WAIT_SECONDS) if told.isdigit() else UNTOLD_WAIT_SECONDS
        error = error.__cause__ or error.__context__
    return None


def is_on_hub(path: str) -> bool:
    """Whether a data set's path is a name on the hub: neither a folder nor a kind of file."""
    return bool(HUB_ID.fullmatch(path)) and path not in _PACKAGED_DATASETS_MODULES and not Path(path).exists()


def is_commit(revision: str) -> bool:
    """Whether a revision can never mean something else."""
    return re.fullmatch("[0-9a-f]{40}", revision) is not None


def repository_folder(kind: str, name: str) -> Path:
    """Where the hub's client keeps a repository."""
    return Path(constants.HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}"


def dataset_folders(path: str) -> tuple[Path, Path]:
    """Where a data set's files are kept, and what `datasets` made of them."""
    owner, _, name = path.rpartition("/")
    prepared = f"{owner}___" if owner else ""
    prepared += datasets.naming.camelcase_to_snakecase(name)
    return repository_folder("datasets", path), Path(datasets.config.HF_DATASETS_CACHE) / prepared


def size_of(*folders: Path) -> int:
    """Bytes of the files in some folders, a link counted as nothing."""
    files = (file for folder in folders for file in folder.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())


def shown(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:SHOWN_CHARACTERS]


def read(path: Path) -> dict[str, Any] | None:
    """A JSON file; None where there is none, or a damaged one."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file; a reader sees the old one or the new one."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(content, indent=2, sort_keys=True))
    aside.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])
