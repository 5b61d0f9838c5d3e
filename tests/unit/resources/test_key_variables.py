"""Variables with keys, and the lists that pass them on."""

from __future__ import annotations

import pytest

from pools.config import ModelConfig
from resources.jobs import inheritance
from resources.settings import is_named

LISTS = {
    "isolated": inheritance.ISOLATED,
    "engine": inheritance.ENGINE,
    "harness": inheritance.HARNESS,
    "service": inheritance.SERVICE,
    "mine": ("MY_*", "MY_TOKEN"),
}


@pytest.mark.parametrize(
    ("name", "value", "kinds"),
    [
        ("HUGGINGFACE_TOKEN", "hf_x", ""),
        ("HUGGINGFACE_API_KEY", "hf_x", ""),
        ("TRANSFORMERS_SECRET", "x", ""),
        ("HF_PASSWORD", "x", ""),
        ("CUDA_API_KEY", "x", ""),
        ("TORCH_PRIVATE_KEY", "x", ""),
        ("VLLM_DEBUG_KEY", "x", ""),
        ("MY_PASSWORD", "x", ""),
        ("MY_TOKEN", "x", "mine"),
        ("MY_MIRROR", "https://user:pass@mirror", ""),
        ("MY_MIRROR", "https://mirror/a@b", "mine"),
        ("HF_TOKEN", "hf_x", "harness service"),
        ("HF_ENDPOINT", "https://user:pass@mirror", "harness service"),
        ("HF_ENDPOINT", "https://mirror", "isolated engine harness service"),
        ("HUGGINGFACE_HUB_VERBOSITY", "debug", "engine harness service"),
        ("TOKENIZERS_PARALLELISM", "false", "isolated engine harness service"),
        ("https_proxy", "http://user:pass@proxy", "engine harness service"),
        ("AWS_SECRET_ACCESS_KEY", "x", "service"),
        ("MLFLOW_TRACKING_TOKEN", "x", "service"),
    ],
)
def test_variable_that_holds_a_key_is_passed_on_where_it_is_named(name: str, value: str, kinds: str):
    assert {kind for kind, patterns in LISTS.items() if is_named(name, value, patterns)} == set(kinds.split())


@pytest.mark.parametrize("name", ["hf_token", "hf-token"])
def test_token_of_the_hub_in_engine_arguments_is_refused(name: str):
    with pytest.raises(ValueError, match="set the variable HF_TOKEN"):
        ModelConfig(name="run", engine_kwargs={name: "hf_x"})
