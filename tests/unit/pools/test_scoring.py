"""Proof that an engine scores texts from its cache, against engines that behave differently."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fakes.engine import KV_CACHE_TOKENS, FakeEngine
from fakes.models import write_checkpoint
from pools.endpoint import Scoring
from pools.engine.checks import row_of, scoring_of
from pools.engine.engine_client import EngineClient
from pools.engine.launch import Servable, ServedCheckpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> ServedCheckpoint:
    servable = Servable.from_uri("run-1", str(write_checkpoint(tmp_path / "step-1")))
    return ServedCheckpoint.from_folder("run-1", Path(servable.uri), servable.digests)


async def proved(engine: FakeEngine, checkpoint: ServedCheckpoint, *, longest: int | None = 4096) -> Scoring:
    return await asyncio.to_thread(scoring_of, EngineClient(engine.url), checkpoint, longest=longest)


async def test_engine_that_weighs_labels_and_rows_as_an_echo_does_scores_from_its_cache(
    checkpoint: ServedCheckpoint,
) -> None:
    async with FakeEngine() as engine:
        scoring = await proved(engine, checkpoint)
        assert scoring.model_copy(update={"architecture": ""}) == Scoring(
            scores_from_cache=True, kv_cache_tokens=KV_CACHE_TOKENS, dtype="float32"
        )
        assert scoring.architecture == (await proved(engine, checkpoint)).architecture != ""


@pytest.mark.parametrize(
    "faults",
    [
        {"no_generate": True},
        {"no_echo": True},
        {"malformation": "rows of other tokens"},
        {"malformation": "positive rows"},
        {"malformation": "last row missing"},
        {"malformation": "no rows"},
        {"no_reload": True},
    ],
)
async def test_engine_that_answers_otherwise_does_not_score_from_its_cache(
    checkpoint: ServedCheckpoint, faults: dict[str, Any]
) -> None:
    # An engine that does not report its dtype fails, too: the bound of rounding is unknown.
    async with FakeEngine() as engine:
        for name, value in faults.items():
            setattr(engine.faults, name, value)
        if "malformation" in faults:
            engine.faults.malformed_every = 4  # echoes and labels are right
        assert not (await proved(engine, checkpoint)).scores_from_cache


@pytest.mark.parametrize(
    ("block_size", "longest", "expected"),
    [(16, 18, True), (16, 17, False), (128, 128, False), (528, 4096, True), (2048, 4096, True)],
)
async def test_engine_scores_from_its_cache_where_a_text_fills_a_block(
    checkpoint: ServedCheckpoint, block_size: int, longest: int, expected: bool
) -> None:
    async with FakeEngine(max_model_len=longest + 1) as engine:
        engine.cache.block_size = block_size
        engine.faults.any_length = True
        assert (await proved(engine, checkpoint, longest=longest + 1)).scores_from_cache is expected


def test_row_counts_from_the_end_of_the_prompt_and_only_with_its_token_and_a_value_that_can_be() -> None:
    rows = [None, {"7": {"logprob": -1.0}}, {"8": {"logprob": 1.0}}, {"9": {"logprob": -2.0}}]
    assert [row_of(rows, token, from_end=end) for token, end in ((9, 1), (8, 2), (7, 3), (6, 4), (5, 5))] == [
        *(-2.0, None, -1.0),
        *(None, None),
    ]
    assert row_of(rows, 8, from_end=1) is None
