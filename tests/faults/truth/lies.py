"""Lies of an endpoint: malformed answers, and cut texts that cannot be detected."""

from __future__ import annotations

import copy
import random
from typing import Any

from fakes.malformed import OF_TOKENS, malformed, malformed_tokens, set_text, text_of

Answer = dict[str, Any]
CUT_AS_LENGTH = "cut as length"
"""Returns half of each text, as if it had reached its length limit: undetectable."""
ANY = "any"
"""Any applicable lie of those below, drawn for each answer."""
LIES = {
    "too few rows": "the last row of log-probabilities is not there",
    "too many rows": "the last row is there twice",
    "only the last row": "the generated token alone has a row",
    "positive": "log-probabilities without their sign",
    "all zero": "every log-probability is 0",
    "null": "every log-probability is null",
    "not a number": "every log-probability is NaN",
    "infinite": "every log-probability is -inf",
    "no log-probabilities": "none, though they were asked for",
    "another prompt": "log-probabilities of other prompts",
    "indices swapped": "the choices' indices in reverse",
    "indices repeated": "all choices have the same index",
    "a choice too few": "a choice fewer than prompts",
    "too many": "a choice more than prompts",
    "no choices": "an empty list of choices",
    "no text": "null for each text",
    "aborted": "texts that were cut, with the end `abort`",
    "unknown finish": "an unknown reason for the end",
    "no finish": "no reason for the end",
}
"""Detectable lies, with their descriptions."""
_OF_SCORED = {*list(LIES)[:11]}
"""Lies about echoed prompts alone, since a generated text does not show its prompt."""
_ALWAYS = (
    "no rows",
    "empty rows",
    "no tokens",
    "token too few",
    "cut off",
    "choice too many",
    "prompt of another length",
)
"""Kinds of malformed answers of token ids that need no token log-probs of the prompt."""
_OF_WRITTEN = {"no text", "aborted", "unknown finish", "no finish", CUT_AS_LENGTH}


def lied(lie: str, answer: Answer, earlier: Answer | None, drawn: random.Random) -> Answer | None:
    """Returns the changed answer; None if the lie does not apply to it, or changes nothing.

    Args:
        answer: a whole, right answer; not modified.
        earlier: an answer to other prompts.
        drawn: chooses among several possible changes.
    """
    if lie == ANY and "output_mode" in answer:
        changed = copy.deepcopy(answer)
        kind = drawn.choice([name for name in OF_TOKENS if len(answer["prompt_logprobs"] or ()) > 2 or name in _ALWAYS])
        return malformed_tokens(kind, changed)
    if lie == ANY:
        possible = [told for each in LIES if (told := lied(each, answer, earlier, drawn)) is not None]
        return drawn.choice(possible) if possible else None
    if "output_mode" in answer:  # answers of token ids have only lies of their own
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
    return any((choice.get("logprobs") or {}).get("token_logprobs", [0])[:1] == [None] for choice in answer["choices"])


def _is_alike(answer: Answer, earlier: Answer) -> bool:
    return _is_scored(earlier) and len(answer["choices"]) == len(earlier["choices"])
