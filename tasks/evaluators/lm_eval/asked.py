"""Reads `asked.json`: the way in which our program asked, the ends of answers, and the parts of groups."""

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
    """Ends of all answers to one question."""

    reasons: tuple[str | None, ...] = ()
    tokens: tuple[int | None, ...] = ()
    unclosed: bool = False

    @property
    def finish(self) -> str | None:
        """The reason that counts for the question: the limit, if one of its answers ended there."""
        known = [reason for reason in self.reasons if reason]
        return LENGTH if LENGTH in known else known[0] if known else None


class GroupParts(BaseModel):
    """Benchmarks that a group is the mean of, and for each of its metrics, whether it is weighted by their sizes."""

    leaves: tuple[str, ...]
    by_size: dict[str, bool]

    def weights(self, metric: str, sizes: Mapping[str, int]) -> dict[str, float]:
        """Weights of those that have the metric, together 1; empty where nothing is known.

        Args:
            metric: name without its filter.
            sizes: questions by benchmark, of those that have it.
        """
        if metric not in self.by_size:
            return {}
        given = {leaf: sizes[leaf] if self.by_size[metric] else 1 for leaf in self.leaves if leaf in sizes}
        total = sum(given.values())
        return {leaf: weight / total for leaf, weight in given.items()} if total else {}


class Asked(BaseModel):
    """The content of the file; empty for a run without one."""

    asking: Asking = Asking()
    ends: dict[str, dict[int, Ends]] = {}
    groups: dict[str, GroupParts] = {}
    versions: dict[str, str] = {}
    unanswered: Unanswered = Unanswered()

    def way(self, seeds: Mapping[str, Any]) -> Asking:
        """The way of asking, with the seeds that the harness's results name."""
        drawn = {
            name.removesuffix("_seed"): value
            for name, value in seeds.items()
            if name.endswith("_seed") and isinstance(value, int)
        }
        return self.unanswered.noted(self.asking.model_copy(update={"seeds": {**drawn, **self.asking.seeds}}))

    def detailed(self, name: str, details: BenchmarkDetails) -> BenchmarkDetails:
        """Details of a benchmark with the ends of its answers."""
        ends = list(self.ends.get(name, {}).values())
        reasons = Counter(reason for end in ends for reason in end.reasons if reason)
        found = {
            "finish_reasons": dict(sorted(reasons.items())),
            "at_limit": sum(LENGTH in end.reasons for end in ends) if reasons else None,
            "unclosed": sum(end.unclosed for end in ends),
        }
        return details.model_copy(update=found)


def read_asked(output: Path) -> Asked:
    """The file of the run in `output`; an empty one where there is none."""
    path = output / ASKED_NAME
    return read_result("lm-eval", path, Asked) if path.exists() else Asked()
