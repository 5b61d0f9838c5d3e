"""Smooth scores of a multiple-choice question, from log-likelihoods that are asked for anyway.

Accuracy stands still while a small model learns, and moves by whole questions. These two move with each probability.
Both are Marin's; the bytes are those that lm-eval's own `acc_bytes` counts: the choice's, without what stands before
it. Needs the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BITS, PROBABILITY = "bpb", "choice_prob_norm"
HIGHER_IS_BETTER = {BITS: False, PROBABILITY: True}


def smooth_scores(log_likelihoods: Sequence[float], texts: Sequence[str], right: int) -> dict[str, float]:
    """Bits per byte of the right one of some texts, and its share of e to the minus bits per byte of all of them."""
    sizes = [max(1, len(text.encode())) for text in texts]
    bits = [-value / size / math.log(2) for value, size in zip(log_likelihoods, sizes, strict=True)]
    weights = [math.exp(min(bits) - value) for value in bits]
    return {BITS: bits[right], PROBABILITY: weights[right] / sum(weights)}
