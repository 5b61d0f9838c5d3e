"""The verdict of a whole benchmark before the whole of it is asked, wrong with a stated probability at most.

A score is a weighted mean over N frozen questions. Each has a prediction that is known beforehand, as a rule the
baseline's own score, and a new score in [0, 1]. Questions are asked in random order without replacement, those of a
cluster together as a single draw. A draw adds D, its weighted new scores less its predictions, to the score. Were the
whole exactly at the margin, what is left would have to add δ per draw on average: known before each draw, and what a
random draw adds in expectation. So betting a share f of the capital on "more than δ" is a fair game,
K⁺ = Π (1 + f (D − δ) / (δ − A)), where A is the least that any draw left could add; K⁻ bets on less, down from B, the
most. By Ville's inequality a capital that bets against the truth reaches 1/α with probability α at most, however long
it is played (Waudby-Smith and Ramdas 2020, arXiv 2006.04347). Capitals are spread over several f, since the best one is
unknown. For questions that stand alone and were right or wrong this is the game over U = (D + 1) / 2.

Nothing but numpy is imported: programs of harnesses, in environments of their own, take a copy of this file along.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

EarlyWord = Literal["not worse", "worse"]
BETS = np.geomspace(0.02, 0.9, 20)
"""Shares of the capital that are bet: from those for differences of few thousandths to those for obvious ones."""
_ROUNDING = 1e-9  # of a score: a whole at the margin is not worse
_LEAST_ROOM = 1e-15  # where rounding leaves less between a mean and its bound; smaller bets are as fair
_HALVINGS = 40


class EarlyDecision:
    """Decides whether a score lies at or above a threshold, while its questions are asked draw after draw.

    Args:
        draws: draw of each question, in the order of asking; those of a draw stand side by side.
        shares: weight of each question in the score, together 1.
        predictions: a number in [0, 1] for each question, known beforehand.
        threshold: the lowest score that is not worse.
        alpha: largest probability of a verdict that the whole contradicts.
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
        """The verdict, once it is known."""
        self._decide(self._needed, np.empty(0))

    @property
    def asked(self) -> int:
        """Questions asked until the verdict was known, or until now."""
        return int(self._starts[len(self._added)])

    def add(self, scores: Sequence[float]) -> None:
        """Takes the scores of the next questions, whole draws; those after the verdict are passed over.

        Raises:
            ValueError: a score is outside of [0, 1].
        """
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
        here = slice(first, first + len(added))
        left = len(self._starts) - 1 - first - np.arange(len(added))
        means = course[:-1] / left
        above = (added - means) / np.maximum(means - self._least[here], _LEAST_ROOM)
        below = (means - added) / np.maximum(self._most[here] - means, _LEAST_ROOM)
        gains = np.log1p(np.maximum(np.stack([above, below]), -1.0)[:, :, None] * BETS)
        return np.concatenate([np.zeros((2, 1, len(BETS))), np.cumsum(gains, axis=1)], axis=1)

    def estimate(self) -> tuple[float, float, float]:
        """The score of the whole, and an interval for it, each end of which is wrong with probability alpha at most.

        It holds whenever asking was stopped, and agrees with the verdict.
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
    """Decides several scores whose questions are asked in one order; nobody asks for what is decided.

    Args:
        wanted: `draws`, the draw of each question in the order of asking; `scores`, each with the places of its
            `questions`, their `shares` and `predictions`, its `metric`, `threshold` and `alpha`, and `bound` and
            `mirrored` as in `unit_score`.
    """

    def __init__(self, wanted: Mapping[str, Any]) -> None:
        self._draws: Sequence[int] = wanted["draws"]
        self._scores: Sequence[Mapping[str, Any]] = wanted["scores"]
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
        """True once every score is."""
        return all(decision.word for decision in self.decisions)

    def next(self, number: int) -> list[int]:
        """Places of the next questions of undecided scores: as many, or more where a draw has more; none at the end."""
        pairs = zip(self._scores, self.decisions, strict=True)
        open_ones = {place for score, decision in pairs if not decision.word for place in score["questions"]}
        places: list[int] = []
        for place in sorted(open_ones - self._answered.keys()):
            if len(places) >= number and self._draws[place] != self._draws[places[-1]]:
                break
            places.append(place)
        return places

    def take(self, answers: Mapping[int, Mapping[str, float]]) -> None:
        """Takes the scores of questions by place and metric.

        Raises:
            ValueError: one is missing, or outside of what its metric can be.
        """
        self._answered |= answers
        for score, decision in zip(self._scores, self.decisions, strict=True):
            if decision.word:
                continue
            found: list[float] = []
            for place in score["questions"][decision.asked :]:
                if place not in self._answered:
                    break
                value = self._answered[place].get(score["metric"])
                if value is None:
                    raise ValueError(f"no score in {score['metric']}")
                found.append(unit_score(value, bound=score["bound"], mirrored=score["mirrored"]))
            decision.add(found)


def unit_score(value: float, *, bound: float, mirrored: bool) -> float:
    """A score from 0 to `bound` as one from 0 to 1 of which more is better."""
    return 1 - value / bound if mirrored else value / bound
