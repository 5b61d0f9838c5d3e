"""A model as evaluators see it: the endpoint where it answers, or the location of its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from resources.config import Config

GENERATE = "/inference/v1/generate"
"""Path in vLLM that takes token ids and sampling parameters; its server is started with `--enable-scale-out`."""


class Scoring(Config):
    """Properties of an engine that decide if and how texts can be scored from its prefix cache."""

    scores_from_cache: bool = False
    """True if it returns log-probabilities of given tokens, and of those prompt tokens that its cache does not hold."""
    kv_cache_tokens: int | None = None
    """Capacity of its cache in tokens, if the engine reports it."""
    engine: str = ""
    """Digest of the engine's build and arguments."""
    architecture: str = ""
    """Digest of the model's config and the names of its tensors."""
    dtype: str = ""
    """Type that it computes in, such as bfloat16; empty if not reported."""


@dataclass(frozen=True)
class RunningModel:
    """A model that answers at an OpenAI-compatible endpoint now.

    `base_url` ends in `/v1`; `model` is the name for requests; `tokenizer` is a local folder; `capacity` is the number
    of requests that the endpoint works on at once; `prompt_logprobs` is True if it returns log-probabilities of the
    prompt's tokens (`echo` with `logprobs`), which log-likelihood benchmarks need; `direct` is True for an Assay pool,
    which is requested without the network's HTTP proxy; `scoring` is its ability to score from the prefix cache.
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
    """A checkpoint without an endpoint, for evaluators that load the weights themselves.

    `uri` is its folder, in any store; `tokenizer` is a folder with config and tokenizer, if `uri` has none.
    """

    name: str
    uri: str
    kind: Literal["huggingface", "levanter"] = "huggingface"
    tokenizer: str | None = None
