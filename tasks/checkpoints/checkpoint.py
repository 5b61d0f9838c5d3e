"""A checkpoint as it was found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pools.weights.model_files import ModelFolder

Kind = Literal["huggingface", "levanter", "dcp", "megatron"]
"""Layouts of checkpoints: Hugging Face's, which engines serve too, Levanter's own, and those of other trainers."""
SERVED: tuple[Kind, ...] = ("huggingface",)
LOADED_NATIVELY: tuple[Kind, ...] = ("huggingface", "levanter")
"""Kinds that an engine serves, and kinds that the native evaluation loads."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as found, complete or not. `problems` says why it is not.

    Of a merged one, `uri` is its name, and `inputs` are the checkpoints in it.
    """

    uri: str
    run: str
    name: str
    step: int
    modified: float
    kind: Kind = "huggingface"
    problems: tuple[str, ...] = ()
    folder: ModelFolder | None = field(default=None, repr=False)
    inputs: tuple[Checkpoint, ...] = field(default=(), repr=False)

    @property
    def complete(self) -> bool:
        """Returns whether it can be evaluated."""
        return not self.problems
