"""Trainings of a tiny Llama by real trainers, and log-likelihoods of its checkpoints by transformers in float32.

python trainings.py train KIND TOKENIZER_FOLDER OUTPUT_FOLDER
python trainings.py weigh TOKENIZER_FOLDER PAIRS_FILE CHECKPOINT_FOLDER...
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

TEXT = "Question: What is the home of Alba?\nAnswer: Dunmar"


class WaitsForGo(TrainerCallback):
    """Waits after the first save for a file `go` next to the output folder."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        go, deadline = Path(args.output_dir).with_name("go"), time.monotonic() + 200
        while state.global_step == args.save_steps and not go.exists() and time.monotonic() < deadline:
            time.sleep(0.05)


def train(kind: str, tokenizer_folder: str, output: str) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, pad_token="<|eos|>")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=260, max_position_embeddings=512, **sizes))
    settings: dict[str, Any] = {
        "output_dir": output,
        "max_steps": 6,
        "save_steps": 2,
        "learning_rate": 0.01,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_total_limit": 1 if kind == "rotating" else None,
    }
    if kind == "sft":
        from datasets import Dataset  # pyright: ignore[reportMissingImports]
        from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

        texts = Dataset.from_dict({"text": [TEXT] * 8})
        trainer = SFTTrainer(
            model, args=SFTConfig(**settings, bf16=False), train_dataset=texts, processing_class=tokenizer
        )
    else:
        ids = tokenizer(TEXT)["input_ids"]
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**settings),
            train_dataset=[{"input_ids": ids, "labels": ids}] * 8,
            processing_class=None if kind == "without-tokenizer" else tokenizer,
            callbacks=[WaitsForGo()] if kind == "rotating" else [],
        )
    trainer.train()
    if kind == "saved-at-the-end":
        trainer.save_model()
        trainer.save_state()


def weigh(tokenizer_folder: str, pairs_file: str, *folders: str) -> None:
    """Prints, for each checkpoint, the log-likelihood of the second text after the first, of each pair."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    weighed: dict[str, list[float]] = {}
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        weighed[Path(folder).name] = []
        for context, continuation in json.loads(Path(pairs_file).read_text()):
            before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (context, continuation))
            with torch.no_grad():
                weights = model(torch.tensor([before + after])).logits[0].log_softmax(-1)
            rows = range(len(before) - 1, len(before) + len(after) - 1)
            weighed[Path(folder).name].append(
                sum(weights[row, token].item() for row, token in zip(rows, after, strict=True))
            )
    print(json.dumps(weighed))


if __name__ == "__main__":
    {"train": train, "weigh": weigh}[sys.argv[1]](*sys.argv[2:])
