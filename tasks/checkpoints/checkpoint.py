"""A discovered checkpoint, and the rules that select checkpoints of a run for a policy."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, model_validator

from pools.weights.model_files import ModelFolder
from resources.config import Config
from tasks.errors import NoCheckpoints
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig

Kind = Literal["huggingface", "levanter", "dcp", "megatron", "foreign"]
"""Layouts of checkpoints: Hugging Face's, which alone engines serve, Levanter's own, and those of other trainers."""
SERVED: tuple[Kind, ...] = ("huggingface",)
LOADED_NATIVELY: tuple[Kind, ...] = ("huggingface", "levanter")
"""Kinds that engines serve, and kinds that the native evaluation loads."""
WITH_CODE: tuple[Kind, ...] = (*SERVED, "foreign")
"""Kinds that engines serve if code of checkpoints may run: frameworks' exporters unpickle without limits."""
Inputs = tuple[int, ...]
"""A checkpoint of a run as the steps of its inputs: 1 step for a trained checkpoint, several if it is merged, none if
it has a label: rules take all labels of a run or none."""


@dataclass(frozen=True)
class Checkpoint:
    """A discovered checkpoint; `problems` lists why it is incomplete. If merged, it has `inputs`; `uri` is a name.
    Where its path names no step, `step` is 0 and `label` says what it is, such as `best`, `final` or `epoch 2`; a run
    that is a single folder has neither. `series` tells it apart from other series below the same folder; the name of
    its run ends in it."""

    uri: str
    run: str
    name: str
    step: int
    modified: float
    kind: Kind = "huggingface"
    problems: tuple[str, ...] = ()
    folder: ModelFolder | None = field(default=None, repr=False)
    inputs: tuple[Checkpoint, ...] = field(default=(), repr=False)
    label: str | None = None
    series: str = ""

    @property
    def complete(self) -> bool:
        return not self.problems

    @property
    def lacking(self) -> list[Checkpoint]:
        """Itself if it is incomplete, or the incomplete inputs of a merged checkpoint."""
        return [each for each in self.inputs or (self,) if not each.complete]

    @property
    def has_known_layout(self) -> bool:
        """True if all that it lacks may still be written; weights in another layout, without a folder, are exported."""
        return all(each.folder is not None for each in self.lacking)

    @property
    def notes(self) -> tuple[str, ...]:
        return self.folder.notes if self.folder else ()

    def named_in(self, run: str) -> str:
        """Returns its name where the run that holds its series has the name `run`."""
        return f"{run}{f'-{self.series}' if self.series else ''}{self.name.removeprefix(self.run)}"


class CheckpointRule(Config):
    """A rule that selects checkpoints; `latest` alone, in YAML, means `{which: latest}`."""

    which: Literal["all", "latest", "first", "final"] | None = None
    """Every checkpoint, the checkpoint with the highest or lowest step, or the checkpoint of final_step."""
    every_n_steps: int | None = Field(default=None, ge=1)
    """The first step at or past each multiple of this number; unlike in a selection, the last step is not added."""
    steps: tuple[int, ...] = ()
    """These steps, also before they are written."""
    merged: str | None = Field(default=None, pattern=r"^last ([2-9]|[1-9][0-9]+)$")
    """`last 5` replaces each selected checkpoint by the mean of its weights and those of the four checkpoints before
    it, once all five are complete; with fewer checkpoints there is no mean."""

    @model_validator(mode="before")
    @classmethod
    def _by_word(cls, values: Any) -> Any:
        return {"which": values} if isinstance(values, str) else values

    @model_validator(mode="after")
    def _has_single_choice(self) -> CheckpointRule:
        given = [name for name in ("which", "every_n_steps", "steps") if getattr(self, name)]
        if len(given) != 1:
            names = " and ".join(given) or "none"
            raise ValueError(f"expected one of which, every_n_steps and steps, found {names}: write several rules")
        if self.merged is not None and self.which == "first":
            raise ValueError(f"expected checkpoints with earlier checkpoints for merged: {self.merged}, found first")
        return self

    @property
    def merges(self) -> int | None:
        """Number of checkpoints that are averaged into each; None if checkpoints are taken as they are."""
        return None if self.merged is None else int(self.merged.removeprefix("last "))


def layouts_for(configs: Sequence[EvaluationConfig]) -> dict[str, Any]:
    """Returns the layouts to find: Levanter's own layout too, if every evaluation loads checkpoints natively."""
    native = [config for config in configs if config.native]
    kinds = LOADED_NATIVELY if native and len(native) == len(configs) else SERVED
    kinds = WITH_CODE if configs and all(config.trusts_code for config in configs) else kinds
    return {"kinds": kinds, "reference": next((config.native_reference for config in native), None)}


def select(complete: Sequence[Checkpoint], selection: CheckpointSelection) -> list[Checkpoint]:
    """Returns the selected checkpoints; `complete` must be in order of step, those with a label last. Rules by number
    select no label, and `latest` and `first` only if there is no step."""
    stepped = [checkpoint for checkpoint in complete if checkpoint.label is None]
    if selection.which != "all":
        return [(stepped or complete)[-1 if selection.which == "latest" else 0]]
    if selection.steps:
        missing = sorted(set(selection.steps) - {checkpoint.step for checkpoint in stepped})
        if missing:
            raise NoCheckpoints(
                expected=f"complete checkpoints of steps {', '.join(map(str, selection.steps))}",
                found=f"none of {', '.join(map(str, missing))}; there are "
                + ", ".join(checkpoint.label or str(checkpoint.step) for checkpoint in complete),
                remedy="correct the steps, or wait until they are written",
            )
        return [checkpoint for checkpoint in stepped if checkpoint.step in selection.steps]
    every = selection.every_n_steps
    if every is None:
        return list(complete)
    steps = first_at_multiples({checkpoint.step for checkpoint in stepped}, every)
    steps |= {checkpoint.step for checkpoint in stepped[-1:]}
    return [checkpoint for checkpoint in stepped if checkpoint.step in steps]


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
    """Returns the checkpoints that any rule selects; inputs of merged checkpoints may be incomplete. `complete`: steps
    with a complete checkpoint. `listed`: steps with a checkpoint, complete or not; used for merged checkpoints only.
    `past`: steps that have a record but no checkpoint any more; they count as the first past their multiple."""
    taken: set[Inputs] = set()
    in_order = sorted({*listed, *complete})
    newest = [max(complete)] if complete else []
    for rule in rules:
        ends = _steps(rule, complete, past, final_step=final_step)
        if (number := rule.merges) is None:
            taken.update((step,) for step in ends)
            continue
        ends |= {step for step in in_order if _might_be_taken(rule, step, newest, final_step=final_step)}
        ends |= first_at_multiples({*in_order, *past}, rule.every_n_steps) if rule.every_n_steps else set()
        windows = (in_order[: bisect_right(in_order, end)][-number:] for end in ends if end in in_order)
        taken.update(tuple(window) for window in windows if len(window) == number)
    return taken


def might_be_eligible(
    rules: Sequence[CheckpointRule], step: int, complete: Sequence[int], *, final_step: int | None
) -> bool:
    """Returns True if an incomplete checkpoint will be selected; `complete`: sorted steps that are or were complete."""
    plain = [rule for rule in rules if rule.merged is None]
    below = complete[: bisect_left(complete, step)][-1:] or [0]
    passes = any(_passes(rule.every_n_steps, below[0], step) for rule in plain if rule.every_n_steps)
    return passes or any(_might_be_taken(rule, step, complete[-1:], final_step=final_step) for rule in plain)


def _steps(rule: CheckpointRule, complete: Sequence[int], past: Iterable[int], *, final_step: int | None) -> set[int]:
    match rule.which:
        case "all":
            return set(complete)
        case "latest":
            return {max(complete)} if complete else set()
        case "first":
            return {min(complete)} if complete else set()
        case "final":
            return set(complete) & {final_step}
    if rule.every_n_steps is not None:
        return first_at_multiples({*complete, *past}, rule.every_n_steps) & set(complete)
    return set(rule.steps) & set(complete)


def _might_be_taken(rule: CheckpointRule, step: int, complete: Sequence[int], *, final_step: int | None) -> bool:
    match rule.which:
        case "latest":
            return not complete or step > max(complete)
        case "first":
            return not complete
        case "final":
            return step == final_step
    return rule.which == "all" or step in rule.steps
