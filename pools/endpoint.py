"""All that an evaluator gets to know about a model: where it answers, or where its files lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from resources.config import Config

GENERATE = "/inference/v1/generate"
"""Path of vLLM that takes token ids and sampling parameters whole; its server is started with `--enable-scale-out`."""


class Scoring(Config):
    """Abilities and circumstances of an engine that scoring texts from its prefix cache depends on."""

    scores_from_cache: bool = False
    """True if it gives log-probabilities of named tokens, and of a prompt's rows that its cache does not hold."""
    kv_cache_tokens: int | None = None
    """Tokens that its cache holds, where it tells."""
    engine: str = ""
    """Digest of its build and arguments."""
    architecture: str = ""
    """Digest of the model's config and the names of its tensors."""
    dtype: str = ""
    """Type that it computes in, such as bfloat16; empty where it does not tell."""


@dataclass(frozen=True)
class RunningModel:
    """A model that answers at an OpenAI-compatible endpoint now.

    `base_url` ends in `/v1`; `model` is the name to put into requests; `tokenizer` a local folder that holds it;
    `capacity` how many requests the endpoint works on at once; `prompt_logprobs` whether it returns
    log-probabilities of the prompt's tokens (`echo` with `logprobs`), which log-likelihood benchmarks need; `direct`
    whether it is a pool of ours, which is asked past any HTTP proxy of the network; `scoring` says whether they can be
    had for less.
    """

    base_url: str
    model: str
    tokenizer: str
    capacity: int
    prompt_logprobs: bool
    request_timeout_seconds: float
    apply_chat_template: bool = False
    max_model_len: int | None = None
    api_key: str = field(default="none", repr=False)
    direct: bool = False
    scoring: Scoring = field(default_factory=Scoring)


@dataclass(frozen=True)
class LocalCheckpoint:
    """A model that nobody serves, for evaluators that load the weights themselves.

    `uri` is its folder, in any store; `tokenizer` a folder with config and tokenizer, where it holds none itself.
    """

    name: str
    uri: str
    kind: Literal["huggingface", "levanter"] = "huggingface"
    tokenizer: str | None = None
