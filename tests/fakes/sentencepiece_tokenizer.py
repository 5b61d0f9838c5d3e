"""Trains a SentencePiece tokenizer, and prints ids that it, or transformers, reads. Executed by other environments.

python sentencepiece_tokenizer.py write <folder> <size>
python sentencepiece_tokenizer.py read <folder> <text> with sentencepiece
python sentencepiece_tokenizer.py read <folder> <text> with transformers
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

WORDS = ("north", "south", "which", "colour", "of", "the", "sky", "answer", "question", "Äpfel", "größer", "12", "345")
SETTINGS = {
    **{"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    **{"add_bos_token": False, "add_eos_token": False, "legacy": False, "clean_up_tokenization_spaces": False},
}


def write(folder: Path, size: int) -> None:
    """Writes tokenizer.model, with bytes for all else, and tokenizer_config.json."""
    trained: Any = importlib.import_module("sentencepiece")
    chosen = random.Random(1)
    lines = [" ".join(chosen.choices(WORDS, k=8)) for _ in range(200)]
    trained.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))


def read(folder: Path, text: str, library: str) -> list[int]:
    """Returns the ids of a text."""
    if library == "sentencepiece":
        sentencepiece: Any = importlib.import_module(library)
        return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).encode(text)
    transformers: Any = importlib.import_module(library)
    return transformers.AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        print(json.dumps(read(Path(sys.argv[2]), sys.argv[3], sys.argv[5])))
