"""The benchmarks that come with Assay, and a digest of any folder of benchmarks."""

from __future__ import annotations

from pathlib import Path

from resources import storage
from tasks.config import EvaluationConfig, digest_of

BUNDLED = Path(__file__).parent / "bundled"
"""Benchmarks as lm-eval reads them, one YAML and one JSONL file each."""


def benchmarks_uri(config: EvaluationConfig) -> str:
    """The folder with an evaluation's own benchmarks; the bundled ones where it names none."""
    return config.benchmarks_path or str(BUNDLED)


def benchmarks_digest(config: EvaluationConfig) -> str:
    """Digest over the files of the benchmarks folder, so that changed questions are another evaluation."""
    root = benchmarks_uri(config)
    files = [file for file in storage.list_files(root) if "__pycache__" not in file.uri]
    return digest_of([[file.uri.removeprefix(root), storage.read_bytes(file.uri).hex()] for file in files])
