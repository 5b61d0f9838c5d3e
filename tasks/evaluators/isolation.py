"""Isolation of a harness that runs model-written code: its access, its limits, and the collection of its output.

It writes into its own folder, which Assay neither writes nor reads by name meanwhile. After all its processes have
ended, regular files are copied into the attempt's folder, and the rest is counted.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from resources.jobs import inheritance
from resources.settings import is_named, process_environment, settings
from resources.storage.files import replace_text
from resources.storage.regular_files import copy_regular_files, open_regular
from tasks.evaluators.reading import PLAN_NAME

_log = logging.getLogger(__name__)
_PROGRAM = Path(__file__).parent / "programs" / "run_isolated.py"
_SPECIFICATION = "isolation.json"
_RESERVED = frozenset({_SPECIFICATION, "harness.log", "record.json", "samples.jsonl.gz"})
_LEAST_MEMORY_BYTES = 8 << 30
_FILE_BYTES, _PLAN_BYTES = 1 << 30, 4 << 20
_PROCESSES, _OPEN_FILES = 256, 8192
_TASKS = 512 + 32 * (os.cpu_count() or 1)  # threads included: numeric libraries start a thread per core
_REMOVE_SECONDS = 300.0  # a million files: 200,000 took 19 s on a busy machine


@dataclass(frozen=True)
class ModelCode:
    """Isolation needs of a harness that runs model-written code."""

    endpoint: str
    prepare: tuple[str, ...]  # command that fetches all that the harness needs, and runs nothing of the model's
    reads: tuple[str, ...] = ()
    """Files and folders that it reads, besides its environment and the cache of the hub's clients."""
    scratch: tuple[str, ...] = ()
    """Absolute paths of folders that code in them may write to; the changes are discarded."""


@dataclass(frozen=True)
class Cage:
    """The folder that a harness writes into; without isolation the attempt's folder `output` itself."""

    folder: Path
    output: Path

    @property
    def apart(self) -> bool:
        return self.folder != self.output

    def bring_plan(self) -> None:
        """Copies the harness's plan to `output` while the harness runs, once it is complete."""
        with suppress(OSError, ValueError, RecursionError):
            if self.apart and not (self.output / PLAN_NAME).exists():
                with open_regular(self.folder, PLAN_NAME, max_bytes=_PLAN_BYTES) as file:
                    text = file.read(_PLAN_BYTES).decode()
                json.loads(text)  # fails while it is being written
                replace_text(self.output / PLAN_NAME, text)

    def bring_out(self) -> str | None:
        """Copies the regular files that an ended harness left; returns a sentence on the rest, if any."""
        if not self.apart:
            return None
        try:
            copied = copy_regular_files(self.folder, self.output, reserved=_RESERVED)
        except OSError as error:
            return f"Files of the harness could not be copied out of its folder: {error}."
        return f"Not copied from the folder of the code that the model wrote: {copied}." if copied.dropped else None


@contextmanager
def cage(output: Path, *, apart: bool) -> Iterator[Cage]:
    """Yields the folders of a harness; an isolated harness's folder is removed at the end of the block."""
    if not apart:
        yield Cage(output, output)
        return
    output.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="assay-cage-")).resolve()
    try:
        (folder / "output").mkdir()
        yield Cage(folder / "output", output)
    finally:
        # Not shutil.rmtree, which fails on deep trees; neither command follows a link.
        for command in (("rm", "-rf"), ("chmod", "-R", "u+rwx"), ("rm", "-rf")):
            if not folder.exists():
                break
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([*command, "--", str(folder)], check=False, capture_output=True, timeout=_REMOVE_SECONDS)
        if folder.exists():
            _log.warning("%s, with files of code that the model wrote, could not be removed", folder)


def isolated(
    argv: tuple[str, ...],
    code: ModelCode | None,
    cage: Cage,
    *,
    python: Path,
    refusal: Path,
    seconds: float,
    variables: Mapping[str, str],
) -> tuple[str, ...]:
    """Returns the command, isolated if it runs model-written code; writes its limits into the attempt's folder."""
    if code is None:
        return argv
    inherited = process_environment(inherited=inheritance.HARNESS)
    hub = _hub_folders({**inherited, **variables})
    named = [name for name, value in inherited.items() if is_named(name, value, inheritance.ISOLATED)]
    for folder in hub.values():
        Path(folder).mkdir(parents=True, exist_ok=True)
    reads = {path for named in (*code.reads, *_interpreter(python)) for path in _with_targets(Path(named))}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    specification = {
        "endpoint": code.endpoint,
        "prepare": code.prepare,
        "required": settings().code_isolation == "required",
        "refusal": str(refusal),
        "root": str(cage.folder.parent / "root"),
        "reads": _outermost(reads),
        "scratch": _outermost((*hub.values(), *code.scratch)),
        "writes": [str(cage.folder)],
        "variables": [*named, *variables, "PATH", "PYTHONUNBUFFERED", "TOKENIZERS_PARALLELISM"],
        "given": {"HOME": "/tmp", "TMPDIR": "/tmp", **hub, **offline},
        "memory_bytes": max(_LEAST_MEMORY_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2),
        "cpu_seconds": max(1, int(seconds)),
        "file_bytes": _FILE_BYTES,
        "processes": _PROCESSES,
        "tasks": _TASKS,
        "open_files": _OPEN_FILES,
    }
    (cage.output / _SPECIFICATION).write_text(json.dumps(specification, indent=2))
    return (str(python), "-I", "-S", "-u", str(_PROGRAM), str(cage.output / _SPECIFICATION), *argv)


def _hub_folders(variables: Mapping[str, str]) -> dict[str, str]:
    named = {name: variables[name] for name in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE") if variables.get(name)}
    home = Path.home() / ".cache" / "huggingface"
    return {name: str(Path(path).absolute()) for name, path in {"HF_HOME": home, **named}.items()}


def _interpreter(python: Path) -> Iterator[Path]:
    environment = python.absolute().parent.parent
    yield environment
    configuration = environment / "pyvenv.cfg"
    lines = configuration.read_text().splitlines() if configuration.is_file() else []
    homes = [Path(line.partition("=")[2].strip()) for line in lines if line.partition("=")[0].strip() == "home"]
    for binaries in (*homes, Path(os.path.realpath(python)).parent):
        yield from (folder for name in ("bin", "lib") if (folder := binaries.parent / name).is_dir())


def _with_targets(path: Path) -> Iterator[Path]:
    path = path.absolute()
    yield path
    for entry in path.iterdir() if path.is_dir() else []:
        if entry.is_symlink() and (target := Path(os.path.realpath(entry))).is_file():
            yield target


def _outermost(paths: Iterable[Path | str]) -> list[str]:
    names = {str(path) for path in paths}
    return sorted(
        path for path in names if not any(path != other and Path(path).is_relative_to(other) for other in names)
    )
