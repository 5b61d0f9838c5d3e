"""Constants and error texts that both phases of `run_alpaca_eval.py` use."""

from __future__ import annotations

import openai

DATA_SET = "tatsu-lab/alpaca_eval"
RETRIES = 2  # three attempts in all, as lm-eval makes
CONNECT_SECONDS = 10.0
SHOWN_CHARACTERS = 200
NO_ANSWER = (openai.OpenAIError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions of a failed request, or of a reply that is no answer."""


def describe_error(error: BaseException) -> str:
    """Formats an error, with at most 200 characters of its message."""
    status = getattr(error, "status_code", None)
    return f"{type(error).__name__}{f' {status}' if status else ''}: {str(error)[:SHOWN_CHARACTERS]}"
