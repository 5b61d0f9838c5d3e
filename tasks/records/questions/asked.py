"""Questions of records, with their own text: without few-shot examples, labels and instructions."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from resources.storage import storage
from tasks.records.questions.words import words_of
from tasks.records.record import FoundRecord, Record
from tasks.records.samples import SAMPLES_NAME, Sample, read_samples

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


def samples_of(found_record: FoundRecord) -> dict[str, list[Sample]]:
    """Returns the samples of a record by benchmark, empty if not kept. Raises StorageError if they are unreadable."""
    samples: dict[str, list[Sample]] = {}
    try:
        for sample in read_samples(storage.join(found_record.cell_uri, found_record.record.attempt, SAMPLES_NAME)):
            samples.setdefault(sample.benchmark, []).append(sample)
    except FileNotFoundError:
        return {}
    return samples


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
        for question in asked_in(item.record, samples_of(item))
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
