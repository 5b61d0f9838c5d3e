"""Checkpoints in Hugging Face layout, made without any machine-learning library."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "vocab_size": 16,
}
PARAMETERS: dict[str, Sequence[int]] = {"model.embed_tokens.weight": (16, 8), "lm_head.weight": (16, 8)}


def write_safetensors(
    path: Path,
    *,
    seed: int = 0,
    parameters: Mapping[str, Sequence[int]] = PARAMETERS,
    reseeded: Mapping[str, int] | None = None,
) -> None:
    """Writes a safetensors file with random float32 parameters; `reseeded` gives some parameters another seed."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, shape in parameters.items():
        generator = random.Random(f"{name} {(reseeded or {}).get(name, seed)}")
        count = 1
        for size in shape:
            count *= size
        content = struct.pack(f"<{count}f", *(generator.uniform(-1, 1) for _ in range(count)))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def write_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    config: Mapping[str, Any] = CONFIG,
    parameters: Mapping[str, Sequence[int]] = PARAMETERS,
    template: str = "{{ messages }}",
    shards: int = 1,
    reseeded: Mapping[str, int] | None = None,
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "BPE"}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", seed=seed, parameters=parameters, reseeded=reseeded)
        return folder
    names = list(parameters)
    weight_map: dict[str, str] = {}
    for index in range(shards):
        shard = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        held = {name: parameters[name] for name in names[index::shards]}
        write_safetensors(folder / shard, seed=seed, parameters=held, reseeded=reseeded)
        weight_map.update(dict.fromkeys(held, shard))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_run(run: Path, steps: Sequence[int], **options: Any) -> Path:
    """Writes a training run with a complete checkpoint at each step, its weights seeded by the step."""
    for step in steps:
        write_checkpoint(run / "hf" / f"step-{step}", seed=step, **options)
    return run


def write_nano_llama(folder: Path, *, seed: int = 0, hidden: int = 16, shards: int = 1, vocabulary: int = 260) -> Path:
    """Writes a Llama of 1 layer with random weights, small enough for any library, for a byte tokenizer.

    It has 2 heads. vLLM on a CPU requires 32 values in each, so `hidden` 64.
    """
    config = {
        **CONFIG,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    square = (hidden, hidden)
    layer: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{name}_proj.weight": square for name in "qkvo"},
        "mlp.gate_proj.weight": (2 * hidden, hidden),
        "mlp.up_proj.weight": (2 * hidden, hidden),
        "mlp.down_proj.weight": (hidden, 2 * hidden),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    parameters = {
        **{f"model.layers.0.{name}": shape for name, shape in layer.items()},
        **dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (vocabulary, hidden)),
        "model.norm.weight": (hidden,),
    }
    return write_checkpoint(folder, seed=seed, config=config, parameters=parameters, shards=shards)
