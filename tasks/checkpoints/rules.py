"""Rules for the checkpoints of a run that a policy wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from resources.config import Config


class CheckpointRule(Config):
    """One rule that takes checkpoints; `latest` alone, in YAML, means `{which: latest}`."""

    which: Literal["all", "latest", "first", "final"] | None = None
    """Every checkpoint, the one with the highest or lowest step, or that of final_step."""
    every_n_steps: int | None = Field(default=None, ge=1)
    """Steps that are multiples of this; not also the last one, as in a selection."""
    steps: tuple[int, ...] = ()
    """These steps, whether they are written yet or not."""

    @model_validator(mode="before")
    @classmethod
    def _by_word(cls, values: Any) -> Any:
        return {"which": values} if isinstance(values, str) else values

    @model_validator(mode="after")
    def _has_one_choice(self) -> CheckpointRule:
        given = [name for name in ("which", "every_n_steps", "steps") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"expected one of which, every_n_steps and steps, found {found}: write several rules")
        return self


def eligible_steps(rules: Sequence[CheckpointRule], complete: Sequence[int], *, final_step: int | None) -> set[int]:
    """The steps, of those with a complete checkpoint, that any of some rules takes."""
    taken: set[int] = set()
    for rule in rules:
        match rule.which:
            case "all":
                return set(complete)
            case "latest" if complete:
                taken.add(max(complete))
            case "first" if complete:
                taken.add(min(complete))
        taken.update(step for step in complete if _by_number(rule, step, final_step=final_step))
    return taken


def might_be_eligible(
    rules: Sequence[CheckpointRule], step: int, complete: Sequence[int], *, final_step: int | None
) -> bool:
    """Returns whether an incomplete checkpoint will be wanted; of the complete ones the highest step is enough."""
    newest = not complete or step > max(complete)
    return any(
        rule.which == "all"
        or (rule.which == "latest" and newest)
        or (rule.which == "first" and not complete)
        or _by_number(rule, step, final_step=final_step)
        for rule in rules
    )


def _by_number(rule: CheckpointRule, step: int, *, final_step: int | None) -> bool:
    by_count = rule.every_n_steps is not None and step % rule.every_n_steps == 0
    return by_count or step in rule.steps or (rule.which == "final" and step == final_step)
