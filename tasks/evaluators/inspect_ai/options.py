"""Options of Inspect, beyond the tasks: solver, sampling, and a judge."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from resources.config import JsonObject
from tasks.spec.evaluators import CodeOptions, JudgedOptions, JudgeEndpoint


class InspectOptions(JudgedOptions, CodeOptions):
    """Options of Inspect."""

    title: ClassVar = "Inspect"

    name: Literal["inspect_ai"] = "inspect_ai"
    """Selects Inspect."""
    judge: JudgeEndpoint | None = None
    """The model for the role `grader`, which judges answers if a task has a judge; the evaluated model when unset."""
    epochs: int | None = Field(default=None, ge=1)
    """Times each question is asked; the task's own number when unset."""
    solver: str | None = None
    """Solver in place of the tasks' own: one of Inspect's, such as generate, or of a package in its environment."""
    solver_args: JsonObject = {}
    """Arguments of that solver."""
    temperature: float | None = Field(default=None, ge=0)
    """Temperature of sampling; the task's own, else the engine's default when unset."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Share of the probability that is sampled from; the task's own, else the engine's default when unset."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an answer; the task's own, else the rest of the context, or half of it without a chat template."""
    emulate_tools: bool = False
    """Describe tools in the prompt and read calls out of the answer, for engines without a parser of tool calls."""
    higher_is_better: dict[str, bool] = {}
    """Directions of metrics by name: true if more is better. By default only accuracy has a direction."""

    def score_inputs(self) -> dict[str, Any]:
        """Returns the options that can change a score."""
        return self.model_dump(mode="json", exclude={"name", "allow_code_execution", "higher_is_better"})


OPTIONS = InspectOptions
