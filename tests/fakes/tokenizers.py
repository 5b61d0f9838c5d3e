"""A tokenizer that transformers loads, made without transformers."""

from __future__ import annotations

import json
from pathlib import Path

BOS, EOS = 256, 257

_TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_byte_tokenizer(
    folder: Path, *, adds_bos: bool = False, composes: bool = False, template: str = _TEMPLATE
) -> Path:
    """Writes a tokenizer with a chat template: token ids are bytes, then <|bos|> and <|eos|>.

    With `composes`, it composes accents first, as transformers does for every tokenizer of a qwen2 model.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in printable}
    for place, byte in enumerate(sorted(set(range(256)) - set(printable))):
        characters[byte] = chr(256 + place)
    special = {"<|bos|>": BOS, "<|eos|>": EOS}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    with_bos = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, sequence],
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [BOS], "tokens": ["<|bos|>"]}},
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": text, **flags} for text, number in special.items()],
        "normalizer": {"type": "NFC"} if composes else None,
        "pre_tokenizer": byte_level,
        "post_processor": with_bos if adds_bos else None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {**{character: byte for byte, character in characters.items()}, **special},
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
