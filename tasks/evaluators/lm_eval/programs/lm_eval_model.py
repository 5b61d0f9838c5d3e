"""The model of `run_lm_eval.py`: its endpoint, and lm-eval's clients with fixes."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

from aiohttp import ClientError, ClientResponseError, ClientSession, ClientTimeout, TCPConnector
from choice_scoring import Choice, NotTakenError, Outcome, Row, Scorer, Trust, weight_of
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.models import api_models
from lm_eval.models.api_models import LMEVAL_MODEL_NONE_ANSWER_PLACEHOLDER as NO_ANSWER
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval_answers import choices_of, generated_tokens, weighed_rows, written
from tenacity import retry, retry_if_not_exception_type, stop_after_attempt, wait_exponential
from valid_answers import MOST_SHOWN, REQUESTS_FAULT, Malformed, parsed, refusal_of

MOST_STOPS = 4  # every endpoint accepts these
NOT_TAKEN = (403, 404, 405, 501)
"""Statuses by which an endpoint rejects a kind of request."""
# Their decorator hides what they are.
_COMPLETIONS: Any = LocalCompletionsAPI
_CONVERSATIONS: Any = LocalChatCompletion
NO_SEED = "none: each answer at a temperature is sampled without a seed"
_log = logging.getLogger("lm_eval.models.api_models")


class EndpointFaultError(Exception):
    """A request without a whole answer from the endpoint in all tries."""


class RefusedError(BaseException):
    """A request that an endpoint rejected, with its message; lm-eval would retry any `Exception`."""


class Checked(_COMPLETIONS):
    """A client that retries until an answer is whole and fits its request."""

    more_requests = 0  # since a long text is scored in windows

    def __init__(self, *, pool: bool, max_length: int, **options: Any) -> None:
        super().__init__(max_length=max_length, **options)
        self.max_length = self.longest_window = max_length
        self.pool = pool
        self.ends: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)  # by benchmark and question

    async def get_batched_requests(
        self, requests: list[Any], cache_keys: list[Any], *, generate: bool = True, **options: Any
    ) -> list[Any]:
        with _endpoint_faults():
            if not generate:
                return await super().get_batched_requests(requests, cache_keys, generate=False, **options)
            # Sorted so that shared prefixes are in the engine's cache when needed; lm-eval sorts by length.
            order = sorted(range(len(requests)), key=lambda place: getattr(requests[place], "prompt", requests[place]))
            ordered = [[several[place] for place in order] for several in (requests, cache_keys)]
            batches = await super().get_batched_requests(*ordered, generate=True, **options)
            answers = dict(zip(order, chain.from_iterable(batches), strict=True))
            return [[answers[place] for place in range(len(requests))]]

    async def amodel_call(
        self,
        session: ClientSession,
        sem: asyncio.Semaphore,
        messages: list[Any],
        *,
        generate: bool = True,
        cache_keys: list[Any] | None = None,
        ctxlens: list[int] | None = None,
        gen_kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> list[Any]:
        assert generate, "only token ids can be weighed"
        options = copy.deepcopy(gen_kwargs or {})
        stops = options.get("until") or []
        payload = self._create_payload(self.create_message(messages), generate=True, gen_kwargs=options)
        answer = await self._post(session, sem, payload)
        prompts = [str(key[0]) for key in cache_keys or []]
        tokens = generated_tokens(answer) if len(prompts) == 1 else None
        return [
            replace(written(choice, prompt=prompt, stops=[stops] if isinstance(stops, str) else stops), tokens=tokens)
            for choice, prompt in zip(choices_of(answer, len(messages)), prompts, strict=True)
        ]

    async def _post(
        self, session: ClientSession, sem: asyncio.Semaphore, payload: dict[str, Any], *, url: str | None = None
    ) -> Any:
        async with sem, session.post(url or self.base_url, json=payload, headers=self.header) as response:
            if response.status in REQUESTS_FAULT:
                raise RefusedError(f"status {response.status}: {refusal_of(await response.text())}")
            if not response.ok:
                body = refusal_of(await response.text())
                _log.warning("Request failed with status %d, and is tried again: %s", response.status, body)
            response.raise_for_status()
            try:
                return parsed(await response.read())[0]
            except ValueError as error:
                raise Malformed("no JSON") from error

    def _create_payload(self, messages: Any, generate: bool = False, gen_kwargs: Any = None, **_: Any) -> Any:
        own_seed = "seed" in (gen_kwargs or {})
        payload = super()._create_payload(messages, generate=generate, gen_kwargs=gen_kwargs)
        if not own_seed:
            del payload["seed"]
        if "stop" in payload:  # an empty stop ends every answer at once, and endpoints reject it
            stops = [stop for stop in payload.pop("stop") if stop]
            payload.update({"stop": stops if self.pool else stops[:MOST_STOPS]} if stops else {})
        return payload

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        for request in requests:
            if (request.repeats or 1) > 1:
                arguments: Any = request.args
                arguments[1].pop("seed", None)
        answers: Any = super().generate_until(requests, disable_tqdm=disable_tqdm)
        for request, answer in zip(requests, answers, strict=True):
            new = {"reasons": [], "tokens": [], "unclosed": False}
            ends = self.ends[str(request.task_name)].setdefault(request.doc_id or 0, new)
            ends["reasons"].append(answer.finish)
            ends["tokens"].append(answer.tokens)
            ends["unclosed"] |= not answer.closed
        return [NO_ANSWER if answer.text is None else answer.text for answer in answers]


class Completions(Checked):
    """Sends token ids to /completions, in the windows of `--model hf`.

    Scores whole texts in parallel, unlike lm-eval's own client, and choices through the engine's prefix cache if
    `scoring` allows it, else by echoes.
    """

    def __init__(self, *, scoring: dict[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self.scoring = scoring
        self.outcome: Outcome | None = None  # None before choices are scored
        self.add_bos_token = None  # the tokenizer's own rule
        self.token_ids = self.pool  # True if the endpoint names tokens by their ids
        self.longest_prompt = self.max_length if self.pool else self.max_length - 1
        # A prompt can omit the last token of a window if a pool is forced to generate it; others may not support that.
        self.longest_window = self.longest_prompt + 1 if self.pool else self.longest_prompt
        self.bos = self.tokenizer.decode(self.prefix_token_id) if self.prefix_token_id is not None else None
        self.adds_bos = _bos_of(self.tokenizer) is not None

    def tok_encode(
        self, string: Any, left_truncate_len: int | None = None, add_special_tokens: bool | None = None, **_: Any
    ) -> Any:
        """Returns token ids of a text, or of several: with a BOS where the tokenizer puts it, but never with two."""
        texts = [string] if isinstance(string, str) else list(string)
        special = [
            not (self.bos and text.startswith(self.bos)) if add_special_tokens is None else add_special_tokens
            for text in texts
        ]
        encoded: list[Any] = [[] for _ in texts]
        for kind in set(special):
            places = [place for place, own in enumerate(special) if own is kind]
            batch = [texts[place] for place in places]
            ids = self.tokenizer(batch, add_special_tokens=kind, return_attention_mask=False).input_ids
            for place, tokens in zip(places, ids, strict=True):
                encoded[place] = tokens[-left_truncate_len:] if left_truncate_len else tokens
        return encoded[0] if isinstance(string, str) else encoded

    def batch_loglikelihood_requests(self, chunks: Iterable[list[Any]]) -> tuple[list[Any], list[int], list[Any]]:
        """Returns windows (cut on the left), starts of continuations in them, and cache keys."""
        requests = list(chain.from_iterable(chunks))
        windows = [(context + continuation)[-self.longest_window :] for _, context, continuation in requests]
        starts = [len(window) - len(request[2]) for window, request in zip(windows, requests, strict=True)]
        return windows, starts, [request[0] for request in requests]

    async def amodel_call(
        self,
        session: ClientSession,
        sem: asyncio.Semaphore,
        messages: list[Any],
        *,
        generate: bool = True,
        ctxlens: list[int] | None = None,
        **options: Any,
    ) -> list[Any]:
        if generate:
            return await super().amodel_call(session, sem, messages, **options)
        return [weight_of(rows) for rows in await self._echoed(session, sem, messages, ctxlens or [])]

    async def _echoed(
        self, session: ClientSession, sem: asyncio.Semaphore, messages: list[Any], starts: list[int]
    ) -> list[list[Row]]:
        rows: list[Any] = [None] * len(messages)
        fitting = [place for place, window in enumerate(messages) if len(window) <= self.longest_prompt]
        forced = [[place] for place in range(len(messages)) if place not in fitting]
        for places in filter(None, [fitting, *forced]):
            windows = [messages[place] for place in places]
            prompts = [window[: self.longest_prompt] for window in windows]
            payload = self._create_payload(prompts)
            if self.token_ids:
                payload["return_tokens_as_token_ids"] = True
            if prompts != windows:
                payload["allowed_token_ids"] = windows[0][-1:]
            answer = await self._post(session, sem, payload)
            for place, choice in zip(places, choices_of(answer, len(places)), strict=True):
                sent = min(len(messages[place]), self.longest_prompt)
                rows[place] = weighed_rows(choice, messages[place], starts[place], sent=sent, read=self._read)
        return rows

    def _read(self, tokens: list[int]) -> Sequence[str]:
        return [self.tokenizer.decode(tokens, skip_special_tokens=skip) for skip in (False, True)]

    def _loglikelihood_tokens(self, requests: Any, **options: Any) -> list[tuple[float, bool]]:
        self.outcome = self.outcome or Outcome()
        if not self.scoring["scores_from_cache"]:
            self.outcome.reason = "the engine does not score from its prefix cache"
        elif requests and (rows := asyncio.run(self._from_cache(requests))) is not None:
            return [weight_of(row) for row in rows]
        if self.outcome.reason:
            _log.warning("Choices are weighed by echoes: %s", self.outcome.reason)
        return super()._loglikelihood_tokens(requests, **options)

    async def _from_cache(self, requests: Sequence[Any]) -> list[Sequence[Row]] | None:
        assert self.outcome is not None
        windows, starts, _ = self.batch_loglikelihood_requests([list(requests)])
        if min(starts) < 1:
            self.outcome.reason = "a choice has nothing in front of it"
            return None
        places = zip(windows, starts, strict=True)
        choices = [Choice(tuple(window[:start]), tuple(window[start:])) for window, start in places]
        sem = asyncio.Semaphore(self._concurrent)
        again: Callable[..., Any] = retry(
            stop=stop_after_attempt(self.max_retries),
            wait=wait_exponential(multiplier=0.5, min=1, max=10),
            retry=retry_if_not_exception_type(NotTakenError),
            reraise=True,
        )
        bar = api_models.tqdm_asyncio(total=len(choices), unit_scale=1)
        connector = TCPConnector(limit=self._concurrent, ssl=self.verify_certificate)
        async with ClientSession(connector=connector, timeout=ClientTimeout(total=self.timeout)) as session:

            async def ask(path: str, body: dict[str, Any], read: Callable[[Any], Any]) -> Any:
                try:
                    url = self.base_url.removesuffix("/v1/completions") + path
                    return read(await self._post(session, sem, body, url=url))
                except RefusedError as error:
                    raise NotTakenError(f"{error} for {path}") from error
                except ClientResponseError as error:
                    if error.status not in NOT_TAKEN:
                        raise
                    raise NotTakenError(f"status {error.status} for {path}") from error

            async def echo(together: Sequence[Choice]) -> Sequence[Sequence[Row]]:
                windows = [[*choice.context, *choice.continuation] for choice in together]
                return await again(self._echoed)(session, sem, windows, [len(choice.context) for choice in together])

            scorer = Scorer(
                model=self.model,
                ask=again(ask),
                echo=echo,
                most_requests=self._concurrent,
                kv_cache_tokens=self.scoring["kv_cache_tokens"],
                trust=Trust.of(self.scoring),
                longest_prompt=self.longest_prompt,
                echoed_at_once=self._batch_size,
                on_weighed=bar.update,
                outcome=self.outcome,
            )
            with _endpoint_faults(), bar:
                return await scorer.weigh(choices)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows = [self._windows(request.args[0]) for request in requests]
        flat = [(None, *window) for text in windows for window in text]
        self.more_requests = len(flat) - len(requests)
        weighed = iter(super()._loglikelihood_tokens(flat, disable_tqdm=True) if flat else [])
        return [sum(next(weighed)[0] for _ in text) for text in windows]

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        rolling = utils.get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.longest_window - 1,
            context_len=1,
        )
        return [utils.make_disjoint_window(window) for window in rolling]


class Conversations(Checked, _CONVERSATIONS):
    """Sends messages to /chat/completions; honours every stop string; a missing answer is not an empty answer."""


@contextmanager
def _endpoint_faults() -> Iterator[None]:
    try:
        yield
    except ClientResponseError as error:
        raise EndpointFaultError(f"status {error.status}") from error
    except (ClientError, Malformed, OSError) as error:  # a time-out is an OSError
        raise EndpointFaultError(f"{type(error).__name__}: {error}"[:MOST_SHOWN]) from error


def _bos_of(tokenizer: Any) -> str | None:
    bos = tokenizer.bos_token_id
    return tokenizer.bos_token if bos is not None and tokenizer("a").input_ids[:1] == [bos] else None


def way_of_asking(job: dict[str, Any], model: Any, tokenizer: Any) -> dict[str, Any]:
    """Returns the request settings for records, as far as this program decides them."""
    asking: dict[str, Any] = {"seeds": {"generation": NO_SEED}, "notes": []}
    if job["conversations"]:
        return {**asking, "bos": "the endpoint's own, with its chat template"}
    own = _bos_of(tokenizer)
    asking["bos"] = f"the tokenizer's own rule: {own or 'none'}"
    if short := model.max_length + 1 - model.longest_window:
        asking["notes"].append(
            f"Windows of long texts are {short} tokens shorter than those of --model hf: the endpoint holds no more."
        )
    if not job["apply_chat_template"]:
        return asking
    asking["chat_template"] = hashlib.sha256(str(model.chat_template(True)).encode()).hexdigest()
    rendered = model.apply_chat_template([{"role": "user", "content": "a"}])
    brought = model.bos if model.bos and rendered.startswith(model.bos) else None
    if brought:
        asking["bos"] = f"the chat template's own: {brought}"
    if brought != own:
        asking["notes"].append(
            f"The chat template begins with {brought or 'no BOS'}, where the tokenizer puts {own or 'none'} in front; "
            f"prompts begin with {brought or own}, as in --model hf."
        )
    return asking
