"""Sequential verdict on a benchmark's score before all questions are evaluated, with a bounded error probability.

A score is a weighted mean over N fixed questions. Each has a prediction known beforehand, usually the baseline's own
score, and a new score in [0, 1]. Questions are drawn in random order without replacement; those of a cluster are a
single draw. A draw adds D, its weighted new scores less its predictions, to the score. If the full score were exactly
at the margin, the remaining draws would have to add δ per draw on average: δ is known before each draw, and is the
expectation of a random draw. So betting a share f of the capital on "more than δ" is a fair game, K⁺ = Π (1 + f (D − δ)
/ (δ − A)), where A is the least that any remaining draw could add; K⁻ bets on less, with the most, B. By Ville's
inequality, a capital that bets against the truth reaches 1/α with probability α at most, at any stopping time
(Waudby-Smith and Ramdas 2020, arXiv 2006.04347). The capital is spread over several f, since the best f is unknown. For
independent questions with scores 0 or 1, this is the game over U = (D + 1) / 2.

Imports only numpy: harness programs in environments of their own use a copy of this file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

EarlyWord = Literal["not worse", "worse"]
BETS = np.geomspace(0.02, 0.9, 20)
"""Shares f of the capital per bet: from small shares, for differences of few thousandths, to large."""
_ROUNDING = 1e-9  # of a score: a full score at the margin is not worse
_LEAST_ROOM = 1e-15  # lower limit of the distance between mean and bound against rounding; smaller bets stay fair
_HALVINGS = 40


class EarlyDecision:
    """Decides if a score is at or above a threshold while its questions are evaluated draw by draw.

    Args:
        draws: draw of each question in request order; the questions of a draw are adjacent.
        shares: weight of each question in the score; they sum to 1.
        predictions: a number in [0, 1] for each question, known beforehand.
        threshold: lowest score that is not worse.
        alpha: largest probability of a verdict that the full evaluation contradicts.
    """

    def __init__(
        self,
        *,
        draws: Sequence[int],
        shares: Sequence[float],
        predictions: Sequence[float],
        threshold: float,
        alpha: float,
    ) -> None:
        self._shares, self._predictions = np.asarray(shares, dtype=float), np.asarray(predictions, dtype=float)
        codes = np.asarray(draws)
        self._starts = np.r_[np.flatnonzero(np.r_[True, codes[1:] != codes[:-1]]), len(codes)]
        self._predicted = float(self._shares @ self._predictions)
        low = -np.add.reduceat(self._shares * self._predictions, self._starts[:-1])
        high = np.add.reduceat(self._shares * (1 - self._predictions), self._starts[:-1])
        self._least = np.minimum.accumulate(low[::-1])[::-1]
        self._most = np.maximum.accumulate(high[::-1])[::-1]
        self._rest = np.stack([np.r_[np.cumsum(part[::-1])[::-1], 0.0] for part in (low, high)])
        self._needed = threshold - _ROUNDING - self._predicted
        self._reached = -math.log(alpha)
        self._added = np.empty(0)
        self._capitals = np.zeros((2, len(BETS)))
        self.questions = len(codes)
        self.word: EarlyWord | None = None
        """The verdict; None while undecided."""
        self._decide(self._needed, np.empty(0))

    @property
    def asked(self) -> int:
        """Questions evaluated up to the verdict, or so far."""
        return int(self._starts[len(self._added)])

    def add(self, scores: Sequence[float]) -> None:
        """Adds the scores of the next whole draws, ignored after the verdict; raises `ValueError` outside of [0, 1]."""
        given = np.asarray(scores, dtype=float)
        outside = given[~((given >= 0) & (given <= 1))]
        if len(outside):
            raise ValueError(f"a score of {outside[0]:g}")
        if self.word is not None or not len(given):
            return
        begin, first = self.asked, len(self._added)
        last = int(np.searchsorted(self._starts, begin + len(given)))
        assert self._starts[last] == begin + len(given), "whole draws"
        place = slice(begin, begin + len(given))
        differences = self._shares[place] * (given - self._predictions[place])
        self._decide(self._needed - self._added.sum(), np.add.reduceat(differences, self._starts[first:last] - begin))

    def _decide(self, needed: float, added: np.ndarray) -> None:
        first = len(self._added)
        course = needed - np.r_[0.0, np.cumsum(added)]
        sure = self._sure(course, first)
        paths = self._paths(course, added, first=first) + self._capitals[:, None, :]
        won = _mixed(paths) >= self._reached
        known, bet = sure[0] | sure[1], won[0] | won[1]
        end = int(np.argmax(known | bet)) if (known | bet).any() else len(added)
        if known[end]:
            self.word = "not worse" if sure[0, end] else "worse"
        elif bet[end]:
            self.word = "not worse" if won[0, end] else "worse"
        self._added = np.r_[self._added, added[:end]]
        self._capitals = paths[:, end]

    def _sure(self, course: np.ndarray, first: int) -> np.ndarray:
        rest = self._rest[:, first : first + len(course)]
        return np.stack([course <= rest[0], course > rest[1]])

    def _paths(self, course: np.ndarray, added: np.ndarray, *, first: int) -> np.ndarray:
        span = slice(first, first + len(added))
        left = len(self._starts) - 1 - first - np.arange(len(added))
        means = course[:-1] / left
        above = (added - means) / np.maximum(means - self._least[span], _LEAST_ROOM)
        below = (means - added) / np.maximum(self._most[span] - means, _LEAST_ROOM)
        gains = np.log1p(np.maximum(np.stack([above, below]), -1.0)[:, :, None] * BETS)
        return np.concatenate([np.zeros((2, 1, len(BETS))), np.cumsum(gains, axis=1)], axis=1)

    def estimate(self) -> tuple[float, float, float]:
        """Returns the estimated full score and the ends of its interval, each wrong with probability alpha at most.

        The interval is valid at any stopping time, and consistent with the verdict.
        """
        total, draws = float(self._added.sum()), len(self._added)
        least, most = total + float(self._rest[0, draws]), total + float(self._rest[1, draws])
        ends = [self._end(0, least, most), self._end(1, most, least)] if least < most else [least, most]
        likely = total * (len(self._starts) - 1) / draws if draws else 0.0
        low, value, high = sorted([*ends, min(max(likely, min(ends)), max(ends))])
        return _in_unit(value + self._predicted), _in_unit(low + self._predicted), _in_unit(high + self._predicted)

    def _end(self, side: int, claimed: float, unclaimed: float) -> float:
        for _ in range(_HALVINGS):
            middle = (claimed + unclaimed) / 2
            claimed, unclaimed = (middle, unclaimed) if self._claims(side, middle) else (claimed, middle)
        return claimed

    def _claims(self, side: int, needed: float) -> bool:
        course = needed - np.r_[0.0, np.cumsum(self._added)]
        sure = self._sure(course, 0)[:, -1]
        if sure.any():
            return bool(sure[side])
        return bool(_mixed(self._paths(course, self._added, first=0)[side, -1:])[0] >= self._reached)


def _in_unit(score: float) -> float:
    return min(max(score, 0.0), 1.0)


def _mixed(paths: np.ndarray) -> np.ndarray:
    return np.asarray(np.logaddexp.reduce(paths, axis=-1)) - math.log(len(BETS))


class EarlyAsking:
    """Decides several scores over the same request order; questions needed only by decided scores are skipped.

    Args:
        plan: `draws` has the draw of each question in request order; `scores` has for each score the indices of its
            `questions`, their `shares` and `predictions`, its `metric`, `threshold` and `alpha`, and `bound` and
            `mirrored` as in `unit_score`.
    """

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._draws: Sequence[int] = plan["draws"]
        self._scores: Sequence[Mapping[str, Any]] = plan["scores"]
        self.decisions = [
            EarlyDecision(
                draws=[self._draws[place] for place in score["questions"]],
                **{name: score[name] for name in ("shares", "predictions", "threshold", "alpha")},
            )
            for score in self._scores
        ]
        self._answered: dict[int, Mapping[str, float]] = {}

    @property
    def decided(self) -> bool:
        return all(decision.word for decision in self.decisions)

    def next(self, number: int) -> list[int]:
        """Returns the next `number` question indices of undecided scores, more to complete a draw, none at the end."""
        pairs = zip(self._scores, self.decisions, strict=True)
        open_places = {place for score, decision in pairs if not decision.word for place in score["questions"]}
        places: list[int] = []
        for place in sorted(open_places - self._answered.keys()):
            if len(places) >= number and self._draws[place] != self._draws[places[-1]]:
                break
            places.append(place)
        return places

    def take(self, answers: Mapping[int, Mapping[str, float]]) -> None:
        """Adds scores by question index and metric; raises `ValueError` for a missing score or a score out of range."""
        self._answered |= answers
        for score, decision in zip(self._scores, self.decisions, strict=True):
            if decision.word:
                continue
            unit_scores: list[float] = []
            for place in score["questions"][decision.asked :]:
                if place not in self._answered:
                    break
                value = self._answered[place].get(score["metric"])
                if value is None:
                    raise ValueError(f"no score in {score['metric']}")
                unit_scores.append(unit_score(value, bound=score["bound"], mirrored=score["mirrored"]))
            decision.add(unit_scores)


def unit_score(value: float, *, bound: float, mirrored: bool) -> float:
    """Maps a score in [0, `bound`] to [0, 1] with higher as better; `mirrored` if lower is better."""
    return 1 - value / bound if mirrored else value / bound
