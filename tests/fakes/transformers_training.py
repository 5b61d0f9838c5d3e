"""A training of a tiny Llama with `transformers`, as a program for an environment with it, torch and accelerate.

python transformers_training.py TOKENIZER_FOLDER OUTPUT_FOLDER HOOKS_FOLDER
"""

from __future__ import annotations

import json
import logging
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # pyright: ignore[reportMissingImports]


def main(tokenizer_folder: str, output: str, hooks: str) -> None:
    sys.path.insert(0, hooks)
    from assay_transformers import AssayCallback  # pyright: ignore[reportMissingImports]

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, pad_token="<|eos|>")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=260, max_position_embeddings=64, **sizes))
    ids = tokenizer("The training tells of its checkpoints.")["input_ids"]
    rows = [{"input_ids": ids, "labels": ids}] * 4
    arguments = TrainingArguments(
        output_dir=output,
        max_steps=1,
        save_steps=1,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[AssayCallback()]
    )
    began = time.monotonic()
    trained = trainer.train()
    print(
        json.dumps({"seconds": time.monotonic() - began, "loss": trained.training_loss, "steps": trained.global_step})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
