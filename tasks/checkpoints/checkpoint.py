"""A discovered checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pools.weights.model_files import ModelFolder

Kind = Literal["huggingface", "levanter", "dcp", "megatron"]
"""Layouts of checkpoints: Hugging Face's, which alone engines serve, Levanter's own, and those of other trainers."""
SERVED: tuple[Kind, ...] = ("huggingface",)
LOADED_NATIVELY: tuple[Kind, ...] = ("huggingface", "levanter")
"""Kinds that engines serve, and kinds that the native evaluation loads."""


@dataclass(frozen=True)
class Checkpoint:
    """A discovered checkpoint; `problems` lists why it is incomplete. If merged, it has `inputs`; `uri` is a name."""

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
        return not self.problems
