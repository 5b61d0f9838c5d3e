"""Sends requests in a given order until all scores are decided, for `run_lm_eval.py`.

All prompts are built as for the whole benchmark, since examples depend on the order of documents. Batches are sent and
scored with the benchmark's own filters and metrics, until `early_decision.py`, a copy of our module in the working
folder, has a verdict for each score. If that takes every question, lm-eval goes on with these answers.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.utils import handle_non_serializable, hash_string
from lm_eval_loading import name_of
from lm_eval_model import NO_ANSWER
from refusals import Refused

WANTED_NAME, ANSWERED_NAME = "early.json", "early.jsonl"
ROUNDS = 2
"""Requests of a batch for each that the pool has room for: with more, fewer of its replicas idle at a batch's end."""
PARTS = 16
"""Minimum number of batches of a benchmark: a pool may have room for all of a small benchmark."""
GROWTH = 8
"""Up to 1 in 8 questions may be requested after the verdict is determined."""
HASH_DIGITS, PROMPT_BYTES = 12, 8  # of names of questions, and of digests of prompts, as in our samples
Key = tuple[str, str]


class DecidedEarlyError(Exception):
    """All scores are decided, and questions are left."""


@dataclass
class Question:
    """A question with its document and its requests."""

    task: Task
    document: Any
    requests: list[Instance] = field(default_factory=list)


@dataclass
class EarlyQuestions:
    """The questions of all tasks, by benchmark and id."""

    tasks: dict[str, list[Task]]
    model: Any
    output: Path
    room: int

    def __post_init__(self) -> None:
        self._answers: dict[int, list[Any]] = {}
        self._scores: dict[Key, dict[str, float]] = {}
        self._batches = 0
        self._questions: dict[Key, Question] = {}
        for task in (task for items in self.tasks.values() for task in items):
            self._questions |= questions_of(task)
        self._types = {request.request_type for question in self._questions.values() for request in question.requests}

    def ask(self, plan: dict[str, Any]) -> None:
        """Repeats the batches of an earlier attempt, then sends more as long as something is undecided."""
        keys: list[Key] = [tuple(key) for key in plan["questions"]]
        if keys:
            self._refuse_others(keys, plan["prompts"])
        (self.output / ANSWERED_NAME).write_text("")
        for batch in plan["batches"]:
            self._ask([key for key in map(tuple, batch) if key in self._questions])
        if keys:
            self._decide(keys, plan)
        for kind in self._types:
            setattr(self.model, kind, partial(self._answered, getattr(self.model, kind)))

    def _decide(self, keys: list[Key], plan: dict[str, Any]) -> None:
        sys.path.append(str(Path.cwd()))
        asking = importlib.import_module("early_decision").EarlyAsking(plan)
        requests = sum(len(question.requests) for question in self._questions.values()) / len(self._questions)
        least = max(1, min(round(ROUNDS * self.room / requests), len(keys) // PARTS))
        asked = 0
        while places := [] if asking.decided else asking.next(max(least, asked // GROWTH)):
            self._ask([keys[place] for place in places if keys[place] not in self._scores])
            try:
                asking.take({place: self._scores[keys[place]] for place in places})
            except ValueError as error:
                raise Refused(
                    expected="a score from 0 to what its metric can be for every question that was asked",
                    found=str(error),
                    remedy="There is no verdict. Read harness.log next to the record, or evaluate without --early",
                    kind="CountsDisagree",
                ) from error
            asked += len(places)
        if len(self._scores) < len(self._questions):
            raise DecidedEarlyError

    def _refuse_others(self, keys: list[Key], prompts: list[str | None]) -> None:
        own, baseline = self._questions.keys(), set(keys)
        difference = (
            f"{len(own - baseline)} asked only in this evaluation, {len(baseline - own)} only of the baseline"
            if own != baseline
            else None
        )
        other = sum(
            prompt is not None and key in own and prompt != digest_of(self._questions[key].requests[0])
            for key, prompt in zip(keys, prompts, strict=True)
        )
        difference = difference or (f"{other} of {len(keys)} put in other words" if other else None)
        if difference is not None:
            raise Refused(
                expected="the questions that the baseline was asked, to decide early",
                found=difference,
                remedy="Evaluate without --early, or the baseline again with these questions",
            )

    def _ask(self, keys: Sequence[Key]) -> None:
        if not keys:
            return
        by_kind: dict[str, list[Instance]] = defaultdict(list)
        for request in (request for key in keys for request in self._questions[key].requests):
            by_kind[request.request_type].append(request)
        for kind, requests in by_kind.items():
            if self._batches == 0:  # lm-eval's message, which labels the progress bars
                logging.getLogger("lm_eval.evaluator").info("Running %s requests", kind)
            repeated = [request for request in requests for _ in range(request.repeats or 1)]
            for request, answer in zip(repeated, getattr(self.model, kind)(repeated), strict=True):
                self._answers.setdefault(id(request), []).append(answer)
        self._score(keys)
        with (self.output / ANSWERED_NAME).open("a", encoding="utf-8") as file:
            for benchmark, name in keys:
                scores = self._scores[benchmark, name]
                line = {"benchmark": benchmark, "id": name, "batch": self._batches, "scores": scores}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._batches += 1

    def _score(self, keys: Sequence[Key]) -> None:
        by_task: dict[int, list[Key]] = defaultdict(list)
        for key in keys:
            by_task[id(self._questions[key].task)].append(key)
        for several in by_task.values():
            questions = [self._questions[key] for key in several]
            task, requests = questions[0].task, [request for question in questions for request in question.requests]
            for request in requests:
                request.resps = self._answers[id(request)]
            for filters in task._filters:
                filters.apply(requests)
            for key, question in zip(several, questions, strict=True):
                self._scores[key] = dict(_scores_of(question))
            for request in requests:  # lm-eval fills them again
                request.resps, request.filtered_resps = [], {}

    def _answered(self, ask: Any, requests: list[Instance], **options: Any) -> list[Any]:
        missing = [request for request in requests if id(request) not in self._answers]
        new_answers = iter(ask(missing, **options) if missing else ())
        known = {number: iter(answers) for number, answers in self._answers.items()}
        return [next(known.get(id(request), new_answers)) for request in requests]


def questions_of(task: Task) -> dict[Key, Question]:
    """Returns the questions of a task by their ids in our samples."""
    documents = dict(task.doc_iterator())
    by_number: dict[int, Question] = {}
    for request in sorted(task.instances, key=lambda instance: instance.idx):
        number = request.doc_id or 0
        by_number.setdefault(number, Question(task, documents[number])).requests.append(request)
    questions: dict[Key, Question] = {}
    for number, question in by_number.items():
        content = json.dumps(question.requests[0].doc, indent=2, default=handle_non_serializable, ensure_ascii=False)
        questions[name_of(task), f"{number}-{hash_string(content)[:HASH_DIGITS]}"] = question
    return questions


def digest_of(request: Instance) -> str:
    """Returns the digest of a request's prompt, as read from a sample."""
    prompt = request.args[0]
    if not isinstance(prompt, str):
        prompt = str(json.loads(json.dumps(prompt, default=handle_non_serializable)))
    return hashlib.sha256(prompt.encode(errors="replace")).digest()[:PROMPT_BYTES].hex()


def _scores_of(question: Question) -> Iterator[tuple[str, float]]:
    if not all(_is_answer(answer) for request in question.requests for answer in request.resps):
        return
    filters = list(question.requests[0].filtered_resps)
    for name in filters:
        filtered = [request.filtered_resps[name] for request in question.requests]
        for metric, value in question.task.process_results(question.document, filtered).items():
            if isinstance(value, bool | int | float | np.integer) and math.isfinite(value):
                yield (f"{metric},{name}" if len(filters) > 1 and name != "none" else metric), float(value)


def _is_answer(answer: Any) -> bool:
    if isinstance(answer, str):
        return answer != NO_ANSWER
    return math.isfinite(answer[0] if isinstance(answer, tuple | list) else answer)
