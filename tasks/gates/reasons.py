"""Verdicts and their reasons as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from resources.errors import GateRefused
from tasks.records.early import EarlyScore


@dataclass(frozen=True)
class Reason:
    """The finding of a rule on a checkpoint, or on one of its scores."""

    checkpoint: str
    rule: str
    found: str
    go: bool
    early: EarlyScore | None = None
    """The early verdict on the score, if it was decided early."""

    def as_dict(self) -> dict[str, Any]:
        content = {name: value for name, value in vars(self).items() if name != "early"}
        return content if self.early is None else {**content, "early": self.early.model_dump()}


@dataclass(frozen=True)
class Verdict:
    """The decision of a gate, with its reasons."""

    gate: str
    reasons: tuple[Reason, ...]

    @property
    def go(self) -> bool:
        """True if there are reasons and all of them are GO."""
        return bool(self.reasons) and all(reason.go for reason in self.reasons)

    @property
    def word(self) -> str:
        return "GO" if self.go else "NO-GO"

    @property
    def refusals(self) -> tuple[Reason, ...]:
        """The reasons for NO-GO."""
        return tuple(reason for reason in self.reasons if not reason.go)

    def about(self, checkpoint: str) -> Verdict:
        """Returns the part on a single checkpoint."""
        return Verdict(self.gate, tuple(reason for reason in self.reasons if reason.checkpoint == checkpoint))

    def as_dict(self) -> dict[str, Any]:
        return {"gate": self.gate, "verdict": self.word, "reasons": [reason.as_dict() for reason in self.reasons]}

    def raise_unless_go(self) -> None:
        """Raises GateRefused if the verdict is NO-GO."""
        if self.go:
            return
        lines = [f"{refusal.checkpoint}: {refusal.rule}: {refusal.found}" for refusal in self.refusals] or [
            "no record to look at"
        ]
        raise GateRefused(
            expected=f"the gate {self.gate} to say GO",
            found=f"NO-GO, for {len(lines)} of {max(1, len(self.reasons))} reasons:\n" + "\n".join(lines),
            remedy="look at these scores; a checkpoint that is meant to pass needs a gate with other rules",
        )
