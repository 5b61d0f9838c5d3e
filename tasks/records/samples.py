"""Samples: prompt, answer and scores of each question, in the same format for every evaluator.

They are stored next to the harness's output: gzipped JSON lines, a line per question. Comparisons of two runs of a
benchmark read them. Scores of single questions, without texts, are the source of published values, which they can
reproduce.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, FiniteFloat, ValidationError

from resources.errors import StorageError
from resources.storage import storage
from tasks.records.details import Whole, bounded
from tasks.records.record import FoundRecord, Metric

SAMPLES_NAME = "samples.jsonl.gz"
"""Name of the samples file in an attempt's folder."""
MOST_BYTES_OF_A_LINE = 64 << 20
"""Largest line of a samples file: 64 MiB. A million tokens of prompt and answer are about 10 MB."""


def encodable(text: str) -> str:
    """Replaces lone surrogates, which JSON responses can contain and UTF-8 files cannot, by question marks."""
    return text.encode(errors="replace").decode()


_Text = Annotated[str, AfterValidator(encodable)]


class Sample(BaseModel):
    """A question of a benchmark with its answer and scores."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    benchmark: str
    """Benchmark name under which its metrics are published."""
    id: str
    """Identifier of the question, the same in every run of the benchmark."""
    prompt: _Text
    """The question; includes the preceding context if the harness does not separate the two."""
    output: _Text
    """The model's answer; for multiple choice, the choice with the highest likelihood."""
    target: _Text | None
    """The correct answer, or the output that the answer was compared with."""
    scores: Annotated[dict[str, float], AfterValidator(bounded)]
    """Scores by metric; empty for a question that was left out."""
    ratios: Annotated[dict[str, tuple[float, float]], AfterValidator(bounded)] = {}
    """Metrics that are a ratio of sums, such as perplexities: log-likelihood of the text, and its words or bytes."""
    cluster: str | None = None
    """Name of the passage or document that it shares with other questions; empty for an independent question."""
    log_likelihoods: Annotated[tuple[FiniteFloat, ...], AfterValidator(bounded)] = ()
    """Log-likelihoods behind its scores, request by request; empty where generated text is scored."""
    finish: str | None = None
    """Finish reason of its answers: `length` if any was cut at the limit; empty where nothing is generated."""
    truncated: bool = False
    """True if its prompt was cut on the left to fit."""
    choices: tuple[_Text, ...] = ()
    """Texts of its choices, in the order of `log_likelihoods`, which begin with those of the choices if any."""
    context: _Text = ""
    """System prompt, description and few-shot examples before the question; empty if there are none, or unknown."""
    tokens: Whole | None = None
    """Tokens generated for its answer; None if nothing is generated or the tokens were not counted."""

    @property
    def asked(self) -> str:
        return self.context + self.prompt


def write_samples(path: Path, samples: Iterable[Sample]) -> int:
    """Writes samples to a new file and returns their number."""
    number = 0
    try:
        # No name or time in the header, so that equal samples give equal bytes.
        with (
            path.open("wb") as file,
            gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed,
            io.TextIOWrapper(packed, encoding="utf-8") as lines,
        ):
            for sample in samples:
                lines.write(sample.model_dump_json() + "\n")
                number += 1
    except OSError as error:
        raise StorageError(
            expected=f"to write samples to {path}", found=str(error), remedy="check that the folder has space"
        ) from error
    return number


def read_samples(uri: str) -> Iterator[Sample]:
    """Yields the samples in a file of an attempt; raises the errors of `samples_content` and `parsed_samples`."""
    yield from parsed_samples(samples_content(uri), uri=uri)


def samples_of(entry: FoundRecord) -> Iterator[Sample]:
    """Yields the samples of a record, none if they were not kept; raises `StorageError` if they are unreadable."""
    with suppress(FileNotFoundError):
        yield from read_samples(storage.join(entry.cell_uri, entry.record.attempt, SAMPLES_NAME))


def samples_content(uri: str) -> bytes:
    """Reads `<cell>/<attempt>/samples.jsonl.gz`, or raises `FileNotFoundError`; follows no links out of the cell."""
    return storage.read_bytes(uri, within=storage.parent(storage.parent(uri)))


def parsed_samples(content: bytes, *, uri: str) -> Iterator[Sample]:
    """Parses the content of a samples file; raises `StorageError` if it is damaged."""
    for number, line in enumerate(sample_lines(content, uri=uri), 1):
        try:
            yield Sample.model_validate_json(line)
        except ValidationError as error:
            raise damaged_samples(uri, f"line {number:,}: {error.errors(include_input=False)[0]['msg']}") from error


def sample_lines(content: bytes, *, uri: str) -> Iterator[bytes]:
    """Yields the lines of a samples file; raises `StorageError` if it is damaged or a line is longer than 64 MiB."""
    try:
        with gzip.open(io.BytesIO(content), "rb") as lines:
            while line := lines.readline(MOST_BYTES_OF_A_LINE + 1):
                if len(line) > MOST_BYTES_OF_A_LINE:
                    raise damaged_samples(uri, f"a line of more than {MOST_BYTES_OF_A_LINE:,} bytes")
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise damaged_samples(uri, str(error)) from error


def damaged_samples(uri: str, problem: str) -> StorageError:
    """Returns the error for a damaged samples file."""
    return StorageError(
        expected=f"samples, a line of JSON each, in {uri}",
        found=problem.partition("\n")[0],
        remedy="evaluate the cell again: delete its record.json first",
    )


LENGTH = "length"
"""Finish reason of an answer that ended at the length limit."""
_TOLERANCE = 5e-4  # harnesses round the means they publish
_SCALES = (1.0, 100.0)  # some publish percent of scores from 0 to 1


class Question(NamedTuple):
    """A sample without its texts; `prompt` is a digest."""

    id: str
    prompt: bytes
    cluster: str | None
    finish: str | None
    truncated: bool
    scores: Mapping[str, float]
    ratios: Mapping[str, tuple[float, float]]

    @property
    def scored(self) -> bool:
        """False for a question that was left out or has no usable result."""
        return bool(self.scores or self.ratios)


Questions = Mapping[str, Sequence[Question]]
"""Samples of a record by benchmark."""


def question_of(sample: Sample) -> Question:
    """Returns a sample without its texts, which can be large in total."""
    prompt = hashlib.sha256(sample.asked.encode()).digest()[:8]
    kept = sample.cluster, sample.finish, sample.truncated, sample.scores, sample.ratios
    return Question(sample.id, prompt, *kept)


class KeptSamples(NamedTuple):
    """The samples of a record, and the digest of their file."""

    digest: str
    questions: Questions


def kept_samples(entry: FoundRecord) -> KeptSamples | None:
    """Returns a record's samples without texts, or None; raises `StorageError` if they are damaged or unreadable."""
    uri = storage.join(entry.cell_uri, entry.record.attempt, SAMPLES_NAME)
    questions: dict[str, list[Question]] = {}
    try:
        content = samples_content(uri)
    except FileNotFoundError:
        return None
    for sample in parsed_samples(content, uri=uri):
        questions.setdefault(sample.benchmark, []).append(question_of(sample))
    return KeptSamples(hashlib.sha256(content).hexdigest(), questions)


def scale_of(metric: Metric, scores: Sequence[float]) -> float | None:
    """Returns the factor between the mean of some scores and a metric's value (1 or 100); None if neither fits."""
    mean = math.fsum(scores) / len(scores) if scores else math.nan
    return next(
        (scale for scale in _SCALES if abs(mean * scale - metric.value) <= _TOLERANCE * scale * max(1.0, abs(mean))),
        None,
    )


def scores_in(metric: Metric, questions: Iterable[Question]) -> list[float]:
    """Returns the finite scores of questions for a metric."""
    scores = (question.scores.get(metric.name, math.nan) for question in questions)
    return [score for score in scores if math.isfinite(score)]


def ratio(name: str, parts: Sequence[tuple[float, float]]) -> float:
    """Returns a perplexity, or bits per byte, from pairs of log-likelihood and number of words or bytes."""
    units = math.fsum(number for _, number in parts)
    per_unit = -math.fsum(likelihood for likelihood, _ in parts) / units if units else math.nan
    try:
        return per_unit / math.log(2) if name.startswith("bits_per") else math.exp(per_unit)
    except OverflowError:
        return math.inf


def given(metric: Metric, questions: Questions, metrics: Iterable[Metric]) -> list[float]:
    """Returns the values computed from samples, or from a group's parts, a value per scale; empty if there are none."""
    if metric.parts:
        values = {other.benchmark: other.value for other in metrics if other.name == metric.name}
        known = values.keys() >= metric.parts.keys()
        return [math.fsum(weight * values[part] for part, weight in metric.parts.items())] if known else []
    asked = questions.get(metric.benchmark, ())
    if parts := [question.ratios[metric.name] for question in asked if metric.name in question.ratios]:
        return [ratio(metric.name, parts)]
    scores = scores_in(metric, asked)
    return [scale * math.fsum(scores) / len(scores) for scale in _SCALES] if scores else []


def agrees(metric: Metric, questions: Questions, metrics: Iterable[Metric]) -> bool:
    """Returns True if samples, or a group's parts, reproduce the published value; see `given`."""
    values = zip(given(metric, questions, metrics), _SCALES, strict=False)
    return any(is_close(value, metric.value, scale=scale) for value, scale in values)


def is_close(computed: float, value: float, *, scale: float = 1.0) -> bool:
    """Returns True if a value equals the published value up to the rounding of harnesses."""
    return math.isclose(computed, value, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * scale)
