"""Rules for the checkpoints of a run that a policy wants."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from resources.config import Config

Inputs = tuple[int, ...]
"""A checkpoint of a run by the steps of its inputs: one for a checkpoint that was written, several for a merged one."""


class CheckpointRule(Config):
    """One rule that takes checkpoints; `latest` alone, in YAML, means `{which: latest}`."""

    which: Literal["all", "latest", "first", "final"] | None = None
    """Every checkpoint, the one with the highest or lowest step, or that of final_step."""
    every_n_steps: int | None = Field(default=None, ge=1)
    """The first step at or past each multiple of this; not also the last one, as in a selection."""
    steps: tuple[int, ...] = ()
    """These steps, whether they are written yet or not."""
    merged: str | None = Field(default=None, pattern=r"^last ([2-9]|[1-9][0-9]+)$")
    """`last 5` wants, in place of each of these checkpoints, the mean of its weights and those of the four before it,
    once all five are whole; none where there are fewer."""

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
        if self.merged is not None and self.which == "first":
            raise ValueError(f"expected checkpoints with others before them beside merged: {self.merged}, found first")
        return self

    @property
    def merges(self) -> int | None:
        """Number of checkpoints that are merged into each; None where each is taken as it is."""
        return None if self.merged is None else int(self.merged.removeprefix("last "))


def first_at_multiples(steps: Iterable[int], number: int) -> set[int]:
    """Returns the first of some steps at or past each multiple of a number."""
    in_order = sorted(steps)
    return {step for before, step in zip([0, *in_order], in_order, strict=False) if _passes(number, before, step)}


def _passes(number: int, before: int, step: int) -> bool:
    return step % number == 0 or step // number > before // number


def eligible(
    rules: Sequence[CheckpointRule],
    complete: Sequence[int],
    *,
    listed: Sequence[int] = (),
    past: Iterable[int] = (),
    final_step: int | None,
) -> set[Inputs]:
    """The checkpoints that any of some rules takes: complete ones, and merged ones, with inputs complete or not.

    Args:
        rules: the rules.
        complete: steps with a complete checkpoint.
        listed: steps with a checkpoint, complete or not; only merged ones need them.
        past: steps that have a record and no checkpoint any more, so that the next is not the first past a multiple.
        final_step: last training step, where it is known.
    """
    taken: set[Inputs] = {(step,) for step in _steps(_plain(rules), complete, past, final_step=final_step)}
    in_order = sorted({*listed, *complete})
    newest = [max(complete)] if complete else []
    for rule in rules:
        if (number := rule.merges) is not None:
            ends = _steps([rule], complete, past, final_step=final_step)
            ends |= {step for step in in_order if _might_be_taken([rule], step, newest, final_step=final_step)}
            ends |= first_at_multiples({*in_order, *past}, rule.every_n_steps) if rule.every_n_steps else set()
            windows = (in_order[: bisect_right(in_order, end)][-number:] for end in ends if end in in_order)
            taken.update(tuple(window) for window in windows if len(window) == number)
    return taken


def might_be_eligible(
    rules: Sequence[CheckpointRule], step: int, complete: Sequence[int], *, final_step: int | None
) -> bool:
    """Returns whether an incomplete checkpoint will be wanted, by the steps that are or were complete, in order."""
    plain = _plain(rules)
    below = complete[: bisect_left(complete, step)][-1:] or [0]
    passes = any(_passes(rule.every_n_steps, below[0], step) for rule in plain if rule.every_n_steps)
    return passes or _might_be_taken(plain, step, complete[-1:], final_step=final_step)


def _plain(rules: Sequence[CheckpointRule]) -> list[CheckpointRule]:
    return [rule for rule in rules if rule.merged is None]


def _steps(
    rules: Sequence[CheckpointRule], complete: Sequence[int], past: Iterable[int], *, final_step: int | None
) -> set[int]:
    taken: set[int] = set()
    for rule in rules:
        match rule.which:
            case "all":
                return set(complete)
            case "latest" if complete:
                taken.add(max(complete))
            case "first" if complete:
                taken.add(min(complete))
        if rule.every_n_steps is not None:
            taken |= first_at_multiples({*complete, *past}, rule.every_n_steps) & set(complete)
        taken.update(step for step in complete if _by_number(rule, step, final_step=final_step))
    return taken


def _might_be_taken(
    rules: Sequence[CheckpointRule], step: int, complete: Sequence[int], *, final_step: int | None
) -> bool:
    newest = not complete or step > max(complete)
    return any(
        rule.which == "all"
        or (rule.which == "latest" and newest)
        or (rule.which == "first" and not complete)
        or _by_number(rule, step, final_step=final_step)
        for rule in rules
    )


def _by_number(rule: CheckpointRule, step: int, *, final_step: int | None) -> bool:
    return step in rule.steps or (rule.which == "final" and step == final_step)
