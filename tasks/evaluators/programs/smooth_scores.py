"""Smooth scores of a multiple-choice question, from log-likelihoods that are requested anyway.

While a small model learns, accuracy stays constant for long and moves by whole questions. These two scores move with
each probability. Both are Marin's. Bytes are those of lm-eval's own `acc_bytes`: the choice without the text before it.
Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BITS, PROBABILITY = "bpb", "choice_prob_norm"
HIGHER_IS_BETTER = {BITS: False, PROBABILITY: True}


def smooth_scores(log_likelihoods: Sequence[float], texts: Sequence[str], right: int) -> dict[str, float]:
    """Returns bits per byte of the right text, and its share of exp(-bits per byte) among all texts."""
    sizes = [max(1, len(text.encode())) for text in texts]
    bits = [-value / size / math.log(2) for value, size in zip(log_likelihoods, sizes, strict=True)]
    weights = [math.exp(min(bits) - value) for value in bits]
    return {BITS: bits[right], PROBABILITY: weights[right] / sum(weights)}
