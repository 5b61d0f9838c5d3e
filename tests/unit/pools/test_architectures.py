"""The architectures that engines can write text with, and the language model's part of a config."""

from __future__ import annotations

from typing import Any

import pytest

from pools.architectures import is_multimodal, language_config, listed, why_not_served
from pools.engine.engines import ENGINES
from resources.environments.environments import ENVIRONMENTS


@pytest.mark.parametrize(
    ("architectures", "own_code", "servable"),
    [
        (["LlamaForCausalLM"], {}, True),
        (["GPT2LMHeadModel"], {}, True),
        (["Gemma3ForConditionalGeneration"], {}, True),
        (["Qwen3_5ForConditionalGeneration"], {}, True),
        (["Mistral3ForConditionalGeneration"], {}, True),
        (["Llama4ForConditionalGeneration"], {}, True),
        (["InternVLChatModel"], {}, True),
        (["HeliumForCausalLM"], {}, True),  # by transformers' own code
        (["NewForCausalLM"], {}, False),
        (["NewForCausalLM"], {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"}, True),
        (["BertForMaskedLM"], {}, False),
        (["Qwen2ForRewardModel"], {}, False),
        (["EagleLlamaForCausalLM"], {}, False),
        (["Gemma4AssistantForCausalLM"], {}, False),
        (["WhisperForConditionalGeneration"], {}, False),
        (["T5ForConditionalGeneration"], {}, False),
        (None, {}, False),
    ],
)
def test_architecture_is_servable_if_the_engine_lists_it(
    architectures: Any, own_code: dict[str, str], servable: bool
) -> None:
    why = why_not_served({"architectures": architectures, "auto_map": own_code})
    assert (why is None) is servable
    if why is not None:
        assert (architectures or ["no architecture"])[0] in why and "vLLM 0.32.0" in why


def test_lists_are_those_of_the_pinned_engines() -> None:
    pins = {ENVIRONMENTS[engine.environment].requirements.with_suffix(".in").read_text() for engine in ENGINES.values()}
    assert {line.partition("==")[2] for pin in pins for line in pin.splitlines() if "vllm" in line} == set(listed())


@pytest.mark.parametrize("kind", ["text_config", "llm_config", "language_config", "thinker_config"])
def test_language_model_is_found_below_other_names(kind: str) -> None:
    assert language_config({"hidden_size": 1, kind: {"hidden_size": 2}})["hidden_size"] == 2
    assert language_config({"thinker_config": {kind: {"hidden_size": 3}}})["hidden_size"] == 3
    assert language_config({"hidden_size": 1, kind: None})["hidden_size"] == 1


def test_wrapped_model_is_multimodal_and_its_language_model_is_not() -> None:
    assert is_multimodal({"architectures": ["Gemma3ForConditionalGeneration"]})
    assert not is_multimodal({"architectures": ["Gemma3ForCausalLM"]})
