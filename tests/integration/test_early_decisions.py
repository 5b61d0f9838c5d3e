"""Early decisions by lm-eval itself: only a part of the samples is requested, and finishing requests only the rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from fakes.engine import FakeEngine
from fakes.lm_eval import DEMO, Harness, make_config, make_model
from fakes.proxy import CLIENT_KEY, RunningProxy, running_proxy, state_of
from fakes.tokenizers import write_byte_tokenizer
from pools.protocol import RequestCounters
from tasks.evaluators.early import EarlyQuestion, WantedEarly, WantedScore, batches_in
from tasks.evaluators.evaluator import Parsed
from tasks.evaluators.harness import verify_counts
from tasks.records.samples import SAMPLES_NAME, Sample, question_of, read_samples
from tasks.records.verdicts import ANSWERED_NAME
from tasks.spec.evaluation import EvaluationConfig

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]


def wanted_of(samples: Iterable[Sample], *scores: tuple[str, str], margin: float) -> WantedEarly:
    """Returns a gate's decisions about a checkpoint with a baseline of these samples."""
    ordered = sorted(samples, key=lambda sample: question_of(sample).prompt)
    questions = [EarlyQuestion(s.benchmark, s.id, n, question_of(s).prompt.hex()) for n, s in enumerate(ordered)]
    sought = []
    for benchmark, metric in scores:
        places = [place for place, sample in enumerate(ordered) if sample.benchmark == benchmark]
        sought.append(
            WantedScore(
                benchmark=benchmark,
                metric=metric,
                rule=f"{benchmark} · {metric}",
                baseline="run-1",
                margin=margin,
                higher_is_better=True,
                alpha=0.05,
                scale=1.0,
                bound=1.0,
                questions=tuple(places),
                shares=tuple(1 / len(places) for _ in places),
                predictions=tuple(ordered[place].scores[metric] for place in places),
            )
        )
    return WantedEarly("gate", 0.05, tuple(questions), tuple(sought))


async def evaluated(
    harness: Harness,
    proxy: RunningProxy,
    engine: FakeEngine,
    tokenizer: Path,
    output: Path,
    early: WantedEarly | None = None,
    *,
    cell: str,
    config: EvaluationConfig,
) -> tuple[Parsed, RequestCounters]:
    await asyncio.to_thread(proxy.client.open_cell, cell, output.name, mirror=str(output.parent / f"journal-{cell}"))
    model = make_model(
        engine, tokenizer, base_url=f"{proxy.url}/cells/{cell}/{output.name}/v1", api_key=CLIENT_KEY, capacity=2
    )
    parsed = await harness.evaluate(model, config, output, early=early)
    return parsed, await asyncio.to_thread(proxy.client.close_cell, cell, output.name, drop=False)


def lines_of(output: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (output / ANSWERED_NAME).read_text().splitlines()]


async def test_early_decision_asks_a_part_and_finishing_asks_only_the_rest_and_gives_the_whole(
    tmp_path: Path, lm_eval: Harness
):
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
    config = make_config(*DEMO, max_eval_instances=None)
    scores = (("demo_facts", "acc"), ("demo_backwards", "exact_match"))
    async with FakeEngine(models=("m",)) as engine:
        with running_proxy(tmp_path, journal=tmp_path / "journal.sqlite") as proxy:
            await asyncio.to_thread(proxy.tell, state_of("m", engine))

            async def asked(name: str, early: WantedEarly | None, cell: str) -> tuple[Parsed, RequestCounters]:
                return await evaluated(
                    lm_eval, proxy, engine, tokenizer, tmp_path / name, early, cell=cell, config=config
                )

            whole, counted = await asked("whole", None, "a")
            samples = list(read_samples(str(tmp_path / "whole" / SAMPLES_NAME)))
            # The engine's answers do not depend on the cell, so the journal must not hold answers of another cell.
            await asyncio.to_thread(proxy.client.set_state, replace(state_of("m", engine), models={"m": "e"}).desired)
            others = state_of("m", engine).replicas[0]
            announcement = others.announcement.model_copy(update={"digest": "e"})
            await asyncio.to_thread(proxy.announce, replace(others, announcement=announcement))

            decided, first = await asked("early", wanted_of(samples, *scores, margin=0.1), "b")
            again = WantedEarly(batches=batches_in((tmp_path / "early" / ANSWERED_NAME).read_text()))
            finished, second = await asked("finished", again, "b")
    assert [(score.verdict, score.early) for score in decided.early] == [("not worse", True)] * 2
    assert decided.metrics == () and (decided.counts.requested, decided.counts.answered) == (
        220,
        len(lines_of(tmp_path / "early")),
    )
    assert all(score.low <= score.estimate <= score.high for score in decided.early)
    assert decided.counts.answered < 0.6 * 220
    verify_counts(finished)
    assert finished.early == () and finished.metrics == whole.metrics
    assert list(read_samples(str(tmp_path / "finished" / SAMPLES_NAME))) == samples
    assert second.journal_hits == first.upstream > 0
    assert first.upstream + second.upstream == counted.upstream, "no request is asked twice"
