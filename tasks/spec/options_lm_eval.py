"""What lm-eval can be told beyond the benchmarks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from resources.config import Config


class LmEvalOptions(Config):
    """How lm-eval asks."""

    endpoint: Literal["completions", "chat_completions"] = "completions"
    """Where prompts go: token ids to /completions, or messages to /chat/completions, which can only generate."""
    max_gen_toks: int | None = Field(default=None, ge=1)
    """Most tokens of an answer where a benchmark sets none; 256 when unset, and never over half of the context."""
    long_prompts: Literal["truncate_left", "skip", "fail"] = "truncate_left"
    """Prompts too long for the model: cut on the left as lm-eval does, leave the question out, or refuse to begin."""
    allow_code_execution: tuple[str, ...] = ()
    """Benchmarks that may run code written by the model, on this machine, each by its name, such as humaneval."""

    def what_is_measured(self) -> dict[str, Any]:
        """What of this can change a score."""
        return self.model_dump(mode="json", exclude={"allow_code_execution"})
