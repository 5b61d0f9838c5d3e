"""Shared by harness programs: refusals for the orchestrator, chat templates, logs. Standard library only."""

from __future__ import annotations

import hashlib
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
