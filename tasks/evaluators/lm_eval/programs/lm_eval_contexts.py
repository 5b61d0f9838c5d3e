"""Records the length of prompts before the question while they are built: lm-eval's samples do not separate the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lm_eval.api.task import Task

QUESTIONS = ("doc_to_text", "doc_to_choice")
"""Methods that make the question, and where each choice has its own context, all of them; the last call counts."""


@contextmanager
def noted_contexts(task: Task) -> Iterator[list[int]]:
    """Yields characters of description and examples in the prompts that a task builds meanwhile; 0 if unknown."""
    lengths: list[int] = []
    shown: dict[str, Any] = {}
    before = {name: vars(task).get(name) for name in ("fewshot_context", *QUESTIONS) if hasattr(task, name)}
    build = task.fewshot_context

    def noting(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            shown[name] = text = make(*arguments, **options)
            return text

        return noted

    def built(*arguments: Any, **options: Any) -> Any:
        shown.clear()
        prompt = build(*arguments, **options)
        lengths.append(length_before(prompt, *map(shown.get, QUESTIONS)))
        return prompt

    for name in before.keys() - {"fewshot_context"}:
        setattr(task, name, noting(name, getattr(task, name)))
    task.fewshot_context = built
    try:
        yield lengths
    finally:
        for name, own in before.items():
            delattr(task, name) if own is None else setattr(task, name, own)


def length_before(prompt: Any, question: Any, choices: Any) -> int:
    """Returns the characters before the question, or before each choice; 0 if not found, or if they differ."""
    prompts, questions = (prompt, choices) if isinstance(prompt, list) else ([prompt], [question])
    if not isinstance(questions, list) or len(prompts) != len(questions):
        return 0
    places = {_place(*pair) for pair in zip(prompts, questions, strict=True)}
    return places.pop() if len(places) == 1 else 0


def _place(prompt: Any, question: Any) -> int:
    if not isinstance(prompt, str) or not isinstance(question, str):
        return 0
    whole = prompt.rfind(question)  # chat templates may strip their input
    return max(whole if whole >= 0 else prompt.rfind(question.strip()), 0) if question.strip() else 0
