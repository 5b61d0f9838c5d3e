"""Finds questions in texts: by hashes of seeds (a few words), then word by word, then as text.

At least 1 seed of every n consecutive words of a question is kept, so no match of that length is missed; memory grows
with the number of questions. Hash collisions are dropped when the texts are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import BeforeValidator, PlainSerializer

from tasks.records.questions.asked import AskedQuestion, Words, runs_of, words_of

if TYPE_CHECKING:
    import numpy as np

_ANSWER_WORDS = 13  # of a long answer, so many words must follow
_WINDOW = 50  # words after the question in which its answer is searched, as in decon
_SHOWN_WORDS = 50
_SLOTS_PER_SEED = 64
_SLOT_BITS = 16, 24


class Match(NamedTuple):
    """Words of a question in a text: start in the question, start in the text, and number of words."""

    question: int
    first: int
    at: int
    length: int


@dataclass
class Overlap:
    """The findings about a question: its n-grams as bits, the longest match, and its location."""

    seen: Annotated[int, BeforeValidator(lambda digits: int(digits, 16)), PlainSerializer(hex)] = 0
    longest: int = 0
    place: tuple[str, int, int] = ("", 0, 0)
    """File, start byte of the file's part, number of the document in it."""
    text: str = ""
    answer: bool = False

    def add(self, other: Overlap) -> None:
        """Merges another finding; of equal lengths, the first location in order wins, in any order of calls."""
        self.seen |= other.seen
        self.answer |= other.answer
        if (-other.longest, other.place) < (-self.longest, self.place):
            self.longest, self.place, self.text = other.longest, other.place, other.text


@dataclass
class QuestionIndex:
    """Sorted seeds of questions; `n` words make an n-gram, shorter questions are searched for as a whole. `shortest` is
    the number of words of a seed, and the minimum of a question."""

    questions: Sequence[AskedQuestion]
    n: int
    shortest: int
    lengths: list[int] = field(init=False)
    """Words of each question; 0 if too few."""

    def __post_init__(self) -> None:
        import numpy as np

        self._words = words_of([question.text for question in self.questions])
        between = np.flatnonzero(self._words.hashes == _separator())
        self._firsts = np.concatenate([[0], between + 1]).astype(np.int64)
        ends = np.concatenate([between, [len(self._words.hashes)]])
        sizes = ends - self._firsts
        self._sizes = np.where(sizes >= self.shortest, sizes, 0)
        self.lengths = self._sizes.tolist()
        self._answers = [question.answer.encode().split()[:_ANSWER_WORDS] for question in self.questions]
        self._seed_questions, self._seed_offsets = self._seeds()
        runs = runs_of(self._words.hashes, self.shortest)
        values = runs[self._firsts[self._seed_questions] + self._seed_offsets]
        order = np.argsort(values, kind="stable")
        self._values = values[order]
        self._seed_questions, self._seed_offsets = self._seed_questions[order], self._seed_offsets[order]
        low, high = _SLOT_BITS
        self._shift = np.uint64(64 - min(high, max(low, (len(order) * _SLOTS_PER_SEED).bit_length())))
        self._slots = np.zeros(1 << (64 - int(self._shift)), dtype=bool)
        self._slots[self._values >> self._shift] = True

    def gram(self, question: int) -> int:
        """Returns the words of a question's n-grams: n, or all words of a shorter question."""
        return min(self.n, self.lengths[question])

    def grams(self, question: int) -> int:
        """Returns the number of a question's n-grams; 0 if it is too short."""
        length = self.lengths[question]
        return length - self.gram(question) + 1 if length else 0

    def search(
        self, texts: Sequence[str], findings: dict[int, Overlap], *, places: Sequence[tuple[str, int, int]]
    ) -> int:
        """Adds the findings of all questions in some texts to `findings`, and returns the texts' number of words."""
        import numpy as np

        words = words_of(texts)
        between = np.flatnonzero(words.hashes == _separator())
        for match in self._matches(words):
            self._add(match, words, findings, between=between, places=places)
        return len(words.hashes) - len(between)

    def _seeds(self) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        long = np.flatnonzero(self._sizes)
        strides = np.minimum(self._sizes[long], self.n) - self.shortest + 1
        counts = (self._sizes[long] - self.shortest) // strides + 1
        questions = np.repeat(long, counts)
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return questions, numbers * np.repeat(strides, counts)

    def _matches(self, words: Words) -> Iterator[Match]:
        import numpy as np

        if len(words.hashes) < self.shortest or not len(self._values):
            return
        runs = runs_of(words.hashes, self.shortest)
        at = np.flatnonzero(self._slots[runs >> self._shift])
        begin = np.searchsorted(self._values, runs[at], side="left")
        end = np.searchsorted(self._values, runs[at], side="right")
        counts = end - begin
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(begin, counts)
        at, questions, offsets = np.repeat(at, counts), self._seed_questions[numbers], self._seed_offsets[numbers]
        long = self._is_long(words, at, questions, offsets)
        diagonals = np.stack([at[long] - offsets[long], questions[long]], axis=1)
        for diagonal, question in np.unique(diagonals, axis=0).tolist():
            yield from self._along(words, diagonal, question)

    def _is_long(self, words: Words, at: np.ndarray, questions: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        import numpy as np

        sizes, firsts = self._sizes[questions], self._firsts[questions]
        length = np.full(len(at), self.shortest)
        for step, begin in ((1, self.shortest), (-1, -1)):
            alive = np.ones(len(at), dtype=bool)
            for far in range(begin, begin + step * (self.n - self.shortest), step):
                own, in_text = offsets + far, at + far
                alive &= (own >= 0) & (own < sizes) & (in_text >= 0) & (in_text < len(words.hashes))
                if not alive.any():
                    break
                mine = self._words.hashes[firsts[alive] + own[alive]]
                alive[alive] = mine == words.hashes[in_text[alive]]
                length += alive
        return length >= np.minimum(sizes, self.n)

    def _along(self, words: Words, diagonal: int, question: int) -> Iterator[Match]:
        import numpy as np

        low, high = max(0, -diagonal), min(self.lengths[question], len(words.hashes) - diagonal)
        first = int(self._firsts[question])
        same = self._words.hashes[first + low : first + high] == words.hashes[diagonal + low : diagonal + high]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]])))
        for begin, end in edges.reshape(-1, 2).tolist():
            if end - begin >= self.gram(question):
                yield Match(question, low + begin, diagonal + low + begin, end - begin)

    def _add(
        self,
        match: Match,
        words: Words,
        findings: dict[int, Overlap],
        *,
        between: np.ndarray,
        places: Sequence[tuple[str, int, int]],
    ) -> None:
        finding = findings.get(match.question, Overlap())
        bits = ((1 << (match.length - self.gram(match.question) + 1)) - 1) << match.first
        answer = self._answers[match.question]
        if finding.seen & bits == bits and finding.longest >= match.length and (finding.answer or not answer):
            return
        start = int(self._firsts[match.question]) + match.first
        matched_words = words.between(match.at, match.at + match.length)
        if matched_words != self._words.between(start, start + match.length):
            return
        text = int(between.searchsorted(match.at))
        end = match.at + match.length
        last = int(between[text]) if text < len(between) else len(words.hashes)
        window = words.between(end, min(last, end + _WINDOW + len(answer)))
        follows = bool(answer) and b" %b " % b" ".join(answer) in b" %b " % b" ".join(window)
        shown = b" ".join(matched_words[:_SHOWN_WORDS]).decode(errors="replace")
        finding.add(Overlap(bits, match.length, places[text], shown, follows))
        findings[match.question] = finding


@cache
def _separator() -> np.uint64:
    return words_of(["a", "b"]).hashes[1]
