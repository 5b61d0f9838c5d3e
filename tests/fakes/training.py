"""A training small enough for a test: texts, a tokenizer, and Levanter's configuration of a nano Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fakes.tokenizers import write_byte_tokenizer

PROGRAM = "run_levanter_train.py"
SENTENCE = "the quick brown fox jumps over the lazy dog. "
CONTEXT = 256
"""Context length of the model in tokens."""


def write_training_data(folder: Path) -> Path:
    """Writes texts, and a byte tokenizer with its model configuration."""
    reference = folder / "reference"
    reference.mkdir(parents=True)
    write_byte_tokenizer(reference)
    described = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 258}
    (reference / "config.json").write_text(json.dumps(described))
    lines = [json.dumps({"text": SENTENCE * (1 + number % 3)}) for number in range(200)]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def nano_training(data: Path, output: Path, *, steps: int, every: int, **trainer: Any) -> dict[str, Any]:
    """Returns a `TrainLmOnPodConfig` of a Llama of 80 thousand parameters that exports itself every few steps."""
    reference = str(data / "reference")
    texts = {"source": {"type": "url", "train_urls": [str(data / "texts.jsonl")]}}
    model = {"hidden_dim": 64, "intermediate_dim": 128, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    train_config = {
        "data": {"tokenizer": reference, "components": {"texts": texts}},
        "model": {"type": "llama", "max_seq_len": CONTEXT, "reference_checkpoint": reference, **model},
        "optimizer": {"type": "adam", "learning_rate": 1e-2},
        "train_seq_len": 64,
        "trainer": {
            "tracker": {"type": "json_logger"},
            "mp": "f32",
            "num_train_steps": steps,
            "train_batch_size": 2,
            "checkpointer": {"save_interval": "15m", "keep": [{"every": max(1, every // 2)}]},
            "log_jaxprs": False,
            "log_xla_hlo": False,
            **trainer,
        },
        "hf_save_steps": every,
    }
    return {"train_config": train_config, "output_path": str(output), "auto_build_caches": True}


def trainers_of(run_id: str) -> list[int]:
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            mine = f"RUN_ID={run_id}".encode() in (folder / "environ").read_bytes().split(b"\0")
            trains = any(part.endswith(PROGRAM.encode()) for part in (folder / "cmdline").read_bytes().split(b"\0"))
        except OSError:
            continue
        if mine and trains:
            pids.append(int(folder.name))
    return pids
