"""Questions of records, with their own text: without few-shot examples, labels and instructions; and hashes of words.

Words are hashed 1 MiB at a time, to compare questions with training texts, which go through the same function. HTML
entities and escapes such as \\u00e9 are decoded once, characters are normalized to NFKC, and invisible characters (soft
hyphens, zero-width spaces, direction marks, variation selectors) are dropped. Words are lower case, separated by
everything but letters and digits, including punctuation beyond ASCII (general, Latin-1, Chinese and Japanese). Each
Chinese or Japanese character is a word.
"""

from __future__ import annotations

import ast
import hashlib
import html
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.records.record import FoundRecord, Record
from tasks.records.samples import Sample, samples_of

if TYPE_CHECKING:  # the import takes 0.15 s, unneeded in most processes
    import numpy as np

_FEW = 8  # fewer questions may begin alike by chance, so nothing is removed from them
_STEM_WORDS = 13  # a stem of this length identifies its question without the choices
_CHOICES = re.compile(r"\n[ \t]*\(?A[.):][ \t].*?\n[ \t]*\(?B[.):][ \t]", re.DOTALL)
_BLOCKS = ("\n\n", "\n")
_PER_CALL = 2**20  # characters of questions per call of words_of


class AskedQuestion(NamedTuple):
    """A question: its name, own words separated by single spaces, words of its answer, digest of its words. `answer` is
    empty if there is none, or if it is only a choice's letter. `raw` is the unnormalized text."""

    benchmark: str
    id: str
    text: str
    answer: str
    digest: str
    raw: str = ""


def by_benchmark(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Groups samples by benchmark."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.benchmark, []).append(sample)
    return groups


def asked_in(record: Record, samples: Mapping[str, Sequence[Sample]]) -> Iterator[AskedQuestion]:
    """Returns the questions of a record, without duplicates."""
    shots = _shots(record.evaluation)
    for benchmark, asked in samples.items():
        once = {sample.id: sample for sample in reversed(asked)}
        named = [name for name in shots if benchmark == name or benchmark.startswith(f"{name}_")]
        known = shots[max(named, key=len)] if named else None
        yield from questions_of(benchmark, list(once.values()), shots=known)


def every_question(records: Sequence[FoundRecord]) -> list[AskedQuestion]:
    """Returns the questions of some records, without duplicates; reads the newest record of each evaluation."""
    newest: dict[tuple[str, tuple[str, ...]], FoundRecord] = {}
    for item in sorted(records, key=lambda item: item.record.created):
        if item.record.succeeded and item.record.samples:
            newest[item.record.evaluation_hash, item.record.benchmarks] = item
    questions = {
        (question.benchmark, question.id, question.digest): question
        for item in newest.values()
        for question in asked_in(item.record, by_benchmark(samples_of(item)))
    }
    return list(questions.values())


def questions_of(benchmark: str, samples: Sequence[Sample], *, shots: int | None) -> list[AskedQuestion]:
    """Returns the questions of a benchmark in a record. `samples` must be complete, since their common text belongs to
    no question; `shots` is the number of few-shot examples, None if unknown."""
    texts = own_texts([sample.asked for sample in samples], shots=shots)
    answers = [_answer(sample.target) for sample in samples]
    words = words_in([*texts, *answers])
    named = zip(samples, words[: len(samples)], words[len(samples) :], texts, strict=True)
    digests = [hashlib.sha256(text.encode()).hexdigest()[:16] if text else "" for text in words[: len(samples)]]
    return [
        AskedQuestion(benchmark, sample.id, text, answer, digest, raw)
        for (sample, text, answer, raw), digest in zip(named, digests, strict=True)
    ]


def own_texts(prompts: Sequence[str], *, shots: int | None) -> list[str]:
    """Returns the text that belongs to each question alone, from the prompts of a benchmark.

    Of a conversation, this is the last user turn. Few-shot examples are removed by their number or, if that is unknown,
    by the cue before the answer, which follows each example too. The common beginning, up to a colon or line end, and
    the common last line are labels and instructions. Lettered choices are kept only if the text above them is short.
    """
    conversations = [_turns(prompt) for prompt in prompts]
    texts = [turns[-1] for turns in conversations]
    if all(len(turns) == 1 for turns in conversations):  # else examples are separate turns
        texts = _without_examples(texts, shots=shots)
    if len(texts) >= _FEW:
        texts = _without_labels(texts)
    return [_stem(text) for text in texts]


def words_in(texts: Sequence[str]) -> list[str]:
    """Returns the words of each text, separated by single spaces."""
    words_by_text: list[str] = []
    for batch in _batches(texts):
        words = words_of(batch)
        content = b" ".join(words.between(0, len(words.starts))).decode(errors="replace")
        words_by_text += [part.strip() for part in content.split("\x01")]
    return words_by_text


def _shots(evaluation: Mapping[str, Any]) -> dict[str, int | None]:
    evals: Any = evaluation.get("evals") or ()
    return {
        str(task.get(name)): task.get("num_fewshot")
        for task in evals
        if isinstance(task, dict)
        for name in ("name", "task_alias")
        if task.get(name)
    }


def _turns(prompt: str) -> list[str]:
    if not prompt.startswith("["):
        return [prompt]
    try:
        turns = json.loads(prompt if prompt.startswith("[{") else ast.literal_eval(prompt)[0])
        asked = [turn["content"] for turn in turns if turn["role"] == "user"]
    except (ValueError, TypeError, KeyError, IndexError, SyntaxError, RecursionError, MemoryError):
        return [prompt]
    return asked if asked and all(isinstance(turn, str) for turn in asked) else [prompt]


def _without_examples(texts: list[str], *, shots: int | None) -> list[str]:
    if shots == 0 or not texts:
        return texts
    if shots is None:
        cue = _cue(texts) if len(texts) >= _FEW else ""
        return [_after_cue(text, cue) for text in texts] if cue.strip() else texts
    for between in _BLOCKS:
        blocks = [text.split(between) for text in texts]
        size = min(len(parts) // (shots + 1) for parts in blocks)
        if size > 0:
            return [between.join(parts[-size:]) for parts in blocks]
    return texts


def _common(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    return first[: next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def _cue(texts: Sequence[str]) -> str:
    common = _common([text[::-1] for text in texts])[::-1]
    return common[common.index("\n") :] if "\n" in common else ""


def _after_cue(text: str, cue: str) -> str:
    _, separator, example = text[: -len(cue)].rpartition(cue)
    if not separator:
        return text
    for between in _BLOCKS:
        if between in example:
            return example.partition(between)[2] + cue
    return text


def _without_labels(texts: Sequence[str]) -> list[str]:
    start = _common(texts)
    start = start[: max(start.rfind(":"), start.rfind("\n")) + 1]
    texts = [text[len(start) :] for text in texts]
    cue = _cue(texts)
    return [text[: len(text) - len(cue)] for text in texts]


def _stem(text: str) -> str:
    match = _CHOICES.search(text)
    if match is None:
        return text
    stem = text[: match.start()]
    return stem if len(stem.split()) >= _STEM_WORDS else text


def _answer(target: str | None) -> str:
    text = (target or "").strip()
    return "" if re.fullmatch(r"\(?[A-Za-z][.)]?", text) else text


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _PER_CALL:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


SEPARATOR = "\x01"
"""A word that no question contains, put between texts, so that no match spans two texts."""
_SPACE, _PAD = 0x20, 16
_KEPT = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyz\x01")
_TABLE = bytes(byte if byte in _KEPT or byte >= 0x80 else _SPACE for byte in range(256))
_MIX, _FOLD, _STEP = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F  # odd: multiplication is invertible
_WHOLE = 2**64
_ESCAPES = re.compile(r"(?:\\u[0-9a-fA-F]{4})+")
_INVISIBLE = r"[\p{Cf}\x{34f}\x{fe00}-\x{fe0f}\x{e0100}-\x{e01ef}]+"  # and a joiner, and variation selectors


class Words(NamedTuple):
    """The words of some texts, concatenated: start and end of each in the text, and a hash for each."""

    text: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray

    def between(self, first: int, last: int) -> list[bytes]:
        """Returns the normalized words from index `first` to before `last`."""
        return [
            self.text[start:end].tobytes()
            for start, end in zip(self.starts[first:last], self.ends[first:last], strict=True)
        ]


def words_of(texts: Sequence[str]) -> Words:
    """Returns the words of texts, with a separator between texts."""
    import numpy as np
    import pyarrow
    from pyarrow import compute

    joined = f" {SEPARATOR} ".join(_decoded(text).replace(SEPARATOR, " ") for text in texts)
    if not joined.isascii():
        joined = unicodedata.normalize("NFKC", joined)  # Arrow's normalization keeps accents separate
    try:
        whole = pyarrow.array([joined], pyarrow.large_string())
    except UnicodeEncodeError:  # half of a surrogate pair
        return words_of([text.encode(errors="replace").decode() for text in texts])
    if not joined.isascii():
        options = compute.ReplaceSubstringOptions(_INVISIBLE, "")
        whole = compute.call_function("replace_substring_regex", [whole], options)
    lower = compute.call_function("utf8_lower", [whole])
    content = bytes(lower.buffers()[2] or b"").translate(_TABLE)
    text = np.frombuffer(bytearray(content + bytes([_SPACE]) * _PAD), dtype=np.uint8)
    beyond = np.flatnonzero(text >= 0x80)
    if len(beyond):
        _blank_punctuation(text, beyond)
    inside = text != _SPACE
    begins = inside.copy()
    begins[1:] &= ~inside[:-1]
    if len(beyond):
        asian = beyond[(text[beyond] >= 0xE3) & (text[beyond] <= 0xE9)]  # U+3000 to U+9FFF, three bytes each
        begins[asian] = True
        begins[asian + 3] = inside[asian + 3]
    stops = inside[:-1] & (~inside[1:] | begins[1:])
    starts, ends = np.flatnonzero(begins), np.flatnonzero(stops) + 1
    return Words(text, starts, ends, _hashes(text, starts, ends))


def runs_of(hashes: np.ndarray, length: int) -> np.ndarray:
    """Returns a hash for each window of `length` words, by its start; shorter than `hashes` by `length` - 1."""
    import numpy as np

    total, covered = None, 0
    power, span = hashes, 1
    for bit in range(length.bit_length()):
        if length >> bit & 1:
            if total is None:
                total, covered = power, span
            else:
                size = max(0, min(len(total) - span, len(power)))
                total = power[:size] * np.uint64(pow(_STEP, covered, _WHOLE)) + total[span : span + size]
                covered += span
        if length >> (bit + 1):
            size = max(0, len(power) - span)
            power = power[:size] * np.uint64(pow(_STEP, span, _WHOLE)) + power[span : span + size]
            span *= 2
    assert total is not None
    return total


def _decoded(text: str) -> str:
    if "\\u" in text:  # first, since such escapes can encode an ampersand
        text = _ESCAPES.sub(
            lambda match: bytes.fromhex(match[0].replace("\\u", "")).decode("utf-16-be", "replace"), text
        )
    return html.unescape(text) if "&" in text else text


def _blank_punctuation(text: np.ndarray, beyond: np.ndarray) -> None:
    lead, second = text[beyond], text[beyond + 1]
    general = beyond[(lead == 0xE2) & ((second == 0x80) | (second == 0x81))]
    asian = beyond[(lead == 0xE3) & (second == 0x80)]
    third = text[beyond + 2]
    wide = beyond[(lead == 0xEF) & (second == 0xBC) & ((third <= 0x8F) | ((third >= 0x9A) & (third <= 0x9F)))]
    for positions in (general, asian, wide):
        for offset in range(3):
            text[positions + offset] = _SPACE
    latin = beyond[lead == 0xC2]
    text[latin] = _SPACE
    text[latin + 1] = _SPACE


def _hashes(text: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    import numpy as np

    eight = np.ndarray(len(text) - 7, dtype="<u8", buffer=text, strides=(1,))
    masks = np.array([(1 << (8 * size)) - 1 for size in range(9)], dtype=np.uint64)
    lengths = ends - starts
    hashes = eight[starts] & masks[np.minimum(lengths, 8)]
    hashes ^= hashes >> np.uint64(32)
    hashes *= np.uint64(_MIX)
    long = np.flatnonzero(lengths > 8)
    if len(long):
        more = eight[starts[long] + 8] & masks[np.minimum(lengths[long] - 8, 8)]
        last = eight[ends[long] - 8]
        hashes[long] += (more ^ (last >> np.uint64(7)) ^ lengths[long].astype(np.uint64)) * np.uint64(_FOLD)
    hashes ^= hashes >> np.uint64(29)
    return hashes
