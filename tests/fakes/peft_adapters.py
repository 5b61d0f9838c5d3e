"""Adapters as PEFT writes them, as a program for an environment with it and torch.

python peft_adapters.py write CASES_FILE: for each case a base, an adapter on it with random numbers, PEFT's own merge
of both as a folder, and logits of the adapter on its base as PEFT runs it while training.

python peft_adapters.py compare PAIRS_FILE: for each pair of a model and such a merge, the largest distance between the
model's logits in float32 and those.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from peft import LoraConfig, PeftModel, get_peft_model  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig  # pyright: ignore[reportMissingImports]

PROMPT = list(b"The bee makes honey.")


def main(mode: str, file: str) -> None:
    asked = json.loads(Path(file).read_text())
    if mode == "write":
        for case in asked:
            write(case, Path(case["folder"]))
        return
    print(json.dumps([distance(Path(made), Path(merged)) for made, merged in asked]))


def distance(made: Path, merged: Path) -> float:
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    return float((logits - torch.load(merged / "logits.pt")).abs().max())


def write(case: dict[str, Any], folder: Path) -> None:
    torch.manual_seed(case.get("seed", 0))
    dtype = getattr(torch, case.get("dtype", "float32"))
    step = f"checkpoint-{case.get('step', 10)}"
    base, adapter, merged = folder / "base", folder / "run" / step, folder / "merged" / step
    if not base.exists():
        model = AutoModelForCausalLM.from_config(config_of(case), dtype=dtype)
        model.save_pretrained(base, max_shard_size=case.get("shard", "5GB"))
        for file in Path(case["tokenizer"]).iterdir():
            shutil.copy(file, base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    if case.get("vocabulary"):
        model.resize_token_embeddings(case["vocabulary"])
    trained = get_peft_model(model, LoraConfig(**case["lora"]))
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if parameter.requires_grad:
                moved = 0.1 * torch.randn_like(parameter)
                parameter.copy_(parameter * (1 + moved) if "magnitude" in name else parameter + moved)
    trained.save_pretrained(adapter, safe_serialization=not case.get("pickled"))
    if case.get("has_tokenizer"):
        for file in Path(case["tokenizer"]).iterdir():
            shutil.copy(file, adapter)
    described = json.loads((adapter / "adapter_config.json").read_text())
    described["base_model_name_or_path"] = case.get("named", str(base))
    (adapter / "adapter_config.json").write_text(json.dumps(described))

    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    if case.get("vocabulary"):
        model.resize_token_embeddings(case["vocabulary"])
    loaded = PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        logits = loaded.float()(torch.tensor([PROMPT])).logits[0]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    if case.get("vocabulary"):
        model.resize_token_embeddings(case["vocabulary"])
    whole = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    if case.get("pickled_base"):
        torch.save(AutoModelForCausalLM.from_pretrained(base, dtype=dtype).state_dict(), base / "pytorch_model.bin")
        (base / "model.safetensors").unlink()
    shutil.copytree(base, merged, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "*.index.json"))
    tensors = {name: tensor.clone().contiguous() for name, tensor in whole.state_dict().items()}
    untied = not torch.equal(whole.get_input_embeddings().weight, whole.get_output_embeddings().weight)
    if not untied and whole.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    changed = {"vocab_size": whole.get_input_embeddings().weight.shape[0], "tie_word_embeddings": not untied}
    config = json.loads((base / "config.json").read_text())
    (merged / "config.json").write_text(json.dumps(config | changed))
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    torch.save(logits, merged / "logits.pt")


def config_of(case: dict[str, Any]) -> Any:
    if case.get("model") == "gpt2":
        return GPT2Config(
            vocab_size=258, n_positions=128, n_embd=32, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=257
        )
    return LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=case.get("tied", False),
        bos_token_id=256,
        eos_token_id=257,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
