"""Requests until an early decision of a gate against the whole evaluation, and how often the whole contradicts it.

    make bench NAME=early
    python tests/benchmarks/early.py [--decisions 100] [--demo FOLDER]

- `early.unchanged`: lm-eval, as an evaluation runs it, sends 10,000 made questions to a stub engine, whole and then
  until a margin of 2 points is decided. A tenth of the answers differ from the baseline's, half of them for the better.
- simulations: checkpoints a single question from the margin, on either side of it, over sizes, flips, margins and
  clusters; none of the kinds may be contradicted more often than by alpha = 5 %, apart from chance. Then the table of
  the how-to.
- `early.demo`, with a folder of whole records of a run: each checkpoint against each other checkpoint as its baseline,
  with the recorded answers, with margins of 2, 5 and 10 points.

There are 144 kinds of simulated checkpoints; with 100 decisions of each it takes about 3 minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from peers import stub_engine
from side_by_side import (
    BENCH,
    Comparison,
    end_children_on_sigterm,
    give_up,
    installed_version,
    print_comparison,
    print_table,
    say,
)
from stub_engine import MODEL

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.early_simulations import ALPHA, TABLE, hardest, simulated

from fakes.lm_eval import make_config, write_benchmark
from fakes.models import CONFIG, write_checkpoint
from fakes.records import make_metric, make_record, publish
from fakes.tokenizers import write_byte_tokenizer
from pools.endpoint import RunningModel
from resources.backends.local.client import LocalClient
from resources.environments.environments import ensure_environment
from tasks.checkpoints.discovery import discover
from tasks.evaluators.environments import LM_EVAL
from tasks.evaluators.harness import run_harness
from tasks.evaluators.lm_eval.evaluator import EVALUATOR
from tasks.records.record import find_records
from tasks.records.samples import SAMPLES_NAME, Sample, read_samples
from tasks.running.cells import plan_cells
from tasks.running.early import decided_early
from tasks.spec.evaluation import CheckpointSelection
from tasks.verdicts.gate import Gate
from tasks.verdicts.statistics.composition import QuestionScores
from tasks.verdicts.statistics.early import EarlyDecision

WORK = BENCH / "early"
QUESTIONS, FLIPPED, MARGIN, ROUNDS = 10_000, 0.1, 0.02, 5
MARGINS = (0.02, 0.05, 0.1)
_CAPACITY = 16


def unchanged(count: int, rounds: int) -> Comparison:
    """Returns requests of whole and early evaluations of a checkpoint that is as good as its baseline."""
    shutil.rmtree(WORK, ignore_errors=True)
    questions = [{"question": f"Question {n}?", "word": " ok" if n % 5 < 3 else " no"} for n in range(count)]
    write_benchmark(WORK / "benchmarks", "made", questions)
    checkpoint = write_checkpoint(WORK / "run" / "hf" / "step-2", config={**CONFIG, "num_attention_heads": 1})
    tokenizer = write_byte_tokenizer(checkpoint)
    config = make_config(
        "made",
        model_path=str(WORK / "run"),
        evaluation_path=str(WORK / "evaluations"),
        benchmarks_path=str(WORK / "benchmarks"),
        max_eval_instances=None,
    )
    [cell] = plan_cells([config], discover(config.model_path, CheckpointSelection()))
    rule = {"benchmark": "made", "metric": "exact_match", "not_worse_than": "run@1", "by_more_than": MARGIN}
    gate = Gate.model_validate({"rules": [rule], "decide": "early", "alpha": ALPHA})
    client = LocalClient(WORK / "jobs", grace_seconds=2.0)
    asked: list[int] = []
    with stub_engine(WORK, checks=True) as stub:
        model = RunningModel(
            base_url=f"http://127.0.0.1:{stub.ports[0]}/v1",
            model=MODEL,
            tokenizer=str(tokenizer),
            capacity=_CAPACITY,
            prompt_logprobs=True,
            request_timeout_seconds=60.0,
            max_model_len=2048,
            api_key="none",
        )

        def requests(name: str, early: Any = None) -> tuple[int, Any]:
            before = sum(stub.counts())
            given = {"output": WORK / name, "python": ensure_environment(LM_EVAL).python, "client": client}
            parsed = run_harness(EVALUATOR, model, config, early=early, **given)
            return sum(stub.counts()) - before, parsed

        whole, _ = requests("whole")
        samples = list(read_samples(str(WORK / "whole" / SAMPLES_NAME)))
        for number in range(rounds):
            shutil.rmtree(WORK / "evaluations", ignore_errors=True)
            before = _flipped(samples, np.random.default_rng(number))
            mean = float(np.mean([sample.scores["exact_match"] for sample in before]))
            metric = make_metric("made", mean, name="exact_match", n=count)
            fields: dict[str, Any] = {"run": "run", "place": str(WORK), "evaluation_hash": cell.evaluation_hash}
            publish(WORK / "evaluations", make_record(step=1, metrics=(metric,), **fields), before)
            [decided] = decided_early(gate, [replace(cell, uri=f"{cell.uri}-{number}")])
            sent, parsed = requests(f"early-{number}", decided.early)
            if [score.verdict for score in parsed.early] != ["not worse"]:
                give_up(f"a verdict that the whole contradicts: {parsed.early}")
            asked.append(sent)
            say(f"{sent} requests of {whole}: {parsed.early[0].asked:,} of {QUESTIONS:,} questions")
    facts = {"questions": QUESTIONS, "margin": MARGIN, "flipped": FLIPPED, "rounds": asked}
    versions = {"lm_eval": installed_version(LM_EVAL.name, "lm_eval")}
    return Comparison(
        "early.unchanged", "requests", float(np.median(asked)), whole, better="less", facts={**facts, **versions}
    )


def _flipped(samples: list[Sample], random: np.random.Generator) -> list[Sample]:
    # equally many right and wrong samples of the baseline are flipped
    scores = np.array([sample.scores["exact_match"] for sample in samples])
    each = round(FLIPPED * len(samples) / 2)
    flips = {int(place) for value in (0, 1) for place in random.permutation(np.flatnonzero(scores == value))[:each]}
    return [
        sample.model_copy(update={"scores": {"exact_match": float(scores[place] != (place in flips))}})
        for place, sample in enumerate(samples)
    ]


def demo(folder: str) -> Comparison:
    """Returns questions until all pairs of a run's checkpoints are decided, against those of the whole records."""
    scores = QuestionScores()
    by_metric: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for entry in (item for item in find_records(folder) if item.record.succeeded):
        for metric in entry.record.metrics:
            composition = scores.of(entry, metric)
            if isinstance(composition, str) or len(composition.asked) != 1:
                continue
            [asked] = composition.asked.values()
            values = {name: question.sum for name, question in asked.items()}
            if all(0 <= value <= 1 for value in values.values()):  # early decisions take no other scores
                by_metric.setdefault((metric.benchmark, metric.name), {})[entry.record.checkpoint.step] = values
    random, rows, asked_all, all_questions = np.random.default_rng(0), [], 0, 0
    for (benchmark, name), checkpoints in sorted(by_metric.items()):
        for margin in MARGINS:
            words: Counter[str] = Counter()
            shares: list[float] = []
            questions: list[str] = []
            for before, after in permutations(checkpoints.values(), 2):
                questions = sorted(before.keys() & after.keys())
                order = random.permutation(len(questions))
                p, y = (np.array([side[question] for question in questions])[order] for side in (before, after))
                threshold = float(p.mean()) - margin
                decision = EarlyDecision(
                    draws=range(len(p)),
                    shares=[1 / len(p)] * len(p),
                    predictions=p.tolist(),
                    threshold=threshold,
                    alpha=ALPHA,
                )
                decision.add(y.tolist())
                words["contradicted" if (decision.word == "worse") != (y.mean() < threshold - 1e-9) else "agreed"] += 1
                shares.append(decision.asked / len(p))
                asked_all += decision.asked
                all_questions += len(p)
            facts = (
                words.total(),
                words["contradicted"],
                f"{np.median(shares):.0%}",
                f"{np.quantile(shares, 0.9):.0%}",
            )
            rows.append((f"{benchmark} · {name}, margin {margin:g}", len(questions), *facts))
    columns = ("score", "questions", "pairs", "contradicted", "asked, median", "asked, 90 %")
    print_table("each checkpoint against each other checkpoint", columns, rows)
    return Comparison("early.demo", "questions", asked_all, all_questions, better="less", facts={"rows": rows})


def simulate(decisions: int) -> dict[str, Any]:
    outcomes = [simulated(setting, decisions=decisions, seed=0) for setting in hardest()]
    table = {name: simulated(setting, decisions=decisions, seed=0) for name, setting in TABLE.items()}
    rows = [
        (
            name,
            f"{np.median(o.shares):.1%}",
            f"{np.quantile(o.shares, 0.9):.1%}",
            f"{o.contradicted} of {len(o.shares)}",
        )
        for name, o in table.items()
    ]
    print_table("14,042 questions, a tenth flipped", ("truth", "asked, median", "90 %", "contradicted"), rows)
    unlikely = [outcome.setting for outcome in (*outcomes, *table.values()) if outcome.unlikely]
    if unlikely:
        give_up(f"contradicted more often than by alpha: {unlikely}")
    worst = max(outcomes, key=lambda outcome: outcome.contradicted)
    return {
        "kinds": len(outcomes),
        "decisions": decisions * len(outcomes),
        "contradicted": sum(outcome.contradicted for outcome in outcomes),
        "worst": [*worst.setting, worst.contradicted / decisions],
        "table": rows,
    }


def main() -> None:
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--decisions", type=int, default=100)
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="of early.unchanged")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="baselines of early.unchanged")
    parser.add_argument("--demo", help="folder with the records of a run")
    options = parser.parse_args()
    simulations = simulate(options.decisions)
    comparisons = [unchanged(options.questions, options.rounds), *([demo(options.demo)] if options.demo else [])]
    print(json.dumps({"name": "early.simulations", **simulations}))
    for comparison in comparisons:
        print_comparison(comparison)


if __name__ == "__main__":
    main()
