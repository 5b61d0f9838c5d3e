"""Options of lm-eval, beyond the benchmarks."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from tasks.spec.evaluators import EvaluatorOptions, LevanterComputation, LmEvalBenchmarkOptions, options_kind

METHOD = 2
"""Version of the request method: in another version, the same options give other scores.

Records and answers of different versions are not mixed. Raise it when prompts, windows, leading tokens, or the
validation of answers change. 2: BOS and windows as in `--model hf`, no seeds.
"""


class LmEvalOptions(LmEvalBenchmarkOptions):
    """Options of lm-eval."""

    title: ClassVar = "lm-eval"
    reads_tokenizer: ClassVar = True
    in_suites: ClassVar = {"max_gen_toks": 4096}

    name: Literal["lm_evaluation_harness"] = "lm_evaluation_harness"
    """Selects lm-eval."""
    endpoint: Literal["completions", "chat_completions"] = "completions"
    """Token ids to /completions, or messages to /chat/completions, which can only generate."""
    max_gen_toks: int | None = Field(default=None, ge=1)
    """Most tokens of an answer where a benchmark sets none; 256 when unset, and never over half of the context."""
    failed_control: Literal["withhold", "note"] = "withhold"
    """If a benchmark's grader scores none of its own right answers: withhold the score, or only note it."""
    without_prompt_logprobs: Literal["refuse", "levanter"] = "refuse"
    """For engines that return no log-probabilities of prompts: refuse, or let Levanter evaluate the checkpoint."""
    levanter: LevanterComputation = LevanterComputation()
    """Levanter's options in that case."""

    def score_inputs(self) -> dict[str, Any]:
        """Returns the options that can change a score; where Levanter evaluates, its own options count."""
        options = self.model_dump(mode="json", include={"endpoint", "max_gen_toks", "long_prompts"})
        return {**options, "method": METHOD}

    @property
    def levanter_fallback(self) -> EvaluatorOptions | None:
        """Options of Levanter for engines without log-probabilities of prompts; None to refuse."""
        if self.without_prompt_logprobs == "refuse":
            return None
        shared = {"long_prompts": self.long_prompts, "allow_code_execution": self.allow_code_execution}
        return options_kind("levanter_lm_evaluation_harness").model_validate({**self.levanter.model_dump(), **shared})

    def without_fallback(self) -> LmEvalOptions:
        """Returns the options for benchmarks that Levanter cannot evaluate."""
        return self.model_copy(update={"without_prompt_logprobs": "refuse"})


OPTIONS = LmEvalOptions
