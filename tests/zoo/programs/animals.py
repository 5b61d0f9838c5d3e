"""Makes tiny random checkpoints of many architectures, and scores them with 2 other programs. Run by vLLM's
environment.

    python animals.py ORDER.json

An order is {"prompts", "engine", "answers", "checkpoints"}. A checkpoint is {"folder", "architecture", "tied", "dtype",
"seed", "like", "change", "mean_of", "sharded", "pieces"}: `change` names its difference from the checkpoint of another
seed, `like`; with `mean_of` it is the average of the checkpoints of these seeds; `pieces` is the size of its
SentencePiece tokenizer, 0 for bytes. Each is written next to its tokenizer, and scored twice: with transformers in
float32, and with vLLM unchanged, started for it with the arguments `engine`. Writes log-probabilities, or an error, to
the file `answers`, by folder and program.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 260
"""Vocabulary of `write_byte_tokenizer`, with 2 unused tokens."""
_ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 64, "num_hidden_layers": 2}
_DENSE = {**_ATTENTION, "intermediate_size": 128, "max_position_embeddings": 512}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_STATE = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
_HEADS = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64}
_EYES = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 14}
_DEPTH = {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
_THREE_POSITIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_DENSE, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", _DENSE),
    "qwen3": ("Qwen3Config", {**_DENSE, "head_dim": 32}),
    "gemma2": ("Gemma2Config", {**_DENSE, **_HEADS}),
    "gemma3": ("Gemma3TextConfig", {**_DENSE, **_HEADS}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}),
    "gpt_neox": ("GPTNeoXConfig", {key: value for key, value in _DENSE.items() if key != "num_key_value_heads"}),
    "olmo2": ("Olmo2Config", _DENSE),
    "phi3": ("Phi3Config", {**_DENSE, "pad_token_id": 258}),
    "granite": ("GraniteConfig", {**_DENSE, "logits_scaling": 2.0, "embedding_multiplier": 3.0}),
    "mixtral": ("MixtralConfig", {**_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_DENSE, **_MIXTURE, "head_dim": 32}),
    "olmoe": ("OlmoeConfig", {**_DENSE, **_MIXTURE, "intermediate_size": 64}),
    "mamba2": (
        "Mamba2Config",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1},
    ),
    "falcon_h1": ("FalconH1Config", {**_DENSE, "head_dim": 32, **_STATE}),
    "gemma3_vision": (
        "Gemma3Config",
        {
            "text_config": {**_DENSE, **_HEADS},
            "vision_config": {**_EYES, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
            **{"mm_tokens_per_image": 4, "boi_token_index": 258, "eoi_token_index": 258, "image_token_index": 259},
        },
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {
            "text_config": {**_DENSE, "head_dim": 32, "rope_parameters": _THREE_POSITIONS},
            "vision_config": {**_EYES, **_DEPTH, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **{"image_token_id": 259, "video_token_id": 258, "vision_start_token_id": 258, "vision_end_token_id": 258},
        },
    ),
}
"""Configuration classes of transformers, with tiny sizes; heads have the 32 values that vLLM requires."""
ADAPTED, RANK = ["q_proj", "up_proj"], 4
LARGEST_SHARD = "100KB"
MODULES = (
    *("vllm", "vllm.v1.engine.llm_engine", "vllm.v1.executor.uniproc_executor", "vllm.v1.worker.cpu_worker"),
    *("vllm.v1.worker.gpu_model_runner", "vllm.v1.sample.sampler"),
)
"""Modules imported once, for all forks."""


def make(checkpoint: dict[str, Any]) -> None:
    """Writes a checkpoint, without a tokenizer."""
    import torch
    import transformers

    class_name, small = ARCHITECTURES[checkpoint["architecture"]]
    tied = {"tie_word_embeddings": checkpoint["tied"]}
    words = {"vocab_size": checkpoint.get("pieces") or VOCABULARY, "bos_token_id": 256, "eos_token_id": 257, **tied}
    whole = {**small, **tied, "text_config": {**small["text_config"], **words}} if "text_config" in small else small
    config = getattr(transformers, class_name)(**({**words, **small} if whole is small else whole))
    like = checkpoint.get("like")
    model = new_model(config, checkpoint["seed"] if like is None else like)
    if checkpoint.get("change") == "adapter":
        torch.manual_seed(checkpoint["seed"])
        folder = Path(checkpoint["folder"])
        write_adapter(model, folder / "adapter", folder.with_name("first"))
    elif like is not None:
        change(model, checkpoint["change"], checkpoint["seed"])
    shards = {"max_shard_size": LARGEST_SHARD} if checkpoint.get("sharded") else {}
    dtype = getattr(torch, checkpoint["dtype"])
    model.to(dtype)
    if seeds := checkpoint.get("mean_of"):
        models = [new_model(config, seed).to(dtype) for seed in seeds]
        with torch.no_grad():
            for mean, *parts in zip(*(each.parameters() for each in (model, *models)), strict=True):
                mean.copy_(torch.stack([part.float() for part in parts]).mean(0))
    model.save_pretrained(checkpoint["folder"], **shards)


def write_adapter(model: Any, folder: Path, base: Path) -> None:
    """Adds products of random matrices to some linear layers, and writes them as PEFT writes an adapter on `base`."""
    import torch
    from safetensors.torch import save_file

    tensors = {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in ADAPTED:
                rows, columns = module.weight.shape
                low, high = 0.2 * torch.randn(RANK, columns), 0.2 * torch.randn(rows, RANK)
                module.weight += 2 * high @ low
                tensors |= {
                    f"base_model.model.{name}.lora_{part}.weight": each for part, each in (("A", low), ("B", high))
                }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ADAPTED}
    (folder / "adapter_config.json").write_text(json.dumps({**described, "base_model_name_or_path": str(base)}))


def new_model(config: Any, seed: int) -> Any:
    import torch
    import transformers

    torch.manual_seed(seed)
    kind = "AutoModelForImageTextToText" if hasattr(config, "vision_config") else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" in name or name.endswith(("dt_bias", ".D")):
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "embed" in name or "wte" in name:
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.15)
    return model


def change(model: Any, kind: str, seed: int) -> None:
    """Changes a model in the way that `kind` names."""
    import torch

    torch.manual_seed(seed)
    parameters = dict(model.named_parameters())
    head = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        if kind == "nearly nothing":
            for parameter in parameters.values():
                parameter.mul_(1 + 1e-3 * torch.randn_like(parameter))
        elif kind == "all but the embedding":
            for parameter in parameters.values():
                if parameter is not embedding:
                    parameter.add_(0.5 * parameter.std() * torch.randn_like(parameter))
        elif kind == "one row":
            head[ord("e")] += torch.randn_like(head[0])
        elif kind == "one tensor":
            names = [name for name, parameter in parameters.items() if ".1." in name and parameter.ndim > 1]
            parameters[names[-1]].add_(torch.randn_like(parameters[names[-1]]))
        elif kind == "dtype":
            pass
        else:
            raise ValueError(f"expected a change, found {kind!r}")


def ids_of(folder: str, prompt: str) -> list[int]:
    """Returns a prompt's ids: by SentencePiece itself where the folder has its model, else its bytes."""
    model = Path(folder) / "tokenizer.model"
    if not model.exists():
        return list(prompt.encode())
    sentencepiece: Any = importlib.import_module("sentencepiece")
    return sentencepiece.SentencePieceProcessor(model_file=str(model)).encode(prompt)


def ask_transformers(folder: str, prompts: list[str]) -> list[list[float]]:
    """Returns log-probabilities of each prompt's tokens after the first, in float32."""
    import torch
    import transformers

    [class_name] = json.loads((Path(folder) / "config.json").read_bytes())["architectures"]
    model = getattr(transformers, class_name).from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",  # the others leave out Gemma 2's soft cap
    )
    answers = []
    for prompt in prompts:
        ids = torch.tensor([ids_of(folder, prompt)])
        with torch.inference_mode():
            values = model(ids).logits[0, :-1].float().log_softmax(-1)
        answers.append(values.gather(-1, ids[0, 1:, None]).flatten().tolist())
    return answers


def ask_vllm(folder: str, prompts: list[str], engine: dict[str, Any]) -> dict[str, list[list[float]]]:
    """Returns vLLM's log-probabilities, from prompts in sequence and all at once, which rounds differently."""
    import vllm
    from vllm.v1.sample import sampler

    # Ranks are unused, and compiling their count takes 2 s each time, 15 s and a compiler the first time.
    sampler.batched_count_greater_than = sampler.batched_count_greater_than.__wrapped__
    model = vllm.LLM(folder, language_model_only=True, **engine)
    asked = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def ask(prompts: list[str]) -> list[list[float]]:
        outputs = model.generate([{"prompt_token_ids": ids_of(folder, prompt)} for prompt in prompts], asked)
        return [
            [
                logprobs[token].logprob
                for logprobs, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
            ]
            for output in outputs
        ]

    return {"one by one": [values for prompt in prompts for values in ask([prompt])], "at once": ask(prompts)}


def attempt(act: Any, *arguments: Any) -> dict[str, Any]:
    try:
        return {"told": act(*arguments)}
    except Exception as error:  # noqa: BLE001 any error goes to the test
        return {"error": f"{type(error).__name__}: {error}"}


def in_a_fork(act: Any, *arguments: Any) -> dict[str, Any]:
    """Calls a function in a process of its own; returns its result or error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        result = attempt(act, *arguments)
        with os.fdopen(writing, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    return json.loads(content) if content else {"error": "it ended without a word"}


def make_and_ask(checkpoints: list[dict[str, Any]], prompts: list[str]) -> list[dict[str, Any]]:
    """Makes checkpoints; returns the results of transformers for each."""

    def answers_of(checkpoint: dict[str, Any]) -> list[list[float]]:
        make(checkpoint)
        return ask_transformers(checkpoint["folder"], prompts)

    return [attempt(answers_of, checkpoint) for checkpoint in checkpoints]


def main(arguments: list[str]) -> None:
    sys.path.append(json.loads(Path(arguments[0]).read_text())["placeholders"])
    for name in MODULES:
        importlib.import_module(name)
    order = json.loads(Path(arguments[0]).read_text())
    prompts, checkpoints = order["prompts"], order["checkpoints"]
    answers = {}
    for checkpoint, other in zip(checkpoints, in_a_fork(make_and_ask, checkpoints, prompts)["told"], strict=True):
        folder = checkpoint["folder"]
        cold = in_a_fork(ask_vllm, folder, prompts, order["engine"]) if "told" in other else other
        answers[folder] = {"transformers": other, "vllm": cold}
    Path(order["answers"]).write_text(json.dumps(answers))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(sys.argv[1:])
