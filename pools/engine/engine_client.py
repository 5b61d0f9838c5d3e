"""Client of an engine server: checks its model, reads its abilities, and loads other weights into it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx

from pools.engine.reload_trust import Reading
from resources.errors import EndpointUnusable, ModelUnusable, ReloadUnavailable, SwapRefused
from resources.jobs.addresses import is_loopback

CANARY_PROMPTS = (
    "The quick brown fox jumps over the lazy dog.",
    "def add(a, b):\n    return a + b\n",
    "1, 2, 3, 5, 8, 13, 21, 34",
)
"""Test prompts; their log-probabilities distinguish different weights."""

_ANSWER_SECONDS = 60.0
_REACHABLE_SECONDS = 5.0
_NOT_FINITE = "Out of range float values"  # vLLM answers 400 with this, since JSON has no NaN
_RELOAD_SECONDS = 900.0
_SHOWN_NAMES = 5
_SHOWN_CHARACTERS = 300
_METHOD_FAILED = "collective_rpc method failed: "  # vLLM puts this in front of the error of a worker
_NO_SUCH_CALL = ("404 ", "405 ", "501 ")


@dataclass(frozen=True)
class EngineClient:
    """Client of a server at `base_url` (without `/v1`); methods take the model's name.

    Ignores the network's HTTP proxy on this machine, and for an Assay pool elsewhere (`direct`).
    """

    base_url: str
    api_key: str = field(default="none", repr=False)
    direct: bool = False

    def _http(self) -> httpx.Client:
        return _client(direct=self.direct or is_loopback(urlsplit(self.base_url).hostname or ""))

    def healthy(self, timeout_seconds: float = 5.0) -> bool:
        """Returns True if the port answers in that time; does not check the model."""
        answer = self._get("/health", timeout=timeout_seconds)
        return answer is not None and answer.status_code == 200

    def asks_for_key(self) -> bool:
        """Returns True if the server refuses a request without its key; False for another program that got its port."""
        answer = self._get("/v1/models", keyed=False)
        return answer is not None and answer.status_code == 401

    def max_model_len(self, model: str) -> int | None:
        """Returns the maximum of prompt plus answer in tokens, if the server reports it."""
        listed = self._request("GET", "/v1/models").get("data") or []
        lengths = {entry.get("id"): entry.get("max_model_len") for entry in listed}
        return lengths.get(model) or min((length for length in lengths.values() if length), default=None)

    def version(self) -> str | None:
        try:
            version = self._request("GET", "/version").get("version")
        except EndpointUnusable:
            return None
        return str(version) if version else None

    def model_names(self) -> list[str]:
        return [str(entry.get("id")) for entry in self._request("GET", "/v1/models").get("data") or []]

    def check_reachable(self) -> None:
        """Raises EndpointUnusable if nothing accepts connections any more; a busy server passes."""
        try:
            self._request("GET", "/v1/models", timeout=_REACHABLE_SECONDS)
        except EndpointUnusable as error:
            if isinstance(error.__cause__, httpx.ConnectError):
                raise

    def prove_it_answers(self, model: str) -> None:
        self._logprobs(model, CANARY_PROMPTS[:1], echo=False)

    def require_written(self, model: str) -> None:
        """Raises ModelUnusable if the engine reports that its start left parameters unwritten in memory."""
        left: dict[str, str] = {}
        with suppress(SwapRefused):
            left = {name: numbers for part in self._of_workers("assay_unwritten") for name, numbers in part.items()}
        if left:
            named = [f"{name} ({numbers} numbers)" for name, numbers in sorted(left.items())[:_SHOWN_NAMES]]
            raise ModelUnusable(
                expected=f"the weights of {model} to hold each parameter of its architecture",
                found=f"{len(left)} that nothing wrote: {', '.join(named)}",
                remedy="write the missing tensors under the names of this architecture, or correct config.json",
            )

    def answers_in_chat(self, model: str) -> bool:
        """Returns True if chat completions are answered; some endpoints accept nothing else."""
        messages = [{"role": "user", "content": CANARY_PROMPTS[0]}]
        try:
            answer = self._request(
                "POST", "/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 1}
            )
        except EndpointUnusable:
            return False
        return bool(answer.get("choices"))

    def has_prompt_logprobs(self, model: str) -> bool:
        """Returns True if `echo` with `logprobs` gives finite log-probabilities for the prompt's own tokens.

        Engines without them would silently let log-likelihood benchmarks score at chance.
        """
        try:
            values = self._logprobs(model, CANARY_PROMPTS[:1], echo=True)
        except (EndpointUnusable, ModelUnusable):
            return False
        return len(values) > 2

    def canary(self, model: str, *, prompt_logprobs: bool) -> tuple[float, ...]:
        """Returns log-probabilities of fixed prompts, or of the tokens behind them if the engine has only those."""
        return self._logprobs(model, CANARY_PROMPTS, echo=prompt_logprobs)

    def ask(self, path: str, body: Any) -> dict[str, Any]:
        return self._request("POST", path, body)

    def metrics(self) -> str:
        answer = self._get("/metrics")
        return answer.text if answer is not None and answer.status_code == 200 else ""

    def _get(self, path: str, *, timeout: float = _REACHABLE_SECONDS, keyed: bool = True) -> httpx.Response | None:
        try:
            return self._http().get(f"{self.base_url}{path}", timeout=timeout, headers=self._key if keyed else None)
        except httpx.HTTPError:
            return None

    def _logprobs(self, model: str, prompts: Sequence[str], *, echo: bool) -> tuple[float, ...]:
        body = {"model": model, "prompt": list(prompts), "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": echo}
        try:
            answer = self._request("POST", "/v1/completions", body)
        except EndpointUnusable as error:
            if _NOT_FINITE not in error.found:
                raise
            raise _no_finite_numbers(model, self.base_url, "NaN or infinity where log-probabilities belong") from error
        values: list[float] = []
        for choice in answer.get("choices") or []:
            # The first token of a text has no context, hence no log-probability.
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
            values.extend(logprobs[1:] if echo else logprobs)
        if not values or not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
            raise _no_finite_numbers(model, self.base_url, f"log-probabilities {values[:4]}")
        return tuple(float(value) for value in values)

    def reload_weights(self, folders: Sequence[str], *, version: str, ranks: int | None = None) -> None:
        """Loads other weights, with nothing in flight meanwhile. The shapes must be the same, or the engine dies.

        Needs a folder for each of the engine's hosts, in their order. `version` is the name of the weights, see
        `name_weights`; `ranks` must load them, if given.

        Raises:
            ReloadUnavailable: the engine has no such call.
            SwapRefused: it failed; the weights are in doubt.
        """
        self._change("/pause?mode=wait")
        done = self._change("/collective_rpc", {"method": "assay_reload", "kwargs": {"folders": list(folders)}})
        if ranks is not None and (loaded := len(done.get("results") or ())) != ranks:
            raise SwapRefused(
                expected=f"{ranks} ranks of the engine to load the weights",
                found=f"an answer of {loaded}",
                remedy="restart the engine",
            )
        self._change("/reset_prefix_cache")
        self.name_weights(version)
        self._change("/resume", None)

    def name_weights(self, version: str) -> None:
        with suppress(ReloadUnavailable):
            self._change("/update_weight_version", {"new_version": version})

    def weights_name(self) -> str | None:
        try:
            return self._request("GET", "/weight_info").get("weight_version")
        except EndpointUnusable as error:
            if error.found.startswith(_NO_SUCH_CALL):
                return None
            raise

    def weights_in_memory(self) -> dict[str, str]:
        """Returns digests of all tensors that the engine computes with, by name; takes up to a second per gigabyte."""
        digests = self._of_workers("assay_weights")
        return {f"{rank}.{name}": value for rank, part in enumerate(digests) for name, value in part.items()}

    def reading(self, canary: Sequence[float], *, weights: bool = False) -> Reading:
        shown = self._of_workers("assay_output_layer")
        return Reading(
            dtype="/".join(sorted({str(part.get("dtype")) for part in shown})),
            canary=tuple(canary),
            output_layer=tuple(value for part in shown for value in part.get("log_probabilities", ())),
            weights=self.weights_in_memory() if weights else {},
        )

    def _of_workers(self, method: str) -> list[dict[str, Any]]:
        results = self._change("/collective_rpc", {"method": method}).get("results")
        return [part for part in results or [] if isinstance(part, dict)]

    def _change(self, path: str, body: Any = None) -> dict[str, Any]:
        try:
            return self._request("POST", path, body, timeout=_RELOAD_SECONDS)
        except EndpointUnusable as error:
            kind = ReloadUnavailable if error.found.startswith(_NO_SUCH_CALL) else SwapRefused
            words = error.found.rpartition(_METHOD_FAILED)[2]
            raise kind(expected=f"the engine to take POST {path}", found=words, remedy="restart the engine") from error

    @property
    def _key(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}

    def _request(self, method: str, path: str, body: Any = None, *, timeout: float = _ANSWER_SECONDS) -> dict[str, Any]:
        try:
            response = self._http().request(
                method, f"{self.base_url}{path}", json=body, timeout=timeout, headers=self._key
            )
            if response.status_code != 200:
                raise EndpointUnusable(
                    expected=f"200 from {method} {self.base_url}{path}",
                    found=f"{response.status_code} {_words(response)}",
                    remedy="look at the server's log",
                )
            content = response.json() if response.content else {}
        except (httpx.HTTPError, ValueError) as error:
            raise EndpointUnusable(
                expected=f"an answer from {method} {self.base_url}{path}",
                found=f"{type(error).__name__}: {error}",
                remedy="check that the server is up and speaks the OpenAI protocol",
            ) from error
        return content if isinstance(content, dict) else {}


def _words(response: httpx.Response) -> str:
    try:
        content = response.json()
        error = content.get("error", content)
        return str(error if isinstance(error, str) else error.get("message") or error["detail"])[:_SHOWN_CHARACTERS]
    except (ValueError, AttributeError, LookupError):  # another format
        return response.text[:_SHOWN_CHARACTERS]


@cache
def _client(*, direct: bool) -> httpx.Client:
    limits = httpx.Limits(keepalive_expiry=2.0)
    # With its own transport httpx ignores the proxies in the environment.
    return httpx.Client(transport=httpx.HTTPTransport(limits=limits)) if direct else httpx.Client(limits=limits)


def _no_finite_numbers(model: str, base_url: str, problem: str) -> ModelUnusable:
    return ModelUnusable(
        expected=f"finite log-probabilities from {model} at {base_url}",
        found=problem,
        remedy="check that the weights hold no NaN or infinity (a training run that diverged), "
        "and that the server supports logprobs",
    )
