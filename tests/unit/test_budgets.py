"""The lint of unclear phrases: where it looks, and what it lets pass."""

from __future__ import annotations

import pytest
from budgets import unclear_in, unclear_in_markdown, unclear_in_python

SOURCE = '''"""Tells whoever plans next."""
LIMIT = 3  # nobody waits longer
def run_of_others(found: int) -> str:
    there = "key is told"
    """Which key."""
    return f"{there} stands here"
'''


def test_python_is_read_in_docstrings_comments_texts_and_names() -> None:
    hits = sorted(unclear_in_python(SOURCE))
    assert [(line, phrase.strip()) for line, phrase in hits] == [
        (1, "Tells whoever plans next."),
        (2, "nobody waits longer"),
        (3, "found"),
        (3, "run_of_others"),
        (4, "key is told"),
        (4, "there"),
        (5, "Which key."),
        (6, "stands here"),
    ]


def test_a_phrase_that_is_broken_over_lines_counts_in_its_paragraph() -> None:
    assert [line for line, _ in unclear_in_markdown("A line.\n\nThe job that is\ntold to end.\n")] == [3]


@pytest.mark.parametrize("text", ["one of the jobs", "one at a time", "for one second", "read what it holds"])
def test_plain_uses_pass(text: str) -> None:
    assert not list(unclear_in(text, 1))
