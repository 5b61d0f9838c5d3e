"""The quick half of the zoo: a tied model (vLLM leaves its output layer packed), a mixture of experts, models that see,
a SentencePiece tokenizer.

The mean of 2 checkpoints and an adapter on its base, which no file holds, are reloaded in place like others.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo.visits import PIECES, Animal, visits

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TIED = Animal("llama", tied=True)
EXPERTS = Animal("qwen3_moe", tied=False, sharded=True)
TOURS = {
    TIED: ("first", "frozen", "nearly", "second", "mean", "first", "adapter", "frozen"),
    EXPERTS: ("first", "second", "row", "mean", "first"),
}
OTHERS = (
    *(Animal("gemma3_vision", tied=True), Animal("qwen3_vl", tied=False)),
    Animal("llama", tied=False, pieces=PIECES),
)


def test_swaps_of_a_tied_model_and_of_experts_answer_as_a_cold_start_does(tmp_path: Path) -> None:
    tied, experts = visits(TOURS, tmp_path)
    for visit in (tied, experts):
        assert (visit.refusal, visit.wrong) == (None, [])
    assert [stop.how for stop in tied.stops[1:]] == [*["restart"] * 3, *["reload"] * 4]
    assert [stop.how for stop in experts.stops[1:]] == ["restart", "reload", "reload", "reload"]
    reasons = [stop.reason or "" for stop in tied.stops[1:4]]
    for reason, expected in zip(reasons, ("is the same in both", "proves nothing", "they agree ("), strict=True):
        assert expected in reason


def test_models_that_see_or_have_sentencepiece_are_served_and_swapped_for_text_alone(tmp_path: Path) -> None:
    for visit in visits(dict.fromkeys(OTHERS, ("first", "second", "mean", "first")), tmp_path):
        assert (visit.refusal, visit.wrong) == (None, [])
        assert [stop.how for stop in visit.stops[1:]] == ["restart", "reload", "reload"]
