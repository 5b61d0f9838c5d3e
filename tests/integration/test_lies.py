"""False answers of an endpoint to each harness itself: its evaluation is completed as if undisturbed, or withheld."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.engine import FakeEngine
from fakes.lm_eval import Harness
from fakes.tokenizers import write_byte_tokenizer
from faults.truth.liar import Engine
from faults.truth.lies import ANY, CUT_AS_LENGTH, LIES
from faults.truth.trial import WAYS, Outcome, Truth, Way, evaluated

pytestmark = [pytest.mark.harness, pytest.mark.timeout(120)]

LM_EVAL = "lm_evaluation_harness"
TOLD: list[tuple[str, Way, str]] = [
    *((LM_EVAL, "direct", lie) for lie in LIES),
    (LM_EVAL, "through the proxy", ANY),
    *(("helm", way, ANY) for way in WAYS),
    *(("alpaca_eval", way, ANY) for way in WAYS),
    ("inspect_ai", "direct", ANY),
]
"""Harness, way and lie; a harness that gets any lie shares its checks of single answers with lm-eval."""
UNDISTURBED: dict[tuple[str, Way], Truth] = {}


async def outcome_of(
    harness: Harness, folder: Path, way: Way, lie: str | None = None, *, share: float = 0.1, **changes: float
) -> Outcome:
    async with FakeEngine(models=("m",)) as engine:
        served = Engine(engine.url, "m", write_byte_tokenizer(folder / "tokenizer"), max_model_len=2048)
        return await evaluated(harness, served, folder / "told", way=way, lie=lie, share=share, **changes)


async def undisturbed(harness: Harness, folder: Path, way: Way) -> Truth:
    key = (harness.evaluator.name, way)
    if key not in UNDISTURBED:
        outcome = await outcome_of(harness, folder / "undisturbed", way)
        assert outcome.truth is not None, outcome.reason
        UNDISTURBED[key] = outcome.truth
    return UNDISTURBED[key]


@pytest.mark.parametrize(("name", "way", "lie"), TOLD)
async def test_lie_is_never_scored(
    tmp_path: Path, imported: Callable[[str], Harness], name: str, way: Way, lie: str
) -> None:
    harness = imported(name)
    truth = await undisturbed(harness, tmp_path, way)
    outcome = await outcome_of(harness, tmp_path, way, lie, share=0.1 if name == LM_EVAL else 0.2)
    assert outcome.lies > 0
    assert outcome.truth in (truth, None), "other scores"
    assert outcome.status in ("succeeded", "withheld", "infra_failed"), outcome.reason


@pytest.mark.parametrize("way", WAYS)
async def test_endpoint_that_only_lies_is_no_fault_of_the_model(tmp_path: Path, lm_eval: Harness, way: Way):
    outcome = await outcome_of(lm_eval, tmp_path, way, "positive", share=1.0)
    assert outcome.status == "infra_failed", outcome.reason


@pytest.mark.parametrize("way", WAYS)
async def test_texts_cut_as_if_at_the_limit_are_counted_and_withheld_where_that_is_asked_for(
    tmp_path: Path, lm_eval: Harness, way: Way
):
    counted = await outcome_of(lm_eval, tmp_path / "counted", way, CUT_AS_LENGTH)
    assert counted.truth is not None, counted.reason
    assert counted.at_limit > 0
    withheld = await outcome_of(lm_eval, tmp_path / "withheld", way, CUT_AS_LENGTH, max_at_limit=0.0)
    assert withheld.status == "withheld", withheld.reason


async def test_endpoint_that_serves_another_model_from_the_middle_on_is_noticed_at_the_end(
    tmp_path: Path, lm_eval: Harness
):
    async with FakeEngine(models=("m",)) as engine, FakeEngine(models=("m",), label="later") as later:
        tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
        served = Engine(engine.url, "m", tokenizer, max_model_len=2048, later_url=later.url)
        outcome = await evaluated(lm_eval, served, tmp_path / "swapped", way="direct")
    assert outcome.status == "infra_failed"
    assert "weighed" in outcome.reason
