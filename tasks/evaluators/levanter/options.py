"""Options of Levanter, beyond the benchmarks."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from resources.config import Config
from tasks.spec.evaluators import LmEvalBenchmarkOptions, NativeOptions

_POLICY = re.compile(r"(?:(?:[pco]|params|compute|output)=(?:f32|float32|bf16|bfloat16)(?:,|$))+")


class LevanterComputation(Config):
    """How Levanter computes log-probabilities."""

    max_length: int = Field(default=4096, ge=2)
    """Most tokens of a request, as far as the model holds as many; longer ones are cut on the left."""
    precision: str | None = None
    """A policy such as p=f32,c=bfloat16 (parameters, computation); float32 on a CPU, this one elsewhere when unset."""
    rows_per_device: int = Field(default=4, ge=1)
    """Rows computed at once on each device; a row holds many short requests."""

    @field_validator("precision")
    @classmethod
    def _policy_is_readable(cls, policy: str | None) -> str | None:
        if policy is not None and not _POLICY.fullmatch(policy):
            raise ValueError(f"expected a precision such as p=f32,c=bfloat16, found {policy!r}")
        return policy


class LevanterOptions(LmEvalBenchmarkOptions, NativeOptions, LevanterComputation):
    """How Levanter evaluates a checkpoint itself."""

    title: ClassVar = "Levanter"

    name: Literal["levanter_lm_evaluation_harness"] = "levanter_lm_evaluation_harness"
    """Says that this evaluator is Levanter."""

    def score_inputs(self) -> dict[str, Any]:
        """Return the options that can change a score. What `reference` holds is part of the checkpoint's digest."""
        return self.model_dump(mode="json", include={"max_length", "precision", "long_prompts"})


OPTIONS = LevanterOptions
