"""Constants, refusals and error texts that both phases of `run_alpaca_eval.py` use."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import openai

REFUSAL_NAME = "refused.json"
DATA_SET = "tatsu-lab/alpaca_eval"
RETRIES = 2  # three attempts in all, as lm-eval makes
CONNECT_SECONDS = 10.0
SHOWN_CHARACTERS = 200
NO_ANSWER = (openai.OpenAIError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions of a request that fails, or whose reply is no answer."""


def describe_error(error: BaseException) -> str:
    """Returns an error in a line, without what was asked."""
    status = getattr(error, "status_code", None)
    return f"{type(error).__name__}{f' {status}' if status else ''}: {str(error)[:SHOWN_CHARACTERS]}"


def refuse(output: Path, *, kind: str, expected: str, found: str, remedy: str) -> NoReturn:
    """Ends the program, with the reason in a file for the orchestrator and on standard error for people."""
    write_json(output / REFUSAL_NAME, {"kind": kind, "expected": expected, "found": found, "remedy": remedy})
    sys.exit(f"refused: expected {expected}, found {found}")


def write_json(path: Path, content: Any) -> None:
    """Writes a file that another program reads."""
    path.write_text(json.dumps(content, indent=2))
