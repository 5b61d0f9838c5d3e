"""Makes a model large enough for its computation to count, and benchmarks for lm-eval.

A token is a word with the space in front of it, so the lengths below are tokens.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, LAYERS, HEADS, INNER = 512, 8, 8, 1376
VOCABULARY = 8000
_SYLLABLES = ("ba", "do", "fi", "ga", "hu", "ke", "lo", "ma", "ni", "pe", "ru", "so", "ti", "vu", "we", "zo")
_NAMES = ("Question:", "Answer:", "A.", "B.", "C.", "D.", "?")
_LETTERS = ("A", "B", "C", "D")
GENERATION = "generation"
_WORDS = 88
"""Length of an example or a question."""
_POOL = 64
"""Questions that examples are taken from; every question has the same examples in the same order, as in MMLU."""


@dataclass(frozen=True)
class Kind:
    """A kind of benchmark, and the range of tokens of each choice."""

    name: str
    choice: tuple[int, int]


SINGLE_TOKEN = Kind("one_token", choice=(1, 1))
LONG = Kind("long", choice=(8, 20))
KINDS = (SINGLE_TOKEN, LONG)


@cache
def words() -> Sequence[str]:
    return ["".join(parts) for parts in islice(product(_SYLLABLES, repeat=3), (VOCABULARY - 64) // 2)]


def write_model(folder: Path, *, seed: int = 0) -> Path:
    """Writes a Llama of 33 million random parameters in float32, with its tokenizer."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    _write_weights(folder / "model.safetensors", shapes(), seed=seed)
    _write_tokenizer(folder)
    return folder


def shapes() -> dict[str, tuple[int, ...]]:
    layer: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"},
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    return {
        **{f"model.layers.{place}.{name}": shape for place in range(LAYERS) for name, shape in layer.items()},
        **dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCABULARY, HIDDEN)),
        "model.norm.weight": (HIDDEN,),
    }


def parameters() -> int:
    return sum(math.prod(shape) for shape in shapes().values())


def _write_weights(path: Path, tensors: Mapping[str, Sequence[int]], *, seed: int) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    draw = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for shape in tensors.values():
            is_norm = len(shape) == 1
            numbers = np.ones(shape) if is_norm else draw.normal(scale=1 / math.sqrt(shape[-1]), size=shape)
            file.write(numbers.astype("<f4").tobytes())


def _write_tokenizer(folder: Path) -> None:
    pieces = [*(piece for name in (*_NAMES, *_LETTERS, *words()) for piece in (name, f" {name}")), "\n", " "]
    special = ["<bos>", "<eos>", "<unk>"]
    vocabulary = {piece: number for number, piece in enumerate([*special, *pieces])}
    assert len(vocabulary) <= VOCABULARY
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    split = {"type": "Split", "pattern": {"Regex": " ?[^\\s]+|\\s"}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": text, **flags} for number, text in enumerate(special)],
        "pre_tokenizer": split,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({**described, "clean_up_tokenization_spaces": False}))


def write_benchmarks(folder: Path, *, questions: Mapping[str, int], shots: int, seed: int) -> Path:
    """Writes benchmarks of each kind, with questions unique to the seed and `shots` examples."""
    folder.mkdir(parents=True)
    for kind in KINDS:
        draw = random.Random(f"{seed} {kind.name}")
        written = {"examples": _POOL, "test": questions[kind.name]}
        for split, number in written.items():
            lines = [json.dumps(question) + "\n" for question in islice(_questions(kind, draw), number)]
            (folder / f"{kind.name}.{split}.jsonl").write_text("".join(lines))
        described = {
            "task": kind.name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {split: f"{kind.name}.{split}.jsonl" for split in written}},
            "test_split": "test",
            "fewshot_split": "examples",
            "fewshot_config": {"sampler": "first_n"},
            "num_fewshot": shots,
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "right",
            "metric_list": [{"metric": name, "higher_is_better": True} for name in ("acc", "acc_norm")],
        }
        (folder / f"{kind.name}.yaml").write_text(json.dumps(described))
    return folder


def write_generation(folder: Path, *, subjects: int, questions: int, shots: int, seed: int) -> Path:
    """Writes a benchmark of generated texts: subjects with examples of their own, their questions mixed."""
    folder.mkdir(parents=True)
    draw = random.Random(f"{seed} {GENERATION}")

    def question() -> str:
        return f"Question: {_text(draw, draw.randint(1, 2 * _WORDS))} ?\nAnswer:"

    examples = ["".join(f"{question()} {_text(draw, 8)}\n\n" for _ in range(shots)) for _ in range(subjects)]
    rows = [
        {"question": examples[place % subjects] + question(), "answer": _text(draw, 8)} for place in range(questions)
    ]
    (folder / f"{GENERATION}.test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    described = {
        "task": GENERATION,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{GENERATION}.test.jsonl"}},
        "test_split": "test",
        "num_fewshot": 0,
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / f"{GENERATION}.yaml").write_text(json.dumps(described))
    return folder


def _text(draw: random.Random, number: int) -> str:
    return " ".join(draw.choices(words(), k=number))


def _questions(kind: Kind, draw: random.Random) -> Iterator[dict[str, Any]]:
    while True:
        question = f"Question: {_text(draw, _WORDS)} ?"
        if kind is SINGLE_TOKEN:
            choices = list(_LETTERS)
            question += "".join(f"\n{letter}. {_text(draw, 2)}" for letter in _LETTERS)
        else:
            choices = [_text(draw, draw.randint(*kind.choice)) for _ in _LETTERS]
        yield {"question": f"{question}\nAnswer:", "choices": choices, "right": draw.randrange(len(choices))}
