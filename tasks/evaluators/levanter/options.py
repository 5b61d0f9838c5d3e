"""Options of Levanter, beyond the benchmarks."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from tasks.evaluators.lm_eval.options import METHOD
from tasks.spec.evaluators import LevanterComputation, LmEvalBenchmarkOptions, NativeOptions


class LevanterOptions(LmEvalBenchmarkOptions, NativeOptions, LevanterComputation):
    """Options of Levanter, which evaluates a checkpoint itself."""

    title: ClassVar = "Levanter"

    name: Literal["levanter_lm_evaluation_harness"] = "levanter_lm_evaluation_harness"
    """Selects Levanter."""

    def score_inputs(self) -> dict[str, Any]:
        """Returns the options that can change a score; the content of `reference` is in the checkpoint's digest."""
        return {**self.model_dump(mode="json", include={"max_length", "precision", "long_prompts"}), "method": METHOD}


OPTIONS = LevanterOptions
