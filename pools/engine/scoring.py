"""Checks if an engine scores texts from its prefix cache correctly, and on which settings that depends.

vLLM reads no cache for a prompt with requested log-probabilities, unless `skip_reading_prefix_cache` is false. Then it
returns the token log-probs that it computed: those of cached tokens are omitted at the beginning, by one of vLLM's
model runners itself, in the other by `programs/reloading_worker.py`. So entries are indexed from the prompt's end.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pools.endpoint import GENERATE, Scoring
from pools.engine.engine_client import CANARY_PROMPTS, EngineClient
from pools.engine.launch import ServedCheckpoint
from pools.engine.reload_trust import ROUNDING_NATS
from pools.journal.terms import ROUNDING
from resources.errors import EndpointUnusable, ModelUnusable, ReloadUnavailable, SwapRefused

LONGEST = 300
"""Tokens of the test text: more than two blocks of the cache, of 128 tokens at most as a rule."""
_BEYOND_BLOCKS = 44  # for longer blocks: 528 to 2,048 tokens for models with a state
_BLOCKS = ("block_size", "effective_attention_block_size")
_CACHE = re.compile(r"^vllm:cache_config_info\{(?P<labels>.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def scoring_of(engine: EngineClient, checkpoint: ServedCheckpoint, *, longest: int | None) -> Scoring:
    """Returns the scoring ability that an engine has proved; `longest` limits prompt plus answer in tokens."""
    dtype = ""
    with suppress(ReloadUnavailable, SwapRefused):
        dtype = engine.reading(()).dtype
    caches = [dict(_LABEL.findall(line["labels"])) for line in _CACHE.finditer(engine.metrics())]
    blocks = [int(labels[name]) for labels in caches for name in _BLOCKS if labels.get(name, "").isdecimal()]
    asked = max(LONGEST, 2 * max(blocks, default=0) + _BEYOND_BLOCKS)
    return Scoring(
        scores_from_cache=_scores_from_cache(
            engine, checkpoint.name, most=min((longest or LONGEST) - 1, asked), dtype=dtype
        ),
        kv_cache_tokens=_cache_tokens(caches),
        architecture=hashlib.sha256("\n".join(checkpoint.architecture).encode()).hexdigest()[:24],
        dtype=dtype,
    )


def row_of(rows: Sequence[Any], token: int, *, from_end: int) -> float | None:
    """Returns the log-probability of a prompt's token in `prompt_logprobs`; None if the engine did not compute it.

    `from_end` is the token's position from the prompt's end; 1 for the last token.
    """
    row = rows[-from_end] if from_end <= len(rows) else None
    entry = row.get(str(token)) if isinstance(row, dict) else None
    value = entry.get("logprob") if isinstance(entry, dict) else None
    return value if isinstance(value, (int, float)) and value <= ROUNDING else None


def _scores_from_cache(engine: EngineClient, model: str, *, most: int, dtype: str) -> bool:
    if dtype not in ROUNDING_NATS:
        return False
    try:
        return _agrees(engine, model, most=most, bound=ROUNDING_NATS[dtype])
    except (EndpointUnusable, ModelUnusable, LookupError, TypeError, ValueError):
        return False


def _agrees(engine: EngineClient, model: str, *, most: int, bound: float) -> bool:
    asked = {"model": model, "temperature": 0, "max_tokens": 1, "logprobs": 1, "return_tokens_as_token_ids": True}
    [text] = engine.ask("/v1/completions", {**asked, "prompt": CANARY_PROMPTS[0], "echo": True})["choices"]
    known = [int(token.removeprefix("token_id:")) for token in text["logprobs"]["tokens"][:-1]]
    ids = (known * most)[:most]
    [echo] = engine.ask("/v1/completions", {**asked, "prompt": ids, "echo": True})["choices"]
    weighed: list[float] = echo["logprobs"]["token_logprobs"][:most]
    middle = most // 2
    labels = sorted({ids[middle], ids[middle - 1]})
    named = {**asked, "prompt": ids[:middle], "logprobs": len(labels), "logprob_token_ids": labels}
    [answer] = engine.ask("/v1/completions", named)["choices"]
    [top] = answer["logprobs"]["top_logprobs"]
    if abs(top[f"token_id:{ids[middle]}"] - weighed[middle]) > bound or any(f"token_id:{i}" not in top for i in labels):
        return False
    sampling = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 0, "skip_reading_prefix_cache": False}
    rows = engine.ask(GENERATE, {"model": model, "token_ids": ids, "sampling_params": sampling})["prompt_logprobs"]
    scored = len(rows) - 1
    if not 0 < scored < most - 1:  # nothing was computed, or nothing read from the cache
        return False
    pairs = [(row_of(rows, ids[-at], from_end=at), weighed[-at]) for at in range(1, scored + 1)]
    return all(value is not None and abs(value - before) <= bound for value, before in pairs)


def _cache_tokens(caches: Sequence[Mapping[str, str]]) -> int | None:
    sizes: list[int] = []
    for labels in caches:
        tokens = labels.get("kv_cache_size_tokens", "")
        blocks = [labels.get(name, "") for name in ("num_gpu_blocks", "block_size")]
        if tokens.isdecimal():
            sizes.append(int(tokens))
        elif all(number.isdecimal() for number in blocks):
            sizes.append(int(blocks[0]) * int(blocks[1]))
    return min(sizes, default=None)
