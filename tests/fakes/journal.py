"""Requests and answers for tests of the journal."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from pools.journal.answers import AnswerFacts
from pools.journal.cells import CellScope
from pools.journal.keys import Question, Subject, question
from pools.journal.store import Claim, Journal

SUBJECT = Subject("weights", "tokenizer", "engine")
JSON = "application/json"
FACTS = AnswerFacts(3, 5, ("stop", "length"))
FIRST = CellScope("cell", "first")
SECOND = CellScope("cell", "second")
BIG = 10**9


def asked(prompt: str, *, temperature: float = 0.0, **fields: Any) -> Question:
    """A request of a completion, deterministic unless told otherwise."""
    body = {"model": "run-100", "prompt": prompt, "temperature": temperature, **fields}
    return question(SUBJECT, "/v1/completions", body=json.dumps(body).encode(), fields=body)


def sampled(prompt: str = "Once") -> Question:
    """A request of a sampled completion."""
    return asked(prompt, temperature=1.0)


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[tuple[Journal, list[str]]]:
    """A journal, closed at the end, and the warnings it gives."""
    warnings: list[str] = []
    chosen: dict[str, Any] = {"max_bytes": BIG, "keep_prompts": False, **options}
    journal = Journal.open(path, warn=warnings.append, **chosen)
    try:
        yield journal, warnings
    finally:
        await journal.close()


async def answer(journal: Journal, asked_for: Question, body: bytes, *, cell: CellScope | None = None) -> Claim:
    """Has a request answered that the journal has no answer to."""
    claim = journal.claim(asked_for, cell=cell)
    assert claim.stored is None
    await journal.keep(claim, JSON, body, facts=FACTS)
    return claim


def replayed(journal: Journal, asked_for: Question, *, cell: CellScope | None = None) -> bytes | None:
    """The answer that the journal has to a request."""
    stored = journal.claim(asked_for, cell=cell).stored
    return stored.body if stored else None


def rows(path: Path, sql: str) -> list[Any]:
    """The rows that a query finds in a journal that is closed."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


async def answer_whatever(journal: Journal, prompt: str, body: bytes) -> None:
    """Has a request answered as a proxy does, whatever the journal can do."""
    claim = journal.claim(asked(prompt), cell=None)
    if claim.stored is None:
        await journal.keep(claim, JSON, body, facts=FACTS)
