"""The bundled benchmarks, and a digest of any folder of benchmarks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from resources.errors import BadInput
from resources.storage import storage
from tasks.spec.benchmark_files import files_elsewhere, is_hidden
from tasks.spec.evaluation import EvaluationConfig, digest_of
from tasks.spec.evaluators import EVALUATORS, LmEvalBenchmarkOptions

BUNDLED = Path(__file__).parent / "bundled"
"""lm-eval benchmarks, a YAML and a JSONL file each; other harnesses' are in subfolders."""
COPIED = "benchmarks"
"""Name of a folder from a store after it is copied into a harness's working folder."""


def benchmarks_uri(config: EvaluationConfig) -> str:
    """Returns the folder of an evaluation's benchmarks; the bundled benchmarks by default."""
    return config.benchmarks_path or str(BUNDLED)


def copied_benchmarks(config: EvaluationConfig) -> dict[str, str]:
    """Returns the folder to copy into a harness's working folder, by its name in it; empty for local folders."""
    path = config.benchmarks_path
    return {} if path is None or storage.is_local(path) else {COPIED: path}


def benchmarks_here(config: EvaluationConfig) -> str:
    """Returns the path to an evaluation's benchmarks: local, or as copied into the working folder."""
    return COPIED if copied_benchmarks(config) else str(storage.local_path(benchmarks_uri(config)).absolute())


def evaluation_hash(config: EvaluationConfig) -> str:
    """Returns a digest over every input of the scores except the checkpoint."""
    return digest_of({**config.score_inputs(), "benchmarks": benchmarks_digest(config)})


def benchmarks_digest(config: EvaluationConfig) -> str:
    """Returns a digest over the benchmarks folder and the external files that it references."""
    root, names = _files_of(config)
    return digest_of(
        [
            *([f"/{name}", storage.read_bytes(storage.join(root, name), within=root).hex()] for name in names),
            *([place, _content_of(place)] for place in sorted(named_elsewhere(config))),
        ]
    )


def named_elsewhere(config: EvaluationConfig) -> set[str]:
    """Returns the files outside of the benchmarks folder that benchmarks or their arguments reference."""
    root, names = _files_of(config)
    return files_elsewhere(
        root,
        names if config.benchmarks_path is not None else (),
        arguments=[task.task_kwargs for task in config.evals],
        all_is_data=not isinstance(config.evaluator, LmEvalBenchmarkOptions),
    )


def _files_of(config: EvaluationConfig) -> tuple[str, list[str]]:
    root = benchmarks_uri(config).rstrip("/")
    files = storage.list_files(root)
    names = [file.uri.removeprefix(f"{root}/") for file in files if file.regular]
    if storage.is_local(root):
        _refuse_linked_folders(storage.local_path(root))
        others = (file.uri.removeprefix(f"{root}/") for file in files if not file.regular)
        _refuse_links_out(storage.local_path(root), [name for name in others if not is_hidden(name)])
        names = [name for name in names if not is_hidden(name)]
    names = [name for name in names if "__pycache__" not in name]
    if config.benchmarks_path is None:
        names = [name for name in names if _is_asked_by(config.evaluator.name, name)]
    return root, names


def _refuse_linked_folders(root: Path) -> None:
    for folder, below, _ in os.walk(root):
        below[:] = [name for name in below if not name.startswith(".")]
        for path in (Path(folder, name) for name in below):
            if path.is_symlink():
                raise BadInput(
                    expected="a benchmarks folder without links to other folders; linked files would not count",
                    found=f"{path}, a link to {path.resolve()}",
                    remedy="Let benchmarks name that folder itself, or copy its files",
                )


def _refuse_links_out(root: Path, names: Iterable[str]) -> None:
    for path in (root / name for name in names):
        if path.is_symlink() and path.exists():  # pipes and dangling links are ignored
            raise BadInput(
                expected=f"regular files in {root}, and links that stay in it",
                found=f"{path}, a link to {path.resolve()}",
                remedy="Copy the file there, or let the benchmark name it by its whole path",
            )


def _content_of(place: str) -> str:
    digest = storage.content_digest(place)
    if digest is None:
        raise BadInput(
            expected="benchmarks that name files which can be read",
            found=f"{place}, which cannot",
            remedy="Correct the path, or put the file into the benchmarks folder",
        )
    return digest


def _is_asked_by(evaluator: str, name: str) -> bool:
    folder = name.partition("/")[0] if "/" in name else ""
    return folder == evaluator if (BUNDLED / evaluator).is_dir() else folder not in EVALUATORS
