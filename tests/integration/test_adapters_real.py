"""Adapters as PEFT itself writes them: merged while staged as PEFT merges them, and as it runs them while training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fakes.tokenizers import write_byte_tokenizer
from fakes.trainers import run_trainer
from fakes.vllm import KEY, vllm_engine
from pools.weights.formats import Tensor
from pools.weights.layouts import inspect_checkpoint
from pools.weights.model_files import digest_model_folder, inspect_staged_folder, read_tensors
from pools.weights.staging import Staging
from resources.storage import storage

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parents[1] / "fakes" / "peft_adapters.py"
ATTENTION = ["q_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "k_proj", "gate_proj", "up_proj", "down_proj"]
NEW = {"embed_tokens": [260, 3], "lm_head": [1]}
CASES: dict[str, dict[str, Any]] = {
    "lora": {"lora": {"r": 4, "target_modules": LINEAR}},
    "lora-bf16": {"lora": {"r": 4, "target_modules": LINEAR}, "dtype": "bfloat16", "shard": "50KB"},
    "lora-f16": {"lora": {"r": 3, "target_modules": LINEAR}, "dtype": "float16"},
    "pickled": {"lora": {"r": 4, "target_modules": LINEAR}, "pickled": True},
    "pickled-base": {"lora": {"r": 4, "target_modules": LINEAR}, "pickled_base": True, "tied": True},
    "rslora": {"lora": {"r": 8, "use_rslora": True, "lora_alpha": 5, "target_modules": ATTENTION}},
    "patterns": {
        "lora": {
            "r": 4,
            "target_modules": LINEAR,
            "rank_pattern": {"layers.0.self_attn.q_proj": 6, "down_proj": 2},
            "alpha_pattern": {"^model.layers.1.mlp.up_proj": 3, "self_attn.q_proj": 20},
        }
    },
    "some-layers": {"lora": {"r": 4, "target_modules": ATTENTION, "layers_to_transform": [1]}},
    "dora": {"lora": {"r": 4, "use_dora": True, "target_modules": LINEAR}},
    "dora-bf16": {"lora": {"r": 4, "use_dora": True, "target_modules": LINEAR}, "dtype": "bfloat16"},
    "modules-to-save": {"lora": {"r": 4, "target_modules": ATTENTION, "modules_to_save": ["lm_head", "norm"]}},
    "saved-of-tied": {
        "lora": {"r": 4, "target_modules": ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]},
        "tied": True,
    },
    "vocabulary": {"lora": {"r": 4, "target_modules": ATTENTION}, "vocabulary": 264, "has_tokenizer": True},
    "vocabulary-of-tied": {"lora": {"r": 4, "target_modules": ATTENTION}, "vocabulary": 264, "tied": True},
    "tokens": {"lora": {"r": 4, "target_modules": ATTENTION, "trainable_token_indices": [3, 200, 257]}, "tied": True},
    "new-tokens": {
        "lora": {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": NEW},
        "vocabulary": 264,
    },
    "embeddings": {"lora": {"r": 4, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}},
    "embeddings-dora": {"lora": {"r": 4, "use_dora": True, "target_modules": ["q_proj", "embed_tokens"]}},
    "embeddings-of-tied": {"lora": {"r": 4, "target_modules": ["q_proj", "embed_tokens"]}, "tied": True},
    "gpt2-head": {"lora": {"r": 4, "target_modules": ["c_attn", "lm_head"]}, "model": "gpt2"},
    "gpt2": {"lora": {"r": 4, "target_modules": ["c_attn", "c_proj"], "bias": "lora_only"}, "model": "gpt2"},
    "gpt2-dora": {"lora": {"r": 4, "use_dora": True, "target_modules": ["c_attn", "c_proj"]}, "model": "gpt2"},
}  # fmt: skip
SAVED_TWICE = ("vocabulary-of-tied",)  # PEFT saves both of two equal layers
TIED_APART = ("embeddings-of-tied", "gpt2-head")  # PEFT's merge changes both tied layers, the adapter only the first
MERGED = Path("merged", "checkpoint-10")
ROUNDING = {"F32": 2.0**-20, "BF16": 2.0**-7, "F16": 2.0**-10}
"""Relative, per number: a bit of the type, and sums of float32 in another order."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each case: base, run with the adapter, and PEFT's merge."""
    scratch = tmp_path_factory.mktemp("adapters")
    tokenizer = write_byte_tokenizer(scratch / "tokenizer")
    cases = [{**case, "folder": str(scratch / name), "tokenizer": str(tokenizer)} for name, case in CASES.items()]
    (scratch / "cases.json").write_text(json.dumps(cases))
    run_trainer(PROGRAM, "write", scratch / "cases.json")
    return scratch


def numbers(tensor: Tensor) -> np.ndarray:
    raw = np.frombuffer(storage.read_bytes(tensor.uri, start=tensor.span[0], end=tensor.span[1]), np.uint8)
    if tensor.dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    return raw.view({"F32": np.float32, "F16": np.float16}[tensor.dtype]).astype(np.float32).reshape(tensor.shape)


@pytest.fixture(scope="module")
def made(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The folder of each case as an engine would read it."""
    with ExitStack() as held:
        staging = held.enter_context(Staging(tmp_path_factory.mktemp("staged"), max_bytes=10**9))
        folders = {}
        for name in CASES:
            folder = inspect_checkpoint(str(written / name / "run" / "checkpoint-10"))
            assert (folder.problems, folder.made_by) == ((), "adapter 1"), name
            folders[name] = held.enter_context(staging.stage(folder.uri, digest_model_folder(folder))).path
        yield folders


@pytest.mark.parametrize("name", [name for name in CASES if name not in TIED_APART])
def test_merged_adapter_is_that_of_peft_within_a_rounding(name: str, written: Path, made: dict[str, Path]):
    ours = read_tensors(inspect_staged_folder(made[name]))
    theirs = read_tensors(inspect_checkpoint(str(written / name / MERGED)))
    if name in SAVED_TWICE:
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]
    assert set(ours) == set(theirs)
    for tensor in theirs:
        assert ours[tensor] == theirs[tensor], tensor
        got, expected = numbers(ours[tensor]), numbers(theirs[tensor])
        least = 2.0**-2 if ours[tensor].dtype == "F32" else 2.0**-6
        bound = ROUNDING[ours[tensor].dtype] * np.maximum(np.abs(expected), least)
        assert (np.abs(got - expected) <= bound).all(), (tensor, np.abs(got - expected).max())


def test_merged_adapters_answer_as_peft_runs_them_on_their_base(written: Path, made: dict[str, Path], tmp_path: Path):
    pairs = [(str(made[name]), str(written / name / MERGED)) for name in CASES]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    distances = json.loads(run_trainer(PROGRAM, "compare", tmp_path / "pairs.json").stdout)
    bounds = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}
    for (name, case), distance in zip(CASES.items(), distances, strict=True):
        assert distance < bounds[case.get("dtype", "float32")], name


@pytest.mark.parametrize("name", ["lora-bf16", "saved-of-tied"])
def test_engine_answers_as_with_the_folder_that_peft_merged(
    name: str, written: Path, made: dict[str, Path], tmp_path: Path
):
    answers = []
    for folder in (made[name], written / name / MERGED):
        with vllm_engine(tmp_path / f"jobs-{len(answers)}", folder) as url:
            asked = {"model": "m", "prompt": "The bee makes honey.", "max_tokens": 24, "temperature": 0}
            asked |= {"logprobs": 1, "echo": True, "ignore_eos": True}
            headers = {"Authorization": f"Bearer {KEY}"}
            answers.append(httpx.post(f"{url}/completions", json=asked, headers=headers, timeout=60).json())
    ours, theirs = (answer["choices"][0] for answer in answers)
    assert ours["text"] == theirs["text"]
    near = 1e-4 if name == "saved-of-tied" else 0.05
    weights = [choice["logprobs"]["token_logprobs"][1:] for choice in (ours, theirs)]
    assert weights[0] == pytest.approx(weights[1], abs=near)
