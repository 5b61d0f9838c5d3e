"""HELM's choices scored through the prefix cache of vLLM itself: per question the same values as with echoes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.lm_eval import kept_imported
from fakes.models import write_nano_llama
from fakes.tokenizers import write_byte_tokenizer
from fakes.vllm import KEY, vllm_engine
from pools.endpoint import RunningModel, Scoring
from pools.engine.engines import ENGINES
from tasks.evaluators.harness import verify_counts
from tasks.evaluators.helm.evaluator import EVALUATOR
from tasks.spec.evaluation import EvaluationConfig

pytestmark = [pytest.mark.engine, pytest.mark.harness, pytest.mark.timeout(900)]

BLOCK = ENGINES["cpu"].kwargs["block_size"]  # a token is a byte, and there is a BOS
SENTENCE = "Ein Bär holt Honig, and a bee makes it. "
SHARED = (SENTENCE * 10)[: 4 * BLOCK + BLOCK // 3]
LENGTHS = (1, BLOCK - 2, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 300, 600)
CHOICES: tuple[tuple[str, ...], ...] = (
    ("A", "B", "C", "D"),
    ("honey", "wax", "日本の蜂"),
    ("a bear and a bee", "a bear and a bear", " two bears ", "a bear"),
    (f"{SHARED} one", f"{SHARED} two", "neither"),
)
OF_THE_CLOCK = ("inference_", "batch_size", "finish_reason_")
"""Prefixes of statistics about timing, batches and the finish reason of tokens generated after an echoed prompt."""
METHODS = ("multiple_choice_separate_original", "multiple_choice_separate_calibrated")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_byte_tokenizer(write_nano_llama(tmp_path / "model", hidden=64), adds_bos=True)


@pytest.fixture
def url(tmp_path: Path, checkpoint: Path) -> Iterator[str]:
    with vllm_engine(tmp_path / "jobs", checkpoint) as engine:
        yield engine


def write_questions(folder: Path) -> Path:
    folder.mkdir()
    lines = []
    for length in LENGTHS:
        for offered in CHOICES:
            text = f"{len(lines):02d}{SENTENCE * 20}".encode()[:length].decode(errors="ignore").ljust(length, "?")
            references = [
                {"output": {"text": choice}, "tags": ["correct"] * (choice == offered[0])} for choice in offered
            ]
            lines.append(json.dumps({"input": {"text": text}, "references": references, "split": "test"}))
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def weighed(output: Path, method: str) -> tuple[dict[Any, float], dict[Any, Any]]:
    """Returns the score of each choice as HELM's metric sums it, and the statistics of each question."""
    [run] = output.glob(f"helm/benchmark_output/runs/assay/*{method}*")
    weights = {}
    for state in json.loads((run / "scenario_state.json").read_text())["request_states"]:
        choice = state["instance"]["references"][state["reference_index"]]["output"]["text"]
        [completion] = state["result"]["completions"]
        last = completion["tokens"][-len(f" {choice}".encode()) :]
        key = (state["instance"]["id"], state["reference_index"], state["request_mode"])
        weights[key] = math.fsum(token["logprob"] for token in last)
    statistics = {}
    for question in json.loads((run / "per_instance_stats.json").read_text()):
        for stat in question["stats"]:
            if not stat["name"]["name"].startswith(OF_THE_CLOCK):
                statistics[question["instance_id"], stat["name"]["name"]] = stat.get("mean")
    return weights, statistics


def questions_that_are_drawn(weights: dict[Any, float]) -> set[str]:
    """Returns the questions with likeliest choices that differ by rounding alone, such as choices that were cut off."""
    by_question: dict[str, list[float]] = {}
    for (question, _, mode), weight in weights.items():
        if mode == "original":
            by_question.setdefault(question, []).append(weight)
    return {question for question, each in by_question.items() if max(each) - sorted(each)[-2] < 1e-4}


async def test_choices_from_the_cache_weigh_what_they_weigh_in_echoes(tmp_path: Path, checkpoint: Path, url: str):
    evals = [
        {"name": "custom_mcqa", "task_alias": method, "task_kwargs": {"path": "questions.jsonl", "method": method}}
        for method in METHODS
    ]
    config = EvaluationConfig.model_validate(
        {
            "evaluator": "helm",
            "model_path": "checkpoint",
            "evals": evals,
            "benchmarks_path": str(write_questions(tmp_path / "benchmarks")),
            "max_truncated": 1.0,
        }
    )
    [listed] = httpx.get(f"{url}/models", headers={"Authorization": f"Bearer {KEY}"}).json()["data"]
    able = Scoring(scores_from_cache=True, engine=str(tmp_path), architecture="a", dtype="float32")
    ways = {}
    with kept_imported(tmp_path / "helm", EVALUATOR, config) as harness:
        for name, scoring in (("echo", Scoring()), ("cache", able)):
            model = RunningModel(
                base_url=url,
                model="m",
                tokenizer=str(checkpoint),
                capacity=16,
                prompt_logprobs=True,
                request_timeout_seconds=60.0,
                max_model_len=listed["max_model_len"],
                api_key=KEY,
                direct=True,
                scoring=scoring,
            )
            parsed = await harness.evaluate(model, config, tmp_path / name)
            verify_counts(parsed)
            ways[name] = parsed.asking.loglikelihood
    assert (ways["echo"].way, ways["cache"].way) == ("echo", "prefix cache")
    assert ways["cache"].audited >= 20 and ways["cache"].largest_difference < 1e-4
    for method in METHODS:
        weights, scores = weighed(tmp_path / "echo", method)
        assert len(weights) == len(LENGTHS) * sum(map(len, CHOICES)) * (2 if "calibrated" in method else 1)
        other_weights, other_scores = weighed(tmp_path / "cache", method)
        assert other_weights == pytest.approx(weights, abs=1e-4)
        drawn = questions_that_are_drawn(weights)
        assert len(drawn) <= 1
        scores, other_scores = (
            {key: score for key, score in each.items() if key[0] not in drawn} for each in (scores, other_scores)
        )
        assert other_scores == pytest.approx(scores, abs=1e-4)
