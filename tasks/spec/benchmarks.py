"""The benchmarks that come with Assay, and a digest of any folder of benchmarks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from resources.storage import storage
from tasks.spec.evaluation import EvaluationConfig, digest_of
from tasks.spec.evaluators import EVALUATORS

BUNDLED = Path(__file__).parent / "bundled"
"""Benchmarks as lm-eval reads them, one YAML and one JSONL file each; other harnesses' in folders of their own."""
COPIED = "benchmarks"
"""Name that a folder from a store gets in a harness's working folder."""


def benchmarks_uri(config: EvaluationConfig) -> str:
    """The folder with an evaluation's own benchmarks; the bundled ones where it names none."""
    return config.benchmarks_path or str(BUNDLED)


def copied_benchmarks(config: EvaluationConfig) -> dict[str, str]:
    """The folder to copy into a harness's working folder, by its name there; none where it is on this machine."""
    path = config.benchmarks_path
    return {} if path is None or storage.is_local(path) else {COPIED: path}


def benchmarks_here(config: EvaluationConfig) -> str:
    """Returns the path to an evaluation's own benchmarks: on this machine, or as copied into the working folder."""
    return COPIED if copied_benchmarks(config) else str(storage.local_path(benchmarks_uri(config)).absolute())


def evaluation_hash(config: EvaluationConfig) -> str:
    """Digest over all that can change a score but the checkpoint."""
    return digest_of({**config.score_inputs(), "benchmarks": benchmarks_digest(config)})


def benchmarks_digest(config: EvaluationConfig) -> str:
    """Digest over the benchmarks folder and files that task_kwargs name: changed questions are another evaluation."""
    root = benchmarks_uri(config).rstrip("/")
    files = [file for file in storage.list_files(root) if "__pycache__" not in file.uri]
    if config.benchmarks_path is None:
        files = [file for file in files if _is_asked_by(config.evaluator.name, file.uri.removeprefix(f"{root}/"))]
    named = sorted({path for task in config.evals for path in _files_in(task.task_kwargs)})
    return digest_of(
        [
            *([file.uri.removeprefix(root), storage.read_bytes(file.uri).hex()] for file in files),
            *([str(path), hashlib.sha256(storage.read_bytes(str(path))).hexdigest()] for path in named),
        ]
    )


def _is_asked_by(evaluator: str, name: str) -> bool:
    """Tell whether a bundled file is an evaluator's: others than lm-eval have folders of their names."""
    folder = name.partition("/")[0] if "/" in name else ""
    return folder == evaluator if (BUNDLED / evaluator).is_dir() else folder not in EVALUATORS


def _files_in(value: Any) -> Iterator[Path]:
    """Files on this machine that are named by their whole path, however deep; those of the folder have short names."""
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _files_in(part)
    elif isinstance(value, str) and value.startswith("/") and Path(value).is_file():
        yield Path(value)
