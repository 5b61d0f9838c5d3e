"""Requests to the hub, imported by the staging programs `stage_data.py` and `stage_helm.py`.

Each runs in the environment of its harness; both have `datasets` and `huggingface_hub`. Requests answered with 429 are
retried after a wait.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import datasets
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from huggingface_hub import HfApi, constants
from refusals import causes

ATTEMPTS = 20
UNTOLD_WAIT_SECONDS = 60.0  # if the 429 gives no time
LONGEST_WAIT_SECONDS = 900.0
SHOWN_CHARACTERS = 300
HUB_ID, COMMIT = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?"), re.compile("[0-9a-f]{40}")

Result = TypeVar("Result")


class CannotBeHadError(Exception):
    """Data are not available, for the reason in the message."""


class Pinned:
    """Replaces `datasets.load_dataset` to load a fixed revision of each data set, which is recorded."""

    def __init__(self, revisions: dict[str, str]) -> None:
        self.revisions = dict(revisions)
        self.used: dict[str, str] = {}
        self._load = datasets.load_dataset
        datasets.load_dataset = datasets.load.load_dataset = self

    def __call__(self, path: str, name: str | None = None, *args: Any, **options: Any) -> Any:
        """Loads a configuration of a data set; an explicit `revision` overrides the pinned revision."""
        # Neither a packaged format nor a folder.
        if HUB_ID.fullmatch(path) and path not in _PACKAGED_DATASETS_MODULES and not Path(path).exists():
            revision = options.get("revision") or self.revisions.get(path)
            if revision is None or not COMMIT.fullmatch(revision):
                revision = str(patiently(lambda asked=revision: HfApi().dataset_info(path, revision=asked).sha))
            if options.get("revision") is None:
                self.revisions[path] = revision
            self.used[path] = options["revision"] = revision
        return patiently(lambda: self._load(path, name, *args, **options))


def call_it_main(folder: Path, commit: str) -> None:
    """Makes a commit the default revision for offline workers."""
    reference = folder / "refs" / "main"
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)


class Staging:
    """The manifest while a program adds to its parts, and the failures by name; goes on where a killed call ended."""

    def __init__(self, job: dict[str, Any], parts: tuple[str, ...]) -> None:
        self._job, self._refresh = job, job["refresh"]
        self._unfinished = Path(job["manifest"] + ".unfinished")
        before, self._done = read(Path(job["manifest"])) or {}, read(self._unfinished) or {}
        self.staged = {**before, **{part: {**before.get(part, {}), **self._done.get(part, {})} for part in parts}}
        self.problems: dict[str, str] = {}
        self._number, self._of = 0, sum(len(job.get(part, ())) for part in parts)

    def attempt(
        self, part: str, name: str, stage: Callable[[], tuple[dict[str, Any], str]], *, again: bool = False
    ) -> None:
        """Adds an entry to a part of the manifest unless a killed call has it; `stage` returns it with a note.

        With `again`, the entry is staged again in any case.
        """
        self._number += 1
        if name in self._done.get(part, {}) and not (self._refresh or again):
            return
        try:
            self.staged[part][name], note = stage()
            write(self._unfinished, self.staged)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any code of any benchmark; the others are wanted
            note = self.problems[name] = shown(error)
        tell(f"{self._number} of {self._of} {name}: {note}")

    def known(self) -> dict[str, str]:
        """Returns the revisions of staged data sets; empty for a refresh."""
        datasets = {} if self._refresh else self.staged["datasets"]
        return {path: dataset["revision"] for path, dataset in datasets.items()}

    def finish(self) -> None:
        """Adds folder and size of each data set, and replaces the manifest."""
        for path, dataset in self.staged["datasets"].items():
            folders = dataset_folders(path)
            dataset.update(folder=folders[1].name, bytes=size_of(*folders))
        write(Path(self._job["problems"]), self.problems)
        write(self._unfinished, self.staged)
        self._unfinished.replace(self._job["manifest"])


def prove_each(job: dict[str, Any], proofs: Iterable[tuple[str, Callable[[], Any]]]) -> None:
    """Calls the proof of each name; writes the failures by name."""
    problems: dict[str, str] = {}
    for name, proof in proofs:
        try:
            proof()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            problems[name] = shown(error)
    write(Path(job["problems"]), problems)


def tell(line: str) -> None:
    """Prints a progress line for the parent process."""
    print(f"staging: {line}", flush=True)


def patiently(call: Callable[[], Result]) -> Result:
    """Calls the hub, waits as long as a 429 requires, and retries; returns the result."""
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
    """Returns the wait that a 429 in an error's chain of causes requires; None if there is no 429."""
    for cause in causes(error):
        # Clients of the hub store the response in their error; urllib's error is the response.
        answer = getattr(cause, "response", cause)
        if 429 in (getattr(answer, "status_code", None), getattr(answer, "code", None)):
            retry_after = str(answer.headers.get("Retry-After", ""))
            return min(float(retry_after), LONGEST_WAIT_SECONDS) if retry_after.isdigit() else UNTOLD_WAIT_SECONDS
    return None


def repository_folder(kind: str, name: str) -> Path:
    """Returns the folder of a repository in the hub's cache."""
    return Path(constants.HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}"


def dataset_folders(path: str) -> tuple[Path, Path]:
    """Returns the folders of a data set's downloaded files and of its data prepared by `datasets`."""
    owner, _, name = path.rpartition("/")
    prepared = f"{owner}___" if owner else ""
    prepared += datasets.naming.camelcase_to_snakecase(name)
    return repository_folder("datasets", path), Path(datasets.config.HF_DATASETS_CACHE) / prepared


def size_of(*folders: Path) -> int:
    """Returns the number of bytes of files in folders, without links."""
    files = (file for folder in folders for file in folder.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())


def shown(error: BaseException) -> str:
    """Returns an error in a single line."""
    if isinstance(error, CannotBeHadError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:SHOWN_CHARACTERS]


def read(path: Path) -> dict[str, Any] | None:
    """Returns the content of a JSON file; None if it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file atomically."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(content, indent=2, sort_keys=True))
    aside.replace(path)
