"""Clusters of lm-eval's questions about the same passage, by a field of their documents."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from resources.storage.yaml_text import load_yaml
from tasks.spec.benchmark_sets import SUITE_DATA

_HASH_DIGITS = 12


def clusters_of(names: Sequence[str], docs: Mapping[str, Any], *, cluster_by: str | None) -> dict[str, str]:
    """Returns the clusters of a benchmark's questions, by question; leaves out questions that share none.

    Args:
        names: the harness's of the benchmark, and those it is published under.
        docs: document of each question.
        cluster_by: field that the configuration names.
    """
    fields = [cluster_by] if cluster_by else _fields(names)
    for field in fields:
        clusters = {name: _digest(doc[field]) for name, doc in docs.items() if isinstance(doc, dict) and doc.get(field)}
        times = Counter(clusters.values())
        if cluster_by or (len(times) > 1 and max(times.values()) > 1):
            return {name: cluster for name, cluster in clusters.items() if times[cluster] > 1}
    return {}


@cache
def _keys() -> dict[str, Any]:
    return load_yaml((SUITE_DATA / "clusters.yaml").read_text())


def _fields(names: Sequence[str]) -> list[str]:
    patterns: dict[str, list[str]] = _keys()["benchmarks"]
    for pattern, fields in patterns.items():
        if any(fnmatchcase(name, pattern) for name in names):
            return fields
    return _keys()["shared"]


def _digest(value: Any) -> str:
    content = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:_HASH_DIGITS]
