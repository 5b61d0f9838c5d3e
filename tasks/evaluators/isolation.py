"""The bounds of a harness that runs code which a model wrote: what it sees, reaches and may use up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from resources.jobs import inheritance
from resources.settings import process_environment, settings

_PROGRAM = Path(__file__).parent / "programs" / "run_isolated.py"
_SPECIFICATION, _ROOT = "isolation.json", "isolated"
_LEAST_MEMORY_BYTES = 8 << 30
_FILE_BYTES = 1 << 30


@dataclass(frozen=True)
class ModelCode:
    """A harness's need for isolation: it runs code that the model wrote.

    `prepare` is a command that fetches all that the harness needs, and runs nothing of the model's.
    """

    endpoint: str
    prepare: tuple[str, ...]
    reads: tuple[str, ...] = ()
    """Files and folders that it reads, beside its environment and what the hub's clients keep."""
    scratch: tuple[str, ...] = ()
    """Whole paths of folders whose code may write beside itself; all of that is thrown away."""


def isolated(
    argv: tuple[str, ...],
    code: ModelCode,
    *,
    python: Path,
    output: Path,
    refusal: Path,
    seconds: float,
    variables: Mapping[str, str],
) -> tuple[str, ...]:
    """The command that runs another one isolated; what bounds it is written into the output folder.

    Raises:
        OSError: the folder cannot be written.
    """
    hub = _hub_folders({**process_environment(inherited=inheritance.HARNESS), **variables})
    for folder in hub.values():
        Path(folder).mkdir(parents=True, exist_ok=True)
    reads = {path for named in (*code.reads, *_interpreter(python)) for path in _with_targets(Path(named))}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    specification = {
        "endpoint": code.endpoint,
        "prepare": code.prepare,
        "required": settings().code_isolation == "required",
        "refusal": str(refusal),
        "root": str(output / _ROOT),
        "reads": _outermost(reads),
        "scratch": _outermost((*hub.values(), *code.scratch)),
        "writes": [str(output)],
        "variables": [*inheritance.ISOLATED, *variables],
        "given": {"HOME": "/tmp", "TMPDIR": "/tmp", **hub, **offline},
        "memory_bytes": max(_LEAST_MEMORY_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2),
        "cpu_seconds": max(1, int(seconds)),
        "file_bytes": _FILE_BYTES,
    }
    (output / _SPECIFICATION).write_text(json.dumps(specification, indent=2))
    return (str(python), "-I", "-S", "-u", str(_PROGRAM), str(output / _SPECIFICATION), *argv)


def _hub_folders(variables: Mapping[str, str]) -> dict[str, str]:
    """Folders of the hub's clients, by the variables that say so."""
    named = {name: variables[name] for name in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE") if variables.get(name)}
    home = Path.home() / ".cache" / "huggingface"
    return {name: str(Path(path).absolute()) for name, path in {"HF_HOME": home, **named}.items()}


def _interpreter(python: Path) -> Iterator[Path]:
    """An environment, and the installation that it was built on, without what else may lie beside it."""
    environment = python.absolute().parent.parent
    yield environment
    configuration = environment / "pyvenv.cfg"
    lines = configuration.read_text().splitlines() if configuration.is_file() else []
    homes = [Path(line.partition("=")[2].strip()) for line in lines if line.partition("=")[0].strip() == "home"]
    for binaries in (*homes, Path(os.path.realpath(python)).parent):
        yield from (folder for name in ("bin", "lib") if (folder := binaries.parent / name).is_dir())


def _with_targets(path: Path) -> Iterator[Path]:
    """A file or folder, and what the links directly in it lead to."""
    path = path.absolute()
    yield path
    for entry in path.iterdir() if path.is_dir() else []:
        if entry.is_symlink() and (target := Path(os.path.realpath(entry))).is_file():
            yield target


def _outermost(paths: Iterable[Path | str]) -> list[str]:
    """Paths without those that lie in another: shown with it, they would be shown twice."""
    found = {str(path) for path in paths}
    return sorted(
        path for path in found if not any(path != other and Path(path).is_relative_to(other) for other in found)
    )
