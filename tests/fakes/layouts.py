"""Folders of checkpoints as training frameworks write them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fakes.models import write_checkpoint, write_safetensors

WHOLE, OTHER, THIRD = "whole", "whole 7", "whole 8"
"""A complete checkpoint; its weights are those of its step, or of that number."""
DESCRIBED = ("config.json", "tokenizer.json", "tokenizer_config.json")
"""Files of a checkpoint without weights."""


def write_layout(run: Path, folders: Mapping[str, str | tuple[str, ...]]) -> None:
    """Writes what a row says; everything is old, so that verdicts on it are remembered."""
    for pattern, content in folders.items():
        for step in (100, 200) if "N" in pattern.replace("NeMo", "") and "STABLE" not in pattern else (0,):
            place = run / pattern.replace("N", str(step)) if step else run / pattern
            _write(place, content, step or _number(pattern))
    for file in run.rglob("*"):
        os.utime(file, (1_700_000_000, 1_700_000_000))


def _write(place: Path, content: str | tuple[str, ...], seed: int) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, tuple):
        for name in content:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(json.dumps(_CONFIG if name == "config.json" else {}))
        return
    kind, _, number = content.partition(" ")
    if kind not in ("whole", "no", "shards", "adapter"):
        place.write_text(content)
        return
    if kind == "adapter":
        write_adapter(place, base=place.parents[1] / "base", seed=seed)
        return
    made = place if not place.exists() else place / "made"
    write_checkpoint(made, seed=int(number) if number.isdecimal() else seed, shards=2 if kind == "shards" else 1)
    for file in list(made.iterdir()) if made != place else []:
        file.rename(place / file.name)
    if made != place:
        made.rmdir()
    if content == "no tokenizer":
        (place / "tokenizer.json").unlink()
        (place / "tokenizer_config.json").unlink()


def write_adapter(folder: Path, *, base: Path, seed: int) -> None:
    """Writes a LoRA of rank 1 on the embedding of a base, as PEFT does."""
    if not base.exists():
        write_checkpoint(base)
    _write(folder, ("tokenizer.json", "tokenizer_config.json"), seed)
    described = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["embed_tokens"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**described, "base_model_name_or_path": str(base)}))
    prefix = "base_model.model.model.embed_tokens.lora_embedding"
    shapes = {f"{prefix}_A": (1, 16), f"{prefix}_B": (8, 1)}
    write_safetensors(folder / "adapter_model.safetensors", seed=seed, parameters=shapes)


_CONFIG: Mapping[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def _number(pattern: str) -> int:
    digits = "".join(letter for letter in pattern.rpartition("/")[2] if letter.isdigit())
    return int(digits or 0) % 1000
