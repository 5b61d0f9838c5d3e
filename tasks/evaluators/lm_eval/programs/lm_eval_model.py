"""The model that `run_lm_eval.py` asks: its tokenizer, its endpoint, and lm-eval's clients, mended."""

from __future__ import annotations

import json
import logging
import os
import urllib.error
import urllib.request
from operator import itemgetter
from pathlib import Path
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval_refusal import refuse

DEFAULT_CONTEXT = 2048
DEFAULT_GENERATED = 256
MOST_STOPS = 4  # what /chat/completions takes everywhere; lm-eval drops the others without a word
PROBE = (
    "The quick brown fox jumps over 13 lazy dogs, 3.14159 times; def mean(xs): return sum(xs) / len(xs)\n\n"
    "\tnaïve café, Straße, Привет мир, 東京は晴れ, مرحبا, 🙂🙃 ~~~ https://example.org/?q=a+b&c=%20d FLOCCINAUCINIHIL"
)
"""Words, numbers, code and scripts, of which two tokenizers hardly ever make the same number of tokens."""
_log = logging.getLogger("lm_eval")


def load_tokenizer(job: dict[str, Any], output: Path) -> Any:
    """The tokenizer of the checkpoint; refuses one that is missing, damaged, or has no template where one is needed."""
    from transformers import AutoTokenizer

    folder = job["model_args"]["tokenizer"]
    try:
        if not Path(folder).is_dir():  # else its name would be looked for on the hub
            raise FileNotFoundError(f"no folder {folder}")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer("a")
    except Exception as error:  # noqa: BLE001 - what damaged files lead to has no common type
        _log.error("the tokenizer cannot be loaded", exc_info=error)
        refuse(
            output,
            kind="BadInput",
            expected=f"a tokenizer that loads in {folder}",
            found=f"{type(error).__name__}: {error}"[:1000],
            remedy="Put the tokenizer's files of the training run into the checkpoint, whole",
        )
    if job["apply_chat_template"] and not job["conversations"] and not tokenizer.chat_template:
        refuse(
            output,
            kind="BadInput",
            expected="a tokenizer with a chat template, since apply_chat_template is set",
            found=f"none in {folder}",
            remedy="Add one to the checkpoint, or set apply_chat_template to false",
        )
    return tokenizer


def complete_model_args(job: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Adds what depends on the tokenizer and on how much the model holds."""
    folder = Path(job["model_args"]["tokenizer"])
    max_length = job["max_model_len"] or context_of(folder)
    max_gen_toks = min(job["max_gen_toks"] or DEFAULT_GENERATED, max_length // 2)
    if job["conversations"]:
        given = {key: value for key, value in job["model_args"].items() if not key.startswith("token")}
        return {**given, "max_length": max_length, "max_gen_toks": max_gen_toks}
    # As the model was trained, and as engines and the transformers library do it; a chat template brings its own.
    starts_with_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    return {
        **job["model_args"],
        "add_bos_token": starts_with_bos and not job["apply_chat_template"],
        "max_length": max_length,
        "max_gen_toks": max_gen_toks,
    }


def context_of(checkpoint: Path) -> int:
    """Tokens the model holds, by its own configuration; lm-eval's default where there is none."""
    try:
        return int(json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return DEFAULT_CONTEXT


class Completions(LocalCompletionsAPI):
    """Token ids to /completions. Whole texts are weighed side by side; lm-eval's own client takes one at a time."""

    more_requests = 0
    """Requests beyond one for each text, since a long text is weighed in windows."""

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text, in the windows that lm-eval cuts it into."""
        windows = [self._windows(request.args[0]) for request in requests]
        flat = [(None, *window) for text in windows for window in text]
        self.more_requests = len(flat) - len(requests)
        weighed = iter(self._loglikelihood_tokens(flat, disable_tqdm=True) if flat else [])
        return [sum(next(weighed)[0] for _ in text) for text in windows]

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        rolling = utils.get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length - 1,
            context_len=1,
        )
        return [utils.make_disjoint_window(window) for window in rolling]


class Conversations(LocalChatCompletion):
    """Messages to /chat/completions, with every stop string honoured, and no answer taken for an empty one."""

    more_requests = 0

    def parse_generations(self, outputs: Any, **_: Any) -> list[str | None]:
        """Texts in the order asked; None, for which lm-eval puts its marker, where there is no text."""
        answers = outputs if isinstance(outputs, list) else [outputs]
        return [
            choice["message"]["content"]
            for answer in answers
            for choice in sorted(answer["choices"], key=itemgetter("index"))
        ]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, cut at the first of all stop strings: an endpoint is told of four."""
        answers = super().generate_until(requests, disable_tqdm=disable_tqdm)
        return [cut(answer, request.args[1].get("until")) for answer, request in zip(answers, requests, strict=True)]


def cut(answer: str, stops: str | list[str] | None) -> str:
    """A text up to the first stop string in it."""
    wanted = [stops] if isinstance(stops, str) else list(stops or [])
    if len(wanted) <= MOST_STOPS:
        return answer
    places = [place for stop in wanted if stop and (place := answer.find(stop)) >= 0]
    return answer[: min(places)] if places else answer


def prove_tokenizer(job: dict[str, Any], model: Completions, output: Path) -> None:
    """Refuses a tokenizer that is not the endpoint's: two requests of one token a prompt.

    A text goes there as text, then as our token ids. The endpoint must count as many tokens in it as we do, with or
    without a BOS, must take the ids, also those of a prompt as it will be asked, and must read the same tokens out of
    text and ids, where it says how it reads them. Where it does not answer now, nothing is concluded.
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
    remedy = "Set model_path to the checkpoint that the endpoint serves, or serve this one"
    counted = (as_text.get("usage") or {}).get("prompt_tokens", len(forms[0]))
    same = next((form for form in forms if len(form) == counted), None)
    if same is None:
        counts = " or ".join(str(count) for count in sorted({len(form) for form in forms}))
        found = f"{counted} tokens there in a text that has {counts} here"
        refuse(output, kind="BadInput", expected=expected, found=found, remedy=remedy)
    as_ids = _asked(model, [same, prompt], options)
    if "refused" in as_ids:
        found = f"token ids refused there: {as_ids['refused']}"
        refuse(output, kind="BadInput", expected=expected, found=found, remedy=remedy)
    read, meant = _tokens(as_ids)[: len(same)], _tokens(as_text)[: len(same)]
    if read and meant and read != meant:
        place = next(place for place, pair in enumerate(zip(read, meant, strict=False)) if pair[0] != pair[1])
        found = f"token {same[place]} is read there as {read[place]!r}, where the text has {meant[place]!r}"
        refuse(output, kind="BadInput", expected=expected, found=found, remedy=remedy)


def _tokens(answer: dict[str, Any]) -> list[str]:
    """Those of the first prompt, as the endpoint writes them; none where it does not."""
    choices = answer.get("choices") or [{}]
    first = min(choices, key=lambda choice: choice.get("index", 0))
    return (first.get("logprobs") or {}).get("tokens") or []


def _asked(model: Completions, prompt: Any, options: dict[str, Any]) -> dict[str, Any]:
    """An answer; `refused` says why a prompt was not taken, and empty is one that did not come."""
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
