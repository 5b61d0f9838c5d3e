"""Runs lm-eval itself for tests: configurations, models, and results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fakes.endpoints import KEY as KEY
from fakes.endpoints import served_model
from fakes.engine import FakeEngine
from pools.endpoint import RunningModel
from resources.backends.local.client import LocalClient
from resources.environments.environments import ensure_environment
from resources.warm.fork_server import WarmProgram
from tasks.evaluators.evaluator import Evaluator
from tasks.evaluators.harness import Parsed, run_harness, warmed
from tasks.evaluators.lm_eval.evaluator import EVALUATOR
from tasks.evaluators.lm_eval.evaluator import PROGRAM as PROGRAM
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

DEMO = ("demo_facts", "demo_backwards")
KINDS = Path(__file__).parents[1] / "data" / "lm_eval" / "kinds"
"""A benchmark of every kind that lm-eval has."""


def make_config(*benchmarks: str | EvalTaskConfig, **changes: Any) -> EvaluationConfig:
    """Returns a configuration of 10 samples of each benchmark, on a pool that the test plays."""
    evals = tuple(EvalTaskConfig(name=item) if isinstance(item, str) else item for item in benchmarks)
    return EvaluationConfig(**{"model_path": "checkpoint", "evals": evals, "max_eval_instances": 10, **changes})


def make_model(engine: FakeEngine, tokenizer: Path, **changes: Any) -> RunningModel:
    return replace(served_model(f"{engine.url}/v1", tokenizer), **changes)


@dataclass(frozen=True)
class Harness:
    """lm-eval or another harness in its own environment, forked from `server` if there is a server."""

    python: Path
    client: LocalClient
    server: WarmProgram | None = None
    evaluator: Evaluator = EVALUATOR

    async def evaluate(self, model: RunningModel, config: EvaluationConfig, output: Path, **options: Any) -> Parsed:
        """Runs the harness in a thread, since the engine lives in this loop."""
        given = {"python": self.python, "client": self.client, "server": self.server, "poll_seconds": 0.1, **options}
        return await asyncio.to_thread(run_harness, self.evaluator, model, config, output=output, **given)


@contextmanager
def kept_imported(folder: Path, evaluator: Evaluator, config: EvaluationConfig) -> Iterator[Harness]:
    """Keeps a harness imported, so that a run takes 1 s instead of 4 s."""
    python = ensure_environment(evaluator.environment(config)).python
    client = LocalClient(folder / "jobs", grace_seconds=2.0)
    try:
        with warmed(evaluator, [config], python=python, client=client) as server:
            yield Harness(python, client, server, evaluator)
    finally:
        client.shutdown()


def samples(folder: Path, benchmark: str) -> list[dict[str, Any]]:
    [path] = folder.rglob(f"samples_{benchmark}_2*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def smooth_by_hand(texts: Sequence[str], log_likelihoods: Sequence[float], right: int) -> dict[str, float]:
    """Returns bits per byte of the right choice and its normalised probability, as Marin defines both."""
    sizes = np.array([len(text.encode()) for text in texts])
    bits = -np.array(log_likelihoods) / sizes / np.log(2)
    return {"bpb": bits[right], "choice_prob_norm": (np.exp(-bits) / np.exp(-bits).sum())[right]}


def smooth_of(sample: Mapping[str, Any], right: int) -> dict[str, float]:
    """Computes `smooth_by_hand` for a kept sample, from the scores of its choices with context."""
    asked = [(pair["arg_0"], pair["arg_1"]) for pair in sample["arguments"].values()]
    # choices without context are for mutual information
    places = [place for place, (context, _) in enumerate(asked) if context]
    texts = [asked[place][1].removeprefix(" ") for place in places]
    return smooth_by_hand(texts, [float(sample["resps"][place][0][0]) for place in places], right)


def results(folder: Path) -> dict[str, Any]:
    [path] = folder.rglob("results_*.json")
    return json.loads(path.read_text())["results"]


def write_benchmark(
    folder: Path, name: str, questions: Iterable[Mapping[str, Any]] | None, **content: Any
) -> EvaluationConfig:
    """Writes a custom benchmark and returns its configuration; without `questions`, its data file is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{word}}",
        "generation_kwargs": {"max_gen_toks": 8, "until": ["\n"]},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    given = {key: value for key, value in {**given, **content}.items() if value is not None}
    (folder / f"{name}.yaml").write_text(json.dumps(given))
    if questions is not None:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    return make_config(name, benchmarks_path=str(folder))
