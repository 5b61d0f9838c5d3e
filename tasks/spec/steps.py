"""Steps, labels and series in the paths of checkpoints, as training frameworks write them.

The step is the number behind the last word for a step in a path: `step-100`, `checkpoint-100`, `global_step100`,
`iter_0000100`, `ckpt_100`, `ba100` of llm-foundry, `rollout_100` of slime, or a plain number below a folder of
checkpoints, such as `hf/100`. An export is of the same step as the folder it lies in (`step_100/policy/huggingface` of
verl) or is named after (`step100-unsharded-hf` of OLMo). What comes before the word tells series apart
(`stage1-step100-tokens1B` of OLMo 2), except values that differ from step to step (`val_loss=1.20` of NeMo 2,
`epoch0epochstep99globalstep99` of AReaL). A name without a step is a label.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

EXPORTS = (
    "hf", "huggingface", "merged_hf", "hf_model", "merged", "merged_model", "consolidated", "unsharded", "converted",
    "policy", "actor", "model", "weights",
)  # fmt: skip
"""Folders that hold an export of the step they lie in, in the order in which one of several is taken."""
_PLACES = frozenset({
    "hf", "huggingface", "checkpoint", "checkpoints", "ckpt", "ckpts", "weights", "steps", "rollouts", "exports",
    "broadcasts",
})  # fmt: skip
_SECONDARY = frozenset({
    "critic", "value", "values", "value_model", "reward", "reward_model", "ref", "reference_model", "optimizer",
    "optimizers", "optim",
})  # fmt: skip
_TEMPORARY = re.compile(r"(?:tmp|temp)[-_.].*|.*[-_.](?:tmp|partial|incomplete)", re.IGNORECASE)
_STEP = re.compile(
    r"(?:(?<![A-Za-z])(?:global[-_]?step|step|checkpoint|ckpt|iteration|iter)|^(?:ep[0-9]+-)?(?:ba|batch|rollout))"
    r"[-_=]?([0-9]{1,18})(?![0-9A-Za-z.])"
)
_REST = re.compile(
    r"(?:[-_](?:hf|huggingface|unsharded|merged|consolidated|converted|exported|safetensors|ema|last"
    r"|tokens?[-_]?[0-9.]+[KMBT]?|[A-Za-z_]+=[-+.0-9e]+))*"
)
_VALUES = re.compile(r"[A-Za-z_]+=[-+.0-9e]+|(?<![A-Za-z])(?:epoch|ep)(?:step)?[-_]?[0-9]+|tokens?[-_]?[0-9.]+[KMBT]?")
_EXPORTED = re.compile(r"(?:[-_](?:hf|huggingface|unsharded|consolidated|converted|exported|safetensors))+$")
_EPOCH = re.compile(r"(?:epoch|ep)[-_=]?([0-9]{1,18})")
_NUMBER = re.compile(r"[0-9]{1,18}")
_SCALES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_AMOUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([KMBT]?)", re.IGNORECASE)
STEPS_FROM = {"tokens": r"tokens?[-_=]?([0-9]+(?:\.[0-9]+)?[KMBT]?)", "epoch": r"(?:epoch|ep)[-_=]?([0-9]+)"}
"""Expressions that have a name, for --steps-from."""


class Stepped(NamedTuple):
    """The step in a path: the index of the part that names it, the step, the series that the part names, if any, and
    the part without suffixes of exports."""

    at: int
    step: int
    series: str
    root: str


def step_of(component: str) -> int | None:
    """Returns the training step in a folder name such as step-2000, checkpoint-500-hf or global_step_10."""
    stepped = _stepped(component, 0)
    return stepped.step if stepped else None


def has_step(name: str) -> bool:
    """Returns True for a branch or tag of a repository that is a checkpoint of its run."""
    return step_of(name) is not None


def step_in(parts: Sequence[str], *, above: str = "", steps_from: str | None = None) -> Stepped | None:
    """Returns the step in the parts of a path: that of the last part with a word for a step. `above`: the name of the
    folder they lie in. `steps_from`: an expression for steps in place of the usual words."""
    if steps_from is not None:
        return _by_expression(parts, steps_from)
    for at in range(len(parts) - 1, -1, -1):
        if stepped := _stepped(parts[at], at):
            return stepped
        if _NUMBER.fullmatch(parts[at]) and (parts[at - 1] if at else above) in _PLACES:
            return Stepped(at, int(parts[at]), "", parts[at])
    return None


@lru_cache(2**14)  # a name is asked for by each rule about its folder
def _stepped(component: str, at: int) -> Stepped | None:
    *_, matched = None, *_STEP.finditer(component)
    if matched is None or not _REST.fullmatch(component, matched.end()):
        return None
    series = [_without_values(component[: matched.start()]), "ema" if component.endswith("ema") else ""]
    return Stepped(at, int(matched[1]), "-".join(filter(None, series)), component[: matched.end()])


def _without_values(before: str) -> str:
    return re.sub(r"[-_.]{2,}", "-", _STEP.sub("", _VALUES.sub("", before))).strip("-_.=") if before else ""


def _by_expression(parts: Sequence[str], steps_from: str) -> Stepped | None:
    path = "/".join(parts)
    *_, matched = None, *re.finditer(STEPS_FROM.get(steps_from, steps_from), path)
    amount = _AMOUNT.fullmatch(matched[1]) if matched and matched[1] else None
    if matched is None or amount is None:
        return None
    whole, _, part = amount[1].partition(".")
    scale = _SCALES[amount[2].upper()]
    step = int(whole) * scale + (int(part) * scale // 10 ** len(part) if part else 0)
    at = path.count("/", 0, matched.start(1))
    begins = path.rfind("/", 0, matched.start(1)) + 1
    return Stepped(at, step, _without_values(path[begins : max(begins, matched.start())]), parts[at])


def check_expression(steps_from: str) -> str:
    r"""Returns the expression of a --steps-from, such as `step(\d+)-tokens`, tokens or epoch; raises ValueError if it
    is no regular expression with a single group."""
    try:
        groups = re.compile(STEPS_FROM.get(steps_from, steps_from)).groups
    except re.error as error:
        raise ValueError(f"expected a regular expression, found {steps_from!r}: {error}") from error
    if groups != 1:
        raise ValueError(f"expected a single group, as in 'step(\\d+)-tokens', found {groups} in {steps_from!r}")
    return steps_from


def is_export(component: str) -> bool:
    """Returns True for a folder that holds an export of the step it lies in, such as `hf` or `policy`."""
    return component in EXPORTS


def names_series(component: str) -> bool:
    """Returns True for a folder that tells series apart: neither a step, an epoch, an export nor a place of many."""
    plain = step_of(component) is None and not _EPOCH.fullmatch(component)
    return plain and component not in EXPORTS and component not in _PLACES


def rank_of(parts: Sequence[str], at: int) -> tuple[int, str]:
    """Returns the order of an export among those of its step: by the first of EXPORTS among its folders and suffixes;
    last the folder of the step itself. `at`: the index of the part with the step, -1 if it is above them all."""
    words = [*parts[at + 1 :][::-1], *(word for word in EXPORTS if at >= 0 and parts[at].endswith(word))]
    return min((EXPORTS.index(word) for word in words if word in EXPORTS), default=len(EXPORTS)), "/".join(parts)


def is_place(component: str) -> bool:
    """Returns True for a folder that trainers gather checkpoints in, which is no part of a run's name."""
    return component in _PLACES


def left_out_because(parts: Sequence[str]) -> str | None:
    """Returns why a folder of a run is no checkpoint of it, by the parts of its path below the run; None if it is."""
    if any(_TEMPORARY.fullmatch(part) for part in parts):
        return "a temporary folder, which its trainer is still writing, or gave up"
    secondary = next((part for part in parts if part.lstrip("_").lower() in _SECONDARY), None)
    return f"{secondary} of a trainer, not the model that it trains" if secondary else None


def label_of(component: str) -> str:
    """Returns the label of a folder name without a step: `best` of `checkpoint-best`, `epoch 2` of `epoch_2`."""
    if epoch := _EPOCH.fullmatch(component):
        return f"epoch {int(epoch[1])}"
    short = re.sub(r"^(?:checkpoint|ckpt|model|step)[-_]", "", _EXPORTED.sub("", component))
    return short or component
