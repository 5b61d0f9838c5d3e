"""The tokenizer of the model in `run_lm_eval.py`, the arguments that depend on it, and its proof.

An external endpoint must prove that it uses the same tokenizer.
"""

from __future__ import annotations

import json
import logging
import os
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from choice_scoring import TOKEN_ID
from lm_eval.models.utils import resolve_max_length
from lm_eval_model import Completions
from model_shape import shape_of
from refusals import Refused, no_chat_template
from tokenizer_reading import read_tokenizer

DEFAULT_GENERATED = 256
_log = logging.getLogger("lm_eval.models.api_models")


def load_tokenizer(job: dict[str, Any]) -> Any:
    """Returns the checkpoint's tokenizer; refuses if it is missing or damaged, or lacks a template that is needed."""
    folder = job["model_args"]["tokenizer"]
    tokenizer = read_tokenizer(folder, trusted=job["model_args"]["trust_remote_code"])
    if job["apply_chat_template"] and not job["conversations"] and not tokenizer.chat_template:
        raise no_chat_template(folder)
    return tokenizer


def complete_model_args(job: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Returns model arguments with the lengths that the tokenizer and the model allow."""
    held = job["max_model_len"] or _context_of(Path(job["model_args"]["tokenizer"]), tokenizer)
    # As in `--model hf`: tokens read at once; our engines also hold the token that they generate.
    max_length = held - 1 if job["pool"] else held
    given = job["model_args"]
    if job["conversations"]:
        given = {key: value for key, value in given.items() if not key.startswith("token")}
    max_gen_toks = min(job["max_gen_toks"] or DEFAULT_GENERATED, max_length // 2)
    return {**given, "max_length": max_length, "max_gen_toks": max_gen_toks}


def _context_of(checkpoint: Path, tokenizer: Any) -> int:
    try:
        shape: Any = SimpleNamespace(**shape_of(checkpoint))
        return resolve_max_length(shape, tokenizer)
    except (OSError, ValueError, AttributeError, TypeError):
        return resolve_max_length(None, tokenizer)


PROBE = (
    "The quick brown fox jumps over 13 lazy dogs, 3.14159 times; def mean(xs): return sum(xs) / len(xs)\n\n"
    "\tnaïve café, Straße, Привет мир, 東京は晴れ, مرحبا, 🙂🙃 ~~~ https://example.org/?q=a+b&c=%20d FLOCCINAUCINIHIL"
)
"""Words, numbers, code and scripts, of which two tokenizers hardly ever make the same number of tokens."""


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

    def other(problem: str) -> Refused:
        expected = f"the tokenizer in {job['model_args']['tokenizer']} to be that of {model.model} at {model.base_url}"
        return Refused(expected, problem, "Set model_path to the checkpoint that the endpoint serves, or serve this")

    counted = (as_text.get("usage") or {}).get("prompt_tokens", len(forms[0]))
    same = next((form for form in forms if len(form) == counted), None)
    if same is None:
        counts = " or ".join(str(count) for count in sorted({len(form) for form in forms}))
        raise other(f"{counted} tokens there in a text that has {counts} here")
    as_ids = _asked(model, [same, prompt], options)
    if "refused" in as_ids:
        raise other(f"token ids refused there: {as_ids['refused']}")
    read, meant = _tokens(as_ids)[: len(same)], _tokens(as_text)[: len(same)]
    if read and meant and read != meant:
        place = next(place for place, pair in enumerate(zip(read, meant, strict=False)) if pair[0] != pair[1])
        raise other(f"token {same[place]} is read there as {read[place]!r}, where the text has {meant[place]!r}")
    if options:
        named = _tokens(_asked(model, [same], {**options, "return_tokens_as_token_ids": True}))
        model.token_ids = bool(named) and all(token.startswith(TOKEN_ID) for token in named)


def _tokens(answer: dict[str, Any]) -> list[str]:
    first = min(answer.get("choices") or [{}], key=lambda choice: choice.get("index", 0))
    return (first.get("logprobs") or {}).get("tokens") or []


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
