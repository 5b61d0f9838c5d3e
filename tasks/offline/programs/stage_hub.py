"""Requests to the hub by the programs that stage data: `stage_data.py` and `stage_helm.py` import this.

Each works in the environment of its harness; `datasets` and `huggingface_hub` are in both. A hub that answers 429 is
waited for.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import datasets
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from huggingface_hub import HfApi, constants

ATTEMPTS = 20
UNTOLD_WAIT_SECONDS = 60.0  # where a hub that answers 429 does not say how long
LONGEST_WAIT_SECONDS = 900.0
SHOWN_CHARACTERS = 300
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
        """Loads one configuration of one data set; a revision that the caller names goes before ours."""
        if is_on_hub(path):
            wanted = options.get("revision") or self.revisions.get(path)
            if wanted is None or not is_commit(wanted):
                wanted = str(patiently(lambda asked=wanted: HfApi().dataset_info(path, revision=asked).sha))
            if options.get("revision") is None:
                self.revisions[path] = wanted
            self.used[path] = options["revision"] = wanted
        return patiently(lambda: self._load(path, name, *args, **options))


def call_it_main(folder: Path, commit: str) -> None:
    """Lets offline workers find a commit who ask for none."""
    reference = folder / "refs" / "main"
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)


def begun(job: dict[str, Any], parts: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """The manifest with what an earlier call had done when it ended, that alone, and where it is noted."""
    manifest, unfinished = Path(job["manifest"]), Path(job["manifest"] + ".unfinished")
    before, done = read(manifest) or {}, read(unfinished) or {}
    staged = {**before, **{part: {**before.get(part, {}), **done.get(part, {})} for part in parts}}
    return staged, done, unfinished


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
    """Returns how long a 429 somewhere behind an error asks to wait; None where there is none."""
    while error is not None:
        # Clients of the hub keep the answer in their error; urllib's error is the answer.
        answer = getattr(error, "response", error)
        if 429 in (getattr(answer, "status_code", None), getattr(answer, "code", None)):
            retry_after = str(answer.headers.get("Retry-After", ""))
            return min(float(retry_after), LONGEST_WAIT_SECONDS) if retry_after.isdigit() else UNTOLD_WAIT_SECONDS
        error = error.__cause__ or error.__context__
    return None


def is_on_hub(path: str) -> bool:
    """Returns whether a data set's path is a name on the hub: neither a folder nor a kind of file."""
    return bool(HUB_ID.fullmatch(path)) and path not in _PACKAGED_DATASETS_MODULES and not Path(path).exists()


def is_commit(revision: str) -> bool:
    """Returns whether a revision can never mean something else."""
    return re.fullmatch("[0-9a-f]{40}", revision) is not None


def repository_folder(kind: str, name: str) -> Path:
    """Returns where the hub's client keeps a repository."""
    return Path(constants.HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}"


def dataset_folders(path: str) -> tuple[Path, Path]:
    """Returns where a data set's files are kept, and what `datasets` made of them."""
    owner, _, name = path.rpartition("/")
    prepared = f"{owner}___" if owner else ""
    prepared += datasets.naming.camelcase_to_snakecase(name)
    return repository_folder("datasets", path), Path(datasets.config.HF_DATASETS_CACHE) / prepared


def describe_datasets(staged: dict[str, Any]) -> None:
    """Notes of each data set in a manifest where its files lie, and how large they are."""
    for path, dataset in staged["datasets"].items():
        folders = dataset_folders(path)
        dataset.update(folder=folders[1].name, bytes=size_of(*folders))


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
