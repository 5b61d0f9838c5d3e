"""What the native evaluation can be told beyond the benchmarks."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, field_validator

from resources.config import Config

_POLICY = re.compile(r"(?:(?:[pco]|params|compute|output)=(?:f32|float32|bf16|bfloat16)(?:,|$))+")


class LevanterOptions(Config):
    """How Levanter evaluates a checkpoint itself."""

    max_length: int = Field(default=4096, ge=2)
    """Most tokens of a request, as far as the model holds as many; longer ones are cut on the left."""
    precision: str | None = None
    """A policy such as p=f32,c=bfloat16 (parameters, computation); float32 on a CPU, this one elsewhere when unset."""
    rows_per_device: int = Field(default=4, ge=1)
    """Rows computed at once on each device; a row holds many short requests."""
    reference: str | None = None
    """For Levanter's own checkpoints, a Hugging Face folder of the model; an export beside them when unset."""

    @field_validator("precision")
    @classmethod
    def _policy_is_readable(cls, policy: str | None) -> str | None:
        if policy is not None and not _POLICY.fullmatch(policy):
            raise ValueError(f"expected a precision such as p=f32,c=bfloat16, found {policy!r}")
        return policy

    def what_is_measured(self) -> dict[str, Any]:
        """What of this can change a score. What `reference` holds is part of the checkpoint's digest."""
        return self.model_dump(mode="json", include={"max_length", "precision"})
