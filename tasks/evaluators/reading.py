"""Reads files of a harness or of our programs; raises for damaged files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from resources.storage.regular_files import open_regular
from tasks.errors import HarnessOutputInvalid
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.names import how_many

PLAN_NAME = "plan.json"
"""Written by our programs before the first request, each in its own format."""
_Content = TypeVar("_Content")
_LARGEST_RESULT_BYTES = 256 << 20  # objects take 20 times as much; HELM's largest files have a tenth


class Unanswered(BaseModel):
    """Requests without an answer after all tries, as `programs/valid_answers.py` counts them."""

    refused: int = 0
    failed: int = 0
    first_failure: str = ""
    first_refusal: str = ""
    replaced: int = 0  # answers with halves of surrogate pairs

    @property
    def notes(self) -> list[str]:
        note = f"In {self.replaced} of the endpoint's answers U+FFFD replaces halves of surrogate pairs."
        return [note] if self.replaced else []

    @property
    def endpoint_failure(self) -> str | None:
        """The endpoint's failures, formatted; None without any, or if it refused requests."""
        if self.refused or not self.failed:
            return None
        return f"{how_many(self.failed, 'request')} had no answer, the first for: {self.first_failure}"

    @property
    def endpoint_refusal(self) -> str | None:
        """The endpoint's refusals, formatted with its first message; None without any."""
        if not self.refused:
            return None
        return f"the endpoint refused {how_many(self.refused, 'request')}, the first for: {self.first_refusal}"


_Count = Annotated[int, Field(ge=0, le=10**15)]


class TokensToAsk(BaseModel):
    """Tokens that a benchmark will request, according to its plan."""

    questions: _Count
    generates: bool  # else given texts are scored
    prompt_tokens: _Count  # as engines count them, cached tokens included
    answer_tokens: _Count  # upper bound


class _Planned(BaseModel):
    to_be_asked: dict[str, TokensToAsk]


def tokens_to_ask(output: Path) -> list[TokensToAsk] | None:
    """Returns the tokens of each benchmark from the plan in a folder; None if the plan is missing or lacks them."""
    try:
        return list(_Planned.model_validate_json((output / PLAN_NAME).read_bytes()).to_be_asked.values())
    except (OSError, ValidationError):
        return None


def read_result(harness: str, path: Path, kind: type[_Content]) -> _Content:
    """Parses a JSON file as a value of a type."""
    try:
        with open_regular(path.parent, path.name, max_bytes=_LARGEST_RESULT_BYTES) as file:
            return TypeAdapter(kind).validate_json(file.read())
    except OSError as error:
        raise invalid_results(harness, path.parent, f"no readable {path.name} ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"not what {harness} writes: {'.'.join(map(str, first['loc']))} {first['msg']}"
        raise invalid_results(harness, path, problem) from error


def require_plan_of(planned: Iterable[str], config: EvaluationConfig, *, harness: str, output: Path) -> None:
    """Raises unless a plan has exactly the benchmarks of an evaluation."""
    planned_keys, expected_keys = set(planned), {task.metric_key for task in config.evals}
    if planned_keys != expected_keys:
        raise invalid_results(
            harness, output, f"a plan for {', '.join(sorted(planned_keys))}, not {', '.join(sorted(expected_keys))}"
        )


def finish_of(reasons: Iterable[str | None]) -> str | None:
    """Returns the finish reason of answers to a question: `length` if any was cut, else the first."""
    known = [reason for reason in reasons if reason]
    return "length" if "length" in known else next(iter(known), None)


def is_unclosed(text: str) -> bool:
    """Returns True if reasoning began in an answer and never closed."""
    return "<think>" in text and "</think>" not in text.rpartition("<think>")[2]


def invalid_results(harness: str, place: Path, problem: str) -> HarnessOutputInvalid:
    """Returns the error for unusable results of a harness."""
    return HarnessOutputInvalid(
        expected=f"results of {harness} in {place}",
        found=problem,
        remedy="Read harness.log next to the record, then evaluate again",
    )
