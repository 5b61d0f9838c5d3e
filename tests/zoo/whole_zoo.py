"""All of the zoo: `make zoo`. pytest does not collect this file by itself: it takes about an hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo.visits import PIECES, TOUR, Animal, visits

pytestmark = [pytest.mark.engine, pytest.mark.timeout(7200)]

ARCHITECTURES = (
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "olmo2", "phi3", "granite", "mixtral"),
    *("qwen3_moe", "olmoe", "mamba2", "gemma3_vision", "qwen3_vl"),
)
REFUSED = {
    ("gemma2", False): "There is no module or parameter named 'lm_head' in Gemma2ForCausalLM",
    (
        "olmoe",
        True,
    ): "vLLM itself differs from transformers",  # its output layer stays as memory was: no such model is tied
}
"""Reasons why vLLM 0.32.0 on a CPU cannot serve an animal, by architecture and if it is tied."""


def animals_of(architecture: str) -> list[list[Animal]]:
    """Returns tied and untied animals, unsharded and sharded, in each dtype; float32 needs an engine of its own."""
    tied = [Animal(architecture, True, dtype) for dtype in ("float32", "bfloat16")]
    return [tied[:1], [tied[1], Animal(architecture, False, "float16", sharded=True)]]


GROUPS = [group for architecture in ARCHITECTURES for group in animals_of(architecture)]
GROUPS.append([Animal("llama", tied=False, pieces=PIECES)])


@pytest.mark.parametrize("animals", GROUPS, ids=lambda animals: "+".join(map(str, animals)))
def test_every_swap_answers_as_a_cold_start_and_as_transformers(animals: list[Animal], tmp_path: Path) -> None:
    for visit in visits(dict.fromkeys(animals, TOUR), tmp_path):
        refusal = REFUSED.get((visit.animal.architecture, visit.animal.tied))
        if refusal is not None:
            assert refusal in (visit.refusal or "")
            continue
        assert (visit.refusal, visit.wrong) == (None, [])
        assert "reload" in {stop.how for stop in visit.stops}
