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
    body = {"model": "run-100", "prompt": prompt, "temperature": temperature, **fields}
    return question(SUBJECT, "/v1/completions", body=json.dumps(body).encode(), fields=body)


def sampled(prompt: str = "Once") -> Question:
    return asked(prompt, temperature=1.0)


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[tuple[Journal, list[str]]]:
    """Opens a journal for the block; yields it with the list of its warnings."""
    warnings: list[str] = []
    chosen: dict[str, Any] = {"max_bytes": BIG, "keep_prompts": False, **options}
    journal = Journal(path, warn=warnings.append, **chosen)
    try:
        yield journal, warnings
    finally:
        await journal.close()


async def answer(journal: Journal, asked_for: Question, body: bytes, *, cell: CellScope | None = None) -> Claim:
    """Stores the answer to a request that the journal has no answer to."""
    claim = journal.claim(asked_for, cell=cell)
    assert claim.stored is None
    await journal.keep(claim, JSON, body, facts=FACTS)
    return claim


def replayed(journal: Journal, asked_for: Question, *, cell: CellScope | None = None) -> bytes | None:
    stored = journal.claim(asked_for, cell=cell).stored
    return stored.body if stored else None


def rows(path: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


async def claim_and_answer(journal: Journal, prompt: str, body: bytes) -> None:
    """Claims a prompt and stores its answer unless the journal has it."""
    claim = journal.claim(asked(prompt), cell=None)
    if claim.stored is None:
        await journal.keep(claim, JSON, body, facts=FACTS)
