"""An evaluation by a real harness with a lying server, compared with the undisturbed evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fakes.lm_eval import Harness, make_config
from fakes.proxy import CLIENT_KEY, FakeReplica, PoolState, running_proxy
from faults.truth.liar import Engine, Liar
from faults.truth.lies import ANY, CUT_AS_LENGTH
from pools.endpoint import RunningModel, Scoring
from pools.engine.launch import Servable
from pools.protocol import Announcement
from pools.weights.model_files import ModelDigests
from resources.errors import AssayError
from tasks.evaluators.harness import Parsed, verify_counts, verify_ends
from tasks.records.samples import SAMPLES_NAME, read_samples
from tasks.running.serving import EndpointServing, ServedCell

Way = Literal["direct", "through the proxy"]
WAYS: tuple[Way, ...] = ("direct", "through the proxy")
_AT_ONCE = 8
_FROM_CACHE = Scoring(
    scores_from_cache=True, kv_cache_tokens=32_768, engine="fake", architecture="fake", dtype="float32"
)
_JUDGED_BY_ITSELF = {
    "judge": {"annotator": "demo_verdict", "constrained": True},
    "generation_params": {"temperature": 0, "max_new_tokens": 24},
}
ASKED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "lm_evaluation_harness": (("demo_facts", "demo_backwards"), {}),
    "helm": (("simple_mcqa", "demo_mcqa"), {"evaluator": "helm"}),
    "alpaca_eval": (("demo_instructions",), {"evaluator": {"name": "alpaca_eval", **_JUDGED_BY_ITSELF}}),
    "inspect_ai": (("demo_choices",), {"evaluator": {"name": "inspect_ai", "max_tokens": 24}}),
}
"""Benchmarks and settings by evaluator: scored choices, generated texts, verdicts of a judge."""


@dataclass(frozen=True)
class Truth:
    """The published results of an evaluation: its metrics, and each sample's answer and scores."""

    metrics: Mapping[tuple[str, str], float]
    samples: frozenset[tuple[str, str, str, tuple[tuple[str, float], ...]]]


@dataclass(frozen=True)
class Outcome:
    """Outcome of an evaluation: its truth, or the reason without a truth, and the number of lies."""

    lies: int
    truth: Truth | None = None
    at_limit: int = 0
    status: str = "succeeded"
    reason: str = ""

    def words(self, undisturbed: Truth, lie: str) -> str:
        """Summarizes the outcome: only `OTHER SCORES` is an error of Assay."""
        if self.truth is None:
            return f"{self.status}: {self.reason}"
        if self.truth == undisturbed:
            return "completed, all the same"
        counted = lie == CUT_AS_LENGTH and self.at_limit
        return f"scored, {self.at_limit} counted at the limit" if counted else "OTHER SCORES"


async def evaluated(
    harness: Harness,
    engine: Engine,
    folder: Path,
    *,
    way: Way,
    lie: str | None = None,
    share: float = 0.0,
    **changes: Any,
) -> Outcome:
    """Evaluates benchmarks of the harness, on an external endpoint or on a pool."""
    folder.mkdir(parents=True)
    benchmarks, settings = ASKED[harness.evaluator.name]
    given = {"max_eval_instances": 60, **settings, **changes}
    async with (
        Liar(engine, lie, share=share) as liar,
        _asked_by(way, liar, engine, folder, from_cache=lie == ANY) as (model, served),
    ):
        if served is not None:
            given["base_url"] = model.base_url
        config = make_config(*benchmarks, **given)
        try:
            parsed = await harness.evaluate(model, config, folder / "output")
            if served is not None:
                await asyncio.to_thread(served.prove_unchanged)
            verify_counts(parsed)
            verify_ends(parsed, config.max_at_limit)
        except AssayError as error:
            reason = error.found.partition("\n")[0][:100]
            return Outcome(liar.lies, status=error.record_status, reason=reason)
        truth = await asyncio.to_thread(_truth, parsed, folder / "output")
        at_limit = sum(details.finish_reasons.get("length", 0) for details in parsed.details.values())
        return Outcome(liar.lies, truth, at_limit)


@asynccontextmanager
async def _asked_by(
    way: Way, liar: Liar, engine: Engine, folder: Path, *, from_cache: bool
) -> AsyncIterator[tuple[RunningModel, ServedCell | None]]:
    # `from_cache` scores choices through the engine's cache: other lies are about echoes
    if way == "direct":
        known = Servable(engine.model, str(engine.tokenizer), ModelDigests("s", "c", "i"), engine.tokenizer)
        serving = EndpointServing(f"{liar.url}/v1", {engine.model: known})
        cell = {"cell": "cell", "attempt": "attempt", "mirror": ""}
        served = await asyncio.to_thread(serving.open, engine.model, in_chat=False, **cell)
        yield served.running, served
        return
    with running_proxy(folder) as proxy:
        replica = Announcement(instance="first", url=liar.url, digest="d", capacity=_AT_ONCE, state="ready")
        proxy.tell(PoolState(models={engine.model: "d"}, replicas=(FakeReplica("liar", replica),)))
        model = RunningModel(
            base_url=f"{proxy.url}/v1",
            model=engine.model,
            tokenizer=str(engine.tokenizer),
            capacity=_AT_ONCE,
            prompt_logprobs=True,
            request_timeout_seconds=60.0,
            max_model_len=engine.max_model_len,
            api_key=CLIENT_KEY,
            scoring=_FROM_CACHE if from_cache else Scoring(),
        )
        yield model, None


def _truth(parsed: Parsed, output: Path) -> Truth:
    return Truth(
        {(metric.benchmark, metric.name): metric.value for metric in parsed.metrics},
        frozenset(
            (sample.benchmark, sample.id, sample.output, tuple(sorted(sample.scores.items())))
            for sample in read_samples(str(output / SAMPLES_NAME))
        ),
    )
