"""Made questions and answers in the form that the page gets, without records, samples or a server."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import orjson

from tasks.reports.viewer.columns import (
    CUT,
    NO_SCORE,
    SHORTENED,
    UNSCORED,
    Answer,
    Index,
    Pair,
    Part,
    Questions,
    Scale,
    Score,
    ViewedBenchmark,
    ViewedCheckpoint,
    ViewedQuestion,
    as_bytes,
    is_right,
)

HOSTILE = (
    "<script>document.title = 'taken'</script>",
    "<img src=x onerror=\"document.title = 'taken'\">",
    "</script><svg onload=\"document.title = 'taken'\">",
    "javascript:document.title='taken'",
    "\u202e\u0000{{constructor.constructor('document.title=1')()}}",
)
"""Texts that have effects if they are read as HTML or a script."""


def made_files(
    *, questions: int = 300, checkpoints: int = 12, questions_per_part: int = 8, hostile: bool = False, seed: int = 0
) -> Mapping[str, bytes]:
    """Returns contents by name: 2 benchmarks, choices that are learned, lost and flip, and generated answers."""
    source = random.Random(seed)
    files: dict[str, bytes] = {}
    benchmarks = []
    for benchmark, evaluator in (("made_choices", "lm-eval"), ("made_answers", "HELM")):
        name = f"{benchmark} {HOSTILE[1]}" if hostile else benchmark
        key = f"{evaluator}-{benchmark}-5f0c2a7b".replace("_", "-").lower()
        choices = benchmark == "made_choices"
        metrics = [Scale("acc", True, 0.0, 1.0), Scale("bpb", False, 0.2, 3.0, True)]
        metrics = metrics if choices else [Scale("f1", True, 0.0, 1.0)]
        known = np.random.default_rng(seed)
        learned = known.integers(0, 2 * checkpoints, questions)
        lost = np.where(known.random(questions) < 0.1, learned + known.integers(1, checkpoints, questions), 10**6)
        steps = np.arange(checkpoints)[:, None]
        right = ((steps >= learned) & (steps < lost)) ^ (known.random((checkpoints, questions)) < 0.04)
        first = right.astype(float) if choices else np.where(right, 1.0, known.random((checkpoints, questions)) / 2)
        columns = [as_bytes(first, metrics[0])]
        columns += [as_bytes(2.4 - 1.6 * right + known.normal(0, 0.2, right.shape), metrics[1])] if choices else []
        flags = np.where(known.random(right.shape) < (0.0 if choices else 0.05), CUT, 0)
        flags |= np.where(known.random(right.shape) < 0.01, SHORTENED, 0)
        empty, withheld = checkpoints - 2, checkpoints // 2
        for column in columns:
            column[empty] = NO_SCORE
        flags[empty], flags[withheld] = 0, flags[withheld] | UNSCORED
        shown = []
        for number in range(checkpoints):
            status = {empty: "failed", withheld: "withheld"}.get(number, "succeeded")
            value = float(first[number].mean())
            step, merged = 1000 * (number + 1), number == checkpoints - 1
            shown.append(
                ViewedCheckpoint(
                    run=HOSTILE[2] if hostile else "run-a",
                    name=f"run-a-{step}-mean" if merged else f"run-a-{step}",
                    step=step,
                    merge="mean(run-a@last:3)" if merged else None,
                    status=status,
                    note=None if status == "succeeded" else "118 answers to 120 questions",
                    samples=number != empty,
                    scores={metrics[0].name: Score(value, value - 0.05, value + 0.05)} if status == "succeeded" else {},
                )
            )
        names = [metric.name for metric in metrics]
        benchmarks.append(ViewedBenchmark(key, evaluator, name, "", "5f0c2a7be1d94c36", names, shown))
        ids = [f"{HOSTILE[number % 5]} {number}" if hostile else f"question-{number}" for number in range(questions)]
        clusters = [f"passage-{number // 3}" for number in range(questions)] if not choices else []
        parts = ["made_one", "made_two"] if choices else [name]
        part = [int(number >= questions // 2) for number in range(questions)] if choices else []
        files[f"{key}/questions.json"] = orjson.dumps(
            Questions(ids, parts, part, clusters, metrics, questions_per_part)
        )
        for number, column in enumerate(columns):
            files[f"{key}/scores/{number}.bin"] = column.tobytes()
        files[f"{key}/flags.bin"] = flags.astype(np.uint8).tobytes()
        asked = [
            _question(
                number, right[:, number], flags[:, number], empty, choices=choices, hostile=hostile, source=source
            )
            for number in range(questions)
        ]
        for number in range(0, questions, questions_per_part):
            content = Part(number, asked[number : number + questions_per_part])
            files[f"{key}/part/{number // questions_per_part}.json"] = orjson.dumps(content)
        with_samples = [number for number in range(checkpoints) if number != empty]
        neighbours = [*pairwise(with_samples), (with_samples[0], with_samples[-1])]
        for metric, column in enumerate(columns):
            for before, after in neighbours:
                made = _pair(column[before], column[after], metrics[metric])
                files[f"{key}/pairs/{metric}-{before}-{after}.json"] = orjson.dumps(made)
    return {"index.json": orjson.dumps(Index("Made questions", searches=False, benchmarks=benchmarks)), **files}


def _question(
    number: int,
    right: np.ndarray,
    flags: np.ndarray,
    empty: int,
    *,
    choices: bool,
    hostile: bool,
    source: random.Random,
) -> ViewedQuestion:
    words = source.sample(["red", "green", "blue", "yellow", "round", "square", "large", "small"], 4)
    trap = HOSTILE[number % len(HOSTILE)] if hostile else ""
    target = words[0]
    answers: list[list[Answer]] = []
    for checkpoint, good in enumerate(right):
        likelihoods = [source.gauss(-4.0, 0.5) + (2.5 if (place == 0) == good else 0.0) for place in range(4)]
        text = (target if good else words[1]) if choices else " ".join([*source.choices(words, k=12), trap, target])
        answer = Answer(
            output=f"{text}{trap}",
            scores={"acc": float(good), "bpb": 0.8 if good else 2.4} if choices else {"f1": 1.0 if good else 0.3},
            log_likelihoods=likelihoods if choices else (),
            finish=None if choices else "length" if flags[checkpoint] & CUT else "stop",
            tokens=None if choices else len(text.split()),
            truncated=bool(flags[checkpoint] & SHORTENED),
            prompt=f"In other words: question {number}?" if number == 3 and checkpoint == 1 else None,
        )
        answers.append([] if checkpoint == empty else [answer])
    context = "Question: what is the sky?\nAnswer: blue\n\n" * 5
    prompt = f"Question: number {number} of {', '.join(words)}? {trap}\nAnswer:"
    return ViewedQuestion(context, prompt, f"{target}{trap}", tuple(words) if choices else (), answers)


def _pair(before: np.ndarray, after: np.ndarray, scale: Scale) -> Pair:
    scored = (before != NO_SCORE) & (after != NO_SCORE)
    more = after.astype(int) - before.astype(int) if scale.higher_is_better else before.astype(int) - after
    right = is_right(after, scale)
    kinds = (scored & (more > 0), scored & (more < 0), scored & (more == 0) & right, scored & (more == 0) & ~right)
    won, lost, both, neither = (np.flatnonzero(kind).tolist() for kind in kinds)
    difference = (len(won) - len(lost)) / max(1, int(scored.sum()))
    return Pair(
        won,
        lost,
        both,
        neither,
        values=(0.5, 0.5 + difference),
        difference=difference,
        low=difference - 0.04,
        high=difference + 0.04,
        p=0.03,
        exact_p=0.04,
        test="McNemar, mid-p",
    )
