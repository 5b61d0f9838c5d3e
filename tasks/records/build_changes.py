"""Changes of versions inside a series: engine, harness, packages and data that a curve's numbers were made with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tasks.records.builds import Build, Qualification, build_of, is_qualified
from tasks.records.record import CheckpointReference, Record


@dataclass(frozen=True)
class BuildChange:
    """A change of versions inside a series, at the first checkpoint with the new ones."""

    run: str
    step: int
    words: tuple[str, ...]
    qualified: bool

    @property
    def text(self) -> str:
        """The change in a line."""
        judged = "qualified" if self.qualified else "not qualified, so the line is broken"
        return f"{'; '.join(self.words)} ({judged})"


def build_changes(
    numbers: Iterable[tuple[CheckpointReference, Record]],
    *,
    evaluator: str,
    benchmark: str,
    qualifications: Sequence[Qualification],
) -> list[BuildChange]:
    """Returns changes between neighbouring checkpoints of each run; `numbers` are those of one series, by step."""
    found: list[BuildChange] = []
    builds: dict[str, Build] = {}
    for checkpoint, record in numbers:
        later, build = build_of(record, benchmark), builds.get(checkpoint.run)
        if build is not None and (words := build.changes(later)):
            qualified = is_qualified(build, later, qualifications, evaluator=evaluator, benchmark=benchmark)
            found.append(BuildChange(checkpoint.run, checkpoint.step, words, qualified))
        builds[checkpoint.run] = build.updated(later) if build is not None else later
    return found
