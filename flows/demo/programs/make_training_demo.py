"""Writes the training data of the training demo: texts of the invented world, and their tokenizer with a configuration.

Runs inside the levanter environment, which has transformers and tokenizers:

    python flows/demo/programs/make_training_demo.py --output demo-train/data

writes `texts.jsonl` and `reference/`, a folder with the tokenizer for Levanter. The texts are those of
`train_demo_model.py`; the benchmarks' questions are never part of them.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from demo_tokenizer import build_tokenizer
from demo_world import END, training_text
from transformers import LlamaConfig

TEXTS = 20_000


def main() -> None:
    """Writes a text per line, without an end token, which Levanter appends; the tokenizer, and a model's config."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for texts.jsonl and reference/")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    source = random.Random(0)
    with (output / "texts.jsonl").open("w") as file:
        for _ in range(TEXTS):
            file.write(json.dumps({"text": training_text(source).text.removesuffix(END)}) + "\n")
    tokenizer: Any = build_tokenizer()
    tokenizer.save_pretrained(output / "reference")
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(output / "reference")


if __name__ == "__main__":
    main()
