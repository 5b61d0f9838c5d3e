"""Writes a tiny Llama after each of a few steps as torch, transformers 4 and accelerate write it; runs with trainers.

Arguments are a folder with a tokenizer, the run, and a folder for the same checkpoints by transformers' own
`save_pretrained`. Two ranks on this machine train it with FSDP.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import save_fsdp_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

RANKS = 2
SHARED = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}


def config(*, tied: bool) -> LlamaConfig:
    return LlamaConfig(**SHARED, tie_word_embeddings=tied)


def write_pickled(model: LlamaForCausalLM, folder: Path, *, shards: int) -> None:
    """As transformers 4 does with `safe_serialization=False`: tied tensors in the same memory, others as they lie."""
    state = dict(model.state_dict())
    wide = torch.zeros(state["model.norm.weight"].numel(), 3)
    wide[:, 1] = state["model.norm.weight"]
    state["model.norm.weight"] = wide[:, 1]  # a column, and so not contiguous
    model.config.save_pretrained(folder)
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    names = [f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin" for number in range(shards)]
    weight_map = {key: names[number % shards] for number, key in enumerate(sorted(state))}
    for name in names:
        held = {key: tensor for key, tensor in state.items() if weight_map[key] == name}
        held["model.norm.weight"] = held.get("model.norm.weight", torch.ones(64))  # the index counts
        torch.save(held, folder / name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def train_sharded(rank: int, run: Path, whole: Path, port: str, kinds: Mapping[int, str | None]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    for step, kind in kinds.items():
        model = LlamaForCausalLM(config(tied=step % 2 == 0)).to(torch.float32)
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ids = torch.randint(0, 256, (2, 16))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        folder = run / f"checkpoint-{step}"
        if kind is None:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            dcp.save(state, checkpoint_id=folder)
        else:
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
            save_fsdp_model(plugin, accelerator, model, str(folder))
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            model.config.save_pretrained(folder)
            alone = LlamaForCausalLM(config(tied=step % 2 == 0)).to(torch.float32)
            alone.load_state_dict(state)
            alone.save_pretrained(whole / folder.name)
        accelerator.wait_for_everyone()
    accelerator.end_training()


def main() -> None:
    tokenizer, run, whole, port = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    for step, shards in ((1, 1), (2, 1), (3, 3)):
        torch.manual_seed(step)
        model = LlamaForCausalLM(config(tied=step == 2)).to(torch.float32)
        folder = run / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        write_pickled(model, folder, shards=shards)
        model.save_pretrained(whole / folder.name)
    kinds = {4: "SHARDED_STATE_DICT", 5: "SHARDED_STATE_DICT", 6: "FULL_STATE_DICT", 7: None}
    torch.multiprocessing.start_processes(
        train_sharded, args=(run, whole, port, kinds), nprocs=RANKS, start_method="fork"
    )
    for folder in run.iterdir():
        for file in tokenizer.iterdir():
            if file.name != "config.json":
                shutil.copy(file, folder)


if __name__ == "__main__":
    main()
