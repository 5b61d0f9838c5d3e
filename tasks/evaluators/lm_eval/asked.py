"""Reads `asked.json`: request settings, ends of answers, and the parts of groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tasks.evaluators.reading import Unanswered, read_result
from tasks.records.details import Asking, BenchmarkDetails
from tasks.records.scores import LENGTH

ASKED_NAME = "asked.json"


class Ends(BaseModel):
    """Ends of all answers to a question."""

    reasons: tuple[str | None, ...] = ()
    tokens: tuple[int | None, ...] = ()
    unclosed: bool = False

    @property
    def finish(self) -> str | None:
        """The question's finish reason: the limit, if any of its answers ended there."""
        known = [reason for reason in self.reasons if reason]
        return LENGTH if LENGTH in known else known[0] if known else None


class GroupParts(BaseModel):
    """Benchmarks that a group averages, and for each metric True if their sizes are weights."""

    leaves: tuple[str, ...]
    by_size: dict[str, bool]

    def weights(self, metric: str, sizes: Mapping[str, int]) -> dict[str, float]:
        """Returns weights (sum 1) of the benchmarks in `sizes`, which have the metric (without filter), if known."""
        if metric not in self.by_size:
            return {}
        given = {leaf: sizes[leaf] if self.by_size[metric] else 1 for leaf in self.leaves if leaf in sizes}
        total = sum(given.values())
        return {leaf: weight / total for leaf, weight in given.items()} if total else {}


class Asked(BaseModel):
    """Content of `asked.json`; empty for a run without it."""

    asking: Asking = Asking()
    ends: dict[str, dict[int, Ends]] = {}
    groups: dict[str, GroupParts] = {}
    versions: dict[str, str] = {}
    unanswered: Unanswered = Unanswered()

    def way(self, seeds: Mapping[str, Any]) -> Asking:
        """Returns the request settings, with the seeds in the harness's results."""
        drawn = {
            name.removesuffix("_seed"): value
            for name, value in seeds.items()
            if name.endswith("_seed") and isinstance(value, int)
        }
        return self.unanswered.noted(self.asking.model_copy(update={"seeds": {**drawn, **self.asking.seeds}}))

    def detailed(self, name: str, details: BenchmarkDetails) -> BenchmarkDetails:
        ends = list(self.ends.get(name, {}).values())
        reasons = Counter(reason for end in ends for reason in end.reasons if reason)
        counts = {
            "finish_reasons": dict(sorted(reasons.items())),
            "at_limit": sum(LENGTH in end.reasons for end in ends) if reasons else None,
            "unclosed": sum(end.unclosed for end in ends),
        }
        return details.model_copy(update=counts)


def read_asked(output: Path) -> Asked:
    """Reads the file of the run in `output`; empty if it is missing."""
    path = output / ASKED_NAME
    return read_result("lm-eval", path, Asked) if path.exists() else Asked()
