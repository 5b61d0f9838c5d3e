"""Lies that an endpoint can tell: malformed answers, and cut texts that nobody can tell from whole ones."""

from __future__ import annotations

import copy
import random
from typing import Any

from fakes.malformed import OF_TOKENS, malformed, malformed_tokens, set_text, text_of

Answer = dict[str, Any]
CUT_AS_LENGTH = "cut as length"
"""Half of each text, as if that had met the limit of its length: nobody can know better."""
ANY = "any"
"""Any of the lies below that can be told of an answer, drawn anew each time."""
LIES = {
    "too few rows": "the last row of log-probabilities is not there",
    "too many rows": "the last row stands there twice",
    "only the last row": "the generated token alone has a row",
    "positive": "log-probabilities without their sign",
    "all zero": "every log-probability is 0",
    "null": "every log-probability is null",
    "not a number": "every log-probability is NaN",
    "infinite": "every log-probability is -inf",
    "no log-probabilities": "none, though they were asked for",
    "another prompt": "log-probabilities of other prompts",
    "indices swapped": "the choices' indices in reverse",
    "indices repeated": "all choices have one index",
    "one choice too few": "one choice fewer than prompts",
    "too many": "one choice more than prompts",
    "no choices": "an empty list of choices",
    "no text": "null for each text",
    "aborted": "texts that were cut, whose end is `abort`",
    "unknown finish": "a reason for the end that nobody knows",
    "no finish": "no reason for the end",
}
"""Lies that can be told from the truth, with their descriptions."""
_OF_SCORED = {*list(LIES)[:11]}
"""Nothing in a generated text says which prompt it answers, so some are lies about echoed prompts alone."""
_ALWAYS = (
    "no rows",
    "empty rows",
    "no tokens",
    "token too few",
    "cut off",
    "choice too many",
    "prompt of another length",
)
"""Kinds of malformed answers of token ids that need no rows of the prompt."""
_OF_WRITTEN = {"no text", "aborted", "unknown finish", "no finish", CUT_AS_LENGTH}


def lied(lie: str, answer: Answer, earlier: Answer | None, drawn: random.Random) -> Answer | None:
    """The changed answer; None if that lie cannot be told of this one, or changes nothing.

    Args:
        lie: its name.
        answer: a whole, right one; it stays as it is.
        earlier: one to other prompts.
        drawn: decides where there are several.
    """
    if lie == ANY and "output_mode" in answer:
        changed = copy.deepcopy(answer)
        kind = drawn.choice([name for name in OF_TOKENS if len(answer["prompt_logprobs"] or ()) > 2 or name in _ALWAYS])
        return malformed_tokens(kind, changed)
    if lie == ANY:
        found = [told for each in LIES if (told := lied(each, answer, earlier, drawn)) is not None]
        return drawn.choice(found) if found else None
    if "output_mode" in answer:  # of token ids, which only lies of their own are told of
        return None
    scored = _is_scored(answer)
    if lie in (_OF_WRITTEN if scored else _OF_SCORED):
        return None
    if lie == "another prompt" and (earlier is None or not _is_alike(answer, earlier)):
        return None
    changed = copy.deepcopy(answer)
    if lie == CUT_AS_LENGTH:
        for choice in changed["choices"]:
            set_text(choice, text_of(choice)[: len(text_of(choice)) // 2])
            choice["finish_reason"] = "length"
    else:
        changed = malformed(lie, changed, other=copy.deepcopy(earlier or {}))
    return changed if changed != answer else None


def _is_scored(answer: Answer) -> bool:
    """True if it has log-probabilities of prompts."""
    return any((choice.get("logprobs") or {}).get("token_logprobs", [0])[:1] == [None] for choice in answer["choices"])


def _is_alike(answer: Answer, earlier: Answer) -> bool:
    return _is_scored(earlier) and len(answer["choices"]) == len(earlier["choices"])
