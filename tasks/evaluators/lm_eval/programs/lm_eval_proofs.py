"""Proves for `run_lm_eval.py` that an external endpoint uses the same tokenizer."""

from __future__ import annotations

import json
import logging
import os
import urllib.error
import urllib.request
from typing import Any

from lm_eval_answers import TOKEN_ID
from lm_eval_model import Completions
from refusals import Refused

PROBE = (
    "The quick brown fox jumps over 13 lazy dogs, 3.14159 times; def mean(xs): return sum(xs) / len(xs)\n\n"
    "\tnaïve café, Straße, Привет мир, 東京は晴れ, مرحبا, 🙂🙃 ~~~ https://example.org/?q=a+b&c=%20d FLOCCINAUCINIHIL"
)
"""Words, numbers, code and scripts, of which two tokenizers hardly ever make the same number of tokens."""
_log = logging.getLogger("lm_eval")


def prove_tokenizer(job: dict[str, Any], model: Completions) -> None:
    """Refuses a tokenizer that is not the endpoint's, by three requests with a token per answer.

    The endpoint must count as many tokens in a text as we do, with or without a BOS, must take its token ids, also
    those of a templated prompt, and must report the same tokens for both, if it reports tokens. Without an answer,
    nothing is concluded. The last request detects if it names tokens by ids, which proves that answers belong to their
    requests.
    """
    tokenizer = model.tokenizer
    forms = [tokenizer(PROBE, add_special_tokens=special).input_ids for special in (False, True)]
    asked = PROBE
    if job["apply_chat_template"]:
        asked = model.apply_chat_template([{"role": "user", "content": PROBE}])
    prompt = model.tok_encode(asked)
    if max(map(len, (prompt, *forms))) >= model.max_length:
        return
    options = {"echo": True, "logprobs": 1} if job["prompt_logprobs"] else {}
    as_text = _asked(model, PROBE, options)
    expected = f"the tokenizer in {job['model_args']['tokenizer']} to be that of {model.model} at {model.base_url}"
    remedy = "Set model_path to the checkpoint that the endpoint serves, or serve this checkpoint"
    counted = (as_text.get("usage") or {}).get("prompt_tokens", len(forms[0]))
    same = next((form for form in forms if len(form) == counted), None)
    if same is None:
        counts = " or ".join(str(count) for count in sorted({len(form) for form in forms}))
        problem = f"{counted} tokens there in a text that has {counts} here"
        raise Refused(
            expected=expected,
            found=problem,
            remedy=remedy,
        )
    as_ids = _asked(model, [same, prompt], options)
    if "refused" in as_ids:
        problem = f"token ids refused there: {as_ids['refused']}"
        raise Refused(
            expected=expected,
            found=problem,
            remedy=remedy,
        )
    read, meant = _tokens(as_ids)[: len(same)], _tokens(as_text)[: len(same)]
    if read and meant and read != meant:
        place = next(place for place, pair in enumerate(zip(read, meant, strict=False)) if pair[0] != pair[1])
        problem = f"token {same[place]} is read there as {read[place]!r}, where the text has {meant[place]!r}"
        raise Refused(
            expected=expected,
            found=problem,
            remedy=remedy,
        )
    if options:
        named = _tokens(_asked(model, [same], {**options, "return_tokens_as_token_ids": True}))
        model.token_ids = bool(named) and all(token.startswith(TOKEN_ID) for token in named)


def _tokens(answer: dict[str, Any]) -> list[str]:
    return _rows(answer).get("tokens") or []


def _rows(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices") or [{}]
    return min(choices, key=lambda choice: choice.get("index", 0)).get("logprobs") or {}


def _asked(model: Completions, prompt: Any, options: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps({"model": model.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **options}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"}
    try:
        request = urllib.request.Request(model.base_url, data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=model.timeout) as response:
            answer = json.loads(response.read())
            return answer if isinstance(answer, dict) else {}
    except urllib.error.HTTPError as error:
        message = error.read().decode(errors="replace")[:300]
        _log.warning("a prompt was refused with status %d", error.code)
        return {"refused": f"{error.code} {message}"} if error.code in (400, 422) else {}
    except (OSError, ValueError) as error:
        _log.warning("a prompt was not answered: %s", error)
        return {}
