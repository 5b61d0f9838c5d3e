"""Revisions of the data that a benchmark reads, for `run_lm_eval.py`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

from lm_eval.api.task import Task

COMMIT = re.compile(r"/([0-9a-f]{40})/[^/]+$")
"""A commit of the hub in the path of a file in the cache of `datasets`."""
DIGITS = 16


def revision_of(task: Task) -> str | None:
    """Returns the data set and its commit on the hub; else a digest over the rows of the splits in use."""
    dataset = getattr(task, "dataset", None)
    if dataset is None:
        return None
    config = task.config
    examples = config.fewshot_config.split if config.fewshot_config else None
    parts = (config.test_split or config.validation_split, examples or config.training_split)
    rows = [dataset[name] for name in dict.fromkeys(parts) if name in dataset]
    files = [file["filename"] for part in rows for file in getattr(part, "cache_files", ())]
    commits = {match[1] for name in files if (match := COMMIT.search(name))}
    if len(commits) == 1:
        return f"{task.DATASET_PATH}@{commits.pop()}"
    return f"sha256:{digest(rows)[:DIGITS]}"


def digest(parts: Iterable[Iterable[Any]]) -> str:
    """Returns a hex digest over rows, the same for the same content."""
    hasher = hashlib.sha256()
    for part in parts:
        for row in part:
            hasher.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        hasher.update(b"\n")
    return hasher.hexdigest()
