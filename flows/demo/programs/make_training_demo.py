"""Writes what the training demo learns from: texts of the invented world, and a byte tokenizer with a configuration.

Runs inside the levanter environment, which has transformers and tokenizers:

    python flows/demo/programs/make_training_demo.py --output demo-train/data

writes `texts.jsonl` and `reference/`, a folder from which Levanter takes the tokenizer. The same texts as those of
`train_demo_model.py`; the benchmarks' questions are never part of them.
"""

import argparse
import json
import random
from pathlib import Path

from demo_world import CHAT_TEMPLATE, END, SPECIAL_TOKENS, training_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

CONTEXT_TOKENS = 512
TEXTS = 20_000


def write_texts(path: Path, *, texts: int, seed: int) -> None:
    """One text a line; Levanter puts the end of a text behind each by itself."""
    source = random.Random(seed)
    with path.open("w") as file:
        for _ in range(texts):
            file.write(json.dumps({"text": training_text(source).text.removesuffix(END)}) + "\n")


def write_reference(folder: Path) -> None:
    """A tokenizer of the 256 bytes and the special tokens, and the kind of model it is for."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(folder)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(wrapped),
        bos_token_id=None,
        eos_token_id=wrapped.eos_token_id,
    ).save_pretrained(folder)


def main() -> None:
    """Reads the command line and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for texts.jsonl and reference/")
    parser.add_argument("--texts", type=int, default=TEXTS, help=f"how many (default: {TEXTS})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the texts (default: 0)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    write_texts(options.output / "texts.jsonl", texts=options.texts, seed=options.seed)
    write_reference(options.output / "reference")


if __name__ == "__main__":
    main()
