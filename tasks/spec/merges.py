"""Options of a merged checkpoint, from which its name is built."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

from pydantic import Field

from pools.weights.merges import STEPS_PATTERN, Merge, MergeKind, Source, merge_of
from resources.config import Config


class MergeOptions(Config):
    """An average of checkpoints of the run at model_path, evaluated in their place."""

    kind: MergeKind = "mean"
    """The plain or weighted average, an exponential moving average, the weights of a decayed learning rate, or two
    checkpoints interpolated."""
    steps: Annotated[str, Field(pattern=f"^({STEPS_PATTERN})$")] | tuple[int, ...] = "last:5"
    """Steps of the run: a list, 8000..10000, ..10000, 8000.. or last:5."""
    weights: float | str | tuple[float, ...] | None = Field(default=None, union_mode="left_to_right")
    """Shares of a mean, as a list; the decay of an ema, such as 0.9; linear, cosine or sqrt of a wsm; the share of the
    second checkpoint of an interpolate."""

    def merge(self, path: str) -> Merge:
        steps = self.steps if isinstance(self.steps, str) else "+".join(map(str, self.steps))
        match self.weights:
            case None:
                parameter = ""
            case str() as word:
                parameter = word
            case tuple() as shares:
                parameter = "+".join(map(_decimal, shares))
            case number:
                parameter = _decimal(number)
        merge = Merge(self.kind, (Source(path, steps),), parameter)
        parsed = merge_of(str(merge))  # rejects merges that have no valid name
        assert parsed is not None, "a written merge can be parsed"
        return parsed


def with_merge_named(values: Any) -> Any:
    """Moves the merge of a request into its model_path, as the merge's name."""
    if not isinstance(values, dict) or values.get("merge") is None:
        return values
    if not isinstance(path := values.get("model_path"), str) or merge_of(path) is not None:
        raise ValueError("expected the run in model_path with merge: name a run that holds checkpoints")
    merge = MergeOptions.model_validate(values["merge"]).merge(path)
    return {name: value for name, value in values.items() if name != "merge"} | {"model_path": str(merge)}


def _decimal(number: float) -> str:
    return format(Decimal(repr(number)).normalize(), "f")
