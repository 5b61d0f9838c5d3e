"""Injects every lie into a real evaluation, directly and through the proxy, and compares the published scores.

    make truth [HARNESS=helm]

lm-eval, HELM, AlpacaEval and Inspect evaluate a tiny trained model, served by vLLM on a CPU, through a server that
falsifies 1 % or 10 % of its answers. Every evaluation must be completed with the scores of the undisturbed evaluation,
or withheld. Prints a table in Markdown for each, and ends with 1 if any published other scores. Takes 20 minutes.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from fakes.lm_eval import Harness, kept_imported, make_config
from fakes.pools import InferencePool
from faults.chaos.evaluation import ROOT, prepared
from faults.truth.liar import Engine
from faults.truth.lies import CUT_AS_LENGTH, LIES
from faults.truth.trial import ASKED, WAYS, Outcome, Truth, Way, evaluated
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable
from tasks.evaluators.evaluator import evaluator_named

_SHARES = (0.01, 0.1)
_MOST: dict[str, Any] = {"max_eval_instances": 200}
_MODEL = "truth"
_ENGINE = {"max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": "64M"}


async def _table(harness: Harness, engine: Engine, folder: Path, console: Console) -> bool:
    # returns True if any evaluation published other scores
    undisturbed: dict[Way, Truth] = {}
    for way in WAYS:
        outcome = await evaluated(harness, engine, folder / f"undisturbed-{WAYS.index(way)}", way=way, **_MOST)
        if outcome.truth is None:
            sys.exit(f"the undisturbed evaluation, {way}: {outcome.status}: {outcome.reason}")
        undisturbed[way] = outcome.truth
    if undisturbed[WAYS[0]] != undisturbed[WAYS[1]]:
        sys.exit("directly and through the proxy, undisturbed evaluations differ")
    questions = len(undisturbed[WAYS[0]].samples)
    columns = " | ".join(f"{way}, {share:.0%}" for way in WAYS for share in _SHARES)
    console.print(f"\n| {harness.evaluator.name}, {questions} questions | {columns} |")
    console.print("| --- |" + " --- |" * (len(WAYS) * len(_SHARES)))
    wrong = False
    for number, lie in enumerate((*LIES, CUT_AS_LENGTH)):
        outcomes: list[tuple[Way, Outcome]] = []
        for way in WAYS:
            for share in _SHARES:
                place = folder / f"{number}-{WAYS.index(way)}-{share}"
                outcomes.append((way, await evaluated(harness, engine, place, way=way, lie=lie, share=share, **_MOST)))
        words = [(outcome.lies, outcome.words(undisturbed[way], lie)) for way, outcome in outcomes]
        wrong = wrong or any("OTHER" in verdict for _, verdict in words)
        cells = " | ".join(f"{lies}: {verdict}" for lies, verdict in words)
        console.print(f"| {LIES.get(lie, 'half of each text, with the end `length`')} | {cells} |")
    return wrong


def main() -> None:
    """Runs all harnesses, or the named harness, on this machine."""
    console = Console(width=400, highlight=False, markup=False)
    run = prepared(ROOT / ".chaos" / "model")
    [checkpoint] = sorted((run / "hf").iterdir())
    config = InferencePoolConfig.model_validate({"model": {"name": _MODEL, "engine_kwargs": _ENGINE}})
    wrong = False
    with tempfile.TemporaryDirectory(prefix="assay-truth-") as scratch:
        folder = Path(scratch)
        with InferencePool(config, [Servable.from_uri(_MODEL, str(checkpoint))]) as pool:
            running, _ = pool.load(_MODEL)
            engine = Engine(
                running.base_url.removesuffix("/v1"), _MODEL, checkpoint, running.max_model_len or 0, running.api_key
            )
            for evaluator in map(evaluator_named, sys.argv[1:] or ASKED):
                benchmarks, settings = ASKED[evaluator.name]
                place = folder / evaluator.name
                with kept_imported(place, evaluator, make_config(*benchmarks, **settings)) as harness:
                    wrong = asyncio.run(_table(harness, engine, place, console)) or wrong
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
