"""Shared by harness programs: refusals for the orchestrator, tokenizers, chat templates, logs. Imports no library."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REFUSAL_NAME = "refused.json"
SAME_WARNINGS = 20
HUB_VARIABLES = ("HF_", "HUGGINGFACE_", "TOKENIZERS_", "TRANSFORMERS_", "XDG_CACHE_HOME")
"""Prefixes of variables that libraries of the hub read at import, for the `READ_AT_IMPORT` of a program."""
LANGUAGE_MODELS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Entries of config.json that describe a language model, as in `pools/architectures.py`."""


class Refused(Exception):
    """A job that cannot be done; `kind` is a class of Assay's errors."""

    def __init__(self, expected: str, found: str, remedy: str, kind: str = "BadInput") -> None:
        super().__init__(expected, found, remedy, kind)
        self.expected, self.found, self.remedy, self.kind = expected, found, remedy, kind

    def __str__(self) -> str:
        return f"refused: expected {self.expected}, found {self.found}"


@contextmanager
def refusals_into(output: Path) -> Iterator[None]:
    """Ends the program if the block refuses; writes the reason to a file for the orchestrator and to standard error."""
    try:
        yield
    except Refused as refused:
        write_json(output / REFUSAL_NAME, vars(refused))
        sys.exit(str(refused))


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file for another program."""
    path.write_text(json.dumps(content, indent=2))


def chat_template(tokenizer: Path) -> str | None:
    """Returns the chat template in a tokenizer's folder, from any of its files; as JSON if there are several."""
    for name in ("chat_template.jinja", "chat_template.json"):
        if (tokenizer / name).is_file():
            return (tokenizer / name).read_text()
    try:
        described = json.loads((tokenizer / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return None
    template = described.get("chat_template") if isinstance(described, dict) else None
    return json.dumps(template, sort_keys=True) if template else None


def digest_of(text: str | None) -> str | None:
    """Returns the SHA-256 of a text; None without a text."""
    return hashlib.sha256(text.encode()).hexdigest() if text else None


def chat_template_needed(job: dict[str, Any]) -> str | None:
    """Returns the chat template of a job's tokenizer, None without chat; refuses a chat job if there is no template."""
    template = chat_template(Path(job["tokenizer"])) if job["chat"] else None
    if job["chat"] and not template:
        raise no_chat_template(job["tokenizer"])
    return template


def no_chat_template(place: str) -> Refused:
    """Returns the refusal of a tokenizer without a chat template."""
    return Refused(
        expected="a tokenizer with a chat template, since apply_chat_template is set",
        found=f"chat asked of a model without a template: none in {place}",
        remedy="Name a file with it by --chat-template, or set apply_chat_template to false",
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def few_of_each_kind() -> Callable[[logging.LogRecord], bool]:
    """Returns a filter for the first messages of a kind: harnesses log several per request, prompts included."""
    seen: Counter[str] = Counter()

    def is_among_the_first(record: logging.LogRecord) -> bool:
        kind = str(record.msg)[:24]
        seen[kind] += 1
        return seen[kind] <= SAME_WARNINGS

    return is_among_the_first


def read_tokenizer(folder: str, *, trusted: bool) -> Any:
    """Returns the tokenizer in a folder, by transformers; refuses if it cannot be read. `trusted`: its code may run."""
    transformers: Any = importlib.import_module("transformers")
    try:
        if not Path(folder).is_dir():  # else the hub would be searched for its name
            raise FileNotFoundError(f"no folder {folder}")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
        tokenizer("a")
    except Exception as error:  # errors of damaged files have no common type
        logging.getLogger(__name__).error("the tokenizer cannot be loaded", exc_info=error)
        code = "Read the tokenizer's code, and allow it: trust_remote_code: true in engine_kwargs"
        files = (
            "Put the tokenizer's files of the training run into the checkpoint, whole, or name others by --tokenizer"
        )
        raise Refused(
            expected=f"a tokenizer that loads in {folder}",
            found=f"{type(error).__name__}: {error}"[:1000],
            remedy=code if "trust_remote_code" in str(error) else files,
        ) from error
    return tokenizer


def shape_of(checkpoint: Path) -> dict[str, Any]:
    """Returns the config.json in a folder, with the entries of its language model in place of the whole's."""
    shape: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    while part := next((shape.pop(name) for name in LANGUAGE_MODELS if isinstance(shape.get(name), dict)), None):
        shape = {**shape, **part}
    return shape
