"""Every kind of false answer from an endpoint during lm-eval's evaluation: completed as if undisturbed, or withheld."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.engine import FakeEngine
from fakes.lm_eval import Harness
from fakes.tokenizers import write_byte_tokenizer
from faults.truth.liar import Engine
from faults.truth.lies import ANY, CUT_AS_LENGTH, LIES
from faults.truth.trial import WAYS, Outcome, Truth, Way, evaluated

pytestmark = [pytest.mark.harness, pytest.mark.timeout(120)]

SHARE = 0.1
UNDISTURBED: dict[Way, Truth] = {}


async def outcome_of(
    lm_eval: Harness, folder: Path, way: Way, lie: str | None = None, *, share: float = SHARE, **changes: float
) -> Outcome:
    async with FakeEngine(models=("m",)) as engine:
        asked = Engine(engine.url, "m", write_byte_tokenizer(folder / "tokenizer"), max_model_len=2048)
        return await evaluated(lm_eval, asked, folder / "told", way=way, lie=lie, share=share, **changes)


async def undisturbed(lm_eval: Harness, folder: Path, way: Way) -> Truth:
    if way not in UNDISTURBED:
        outcome = await outcome_of(lm_eval, folder / "undisturbed", way)
        assert outcome.truth is not None, outcome.reason
        UNDISTURBED[way] = outcome.truth
    return UNDISTURBED[way]


@pytest.mark.parametrize(("way", "lie"), [*(("direct", lie) for lie in LIES), ("through the proxy", ANY)])
async def test_lie_is_never_scored(tmp_path: Path, lm_eval: Harness, way: Way, lie: str):
    truth = await undisturbed(lm_eval, tmp_path, way)
    outcome = await outcome_of(lm_eval, tmp_path, way, lie)
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
        asked = Engine(engine.url, "m", tokenizer, max_model_len=2048, later_url=later.url)
        outcome = await evaluated(lm_eval, asked, tmp_path / "swapped", way="direct")
    assert outcome.status == "infra_failed"
    assert "weighed" in outcome.reason
