"""Samples: what was asked, answered and scored, question by question, in one form for every evaluator.

They lie beside the harness's own output, one line of JSON a question, gzipped. Two runs of the same benchmark are
compared question by question with them.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, FiniteFloat, ValidationError

from resources.errors import StorageError
from resources.storage import storage
from tasks.records.details import Whole, bounded

SAMPLES_NAME = "samples.jsonl.gz"
"""Name of the file in an attempt's folder."""
MOST_BYTES_OF_A_LINE = 64 << 20
"""A million tokens of prompt and answer have about 10 MB."""


def encodable(text: str) -> str:
    """Half of a surrogate pair, which JSON can carry from an endpoint and no file can hold, becomes a question mark."""
    return text.encode(errors="replace").decode()


_Text = Annotated[str, AfterValidator(encodable)]


class Sample(BaseModel):
    """One question of a benchmark, with what came of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    benchmark: str
    """Name its metrics are published under."""
    id: str
    """Name of the question, in every run of the benchmark."""
    prompt: _Text
    """The question; with what stood before it where its harness does not tell the two apart."""
    output: _Text
    """The model's answer; for a choice, the one it found likeliest."""
    target: _Text | None
    """The right answer, or the output it was compared with."""
    scores: Annotated[dict[str, float], AfterValidator(bounded)]
    """By metric; empty for a question that was left out."""
    ratios: Annotated[dict[str, tuple[float, float]], AfterValidator(bounded)] = {}
    """Metrics that are a ratio of sums, such as perplexities: log-likelihood of the text, and its words or bytes."""
    cluster: str | None = None
    """Name of the passage or document that it shares with other questions; empty where it stands alone."""
    log_likelihoods: Annotated[tuple[FiniteFloat, ...], AfterValidator(bounded)] = ()
    """Log-likelihoods that its scores were made of, request by request; empty where texts are scored."""
    finish: str | None = None
    """Reason for the end of its answers: `length` if one was cut at the limit; empty where nothing is generated."""
    truncated: bool = False
    """True if its prompt was cut on the left to fit."""
    choices: tuple[_Text, ...] = ()
    """Texts of its choices, in the order of `log_likelihoods` where these begin with one of each."""
    context: _Text = ""
    """System prompt, description and examples that stood before the question; empty if none did, or none is known."""
    tokens: Whole | None = None
    """Tokens that were generated for its answer; None where none are, or nobody counted them."""

    @property
    def asked(self) -> str:
        """Its whole prompt."""
        return self.context + self.prompt


def write_samples(path: Path, samples: Iterable[Sample]) -> int:
    """Writes samples to a new file, and says how many."""
    number = 0
    try:
        # No name and time in the header: the same samples are the same bytes.
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
    """The samples in a file of an attempt; raises what `samples_content` and `parsed_samples` do."""
    yield from parsed_samples(samples_content(uri), uri=uri)


def samples_content(uri: str) -> bytes:
    """The content of `<cell>/<attempt>/samples.jsonl.gz`; no link that leads out of the cell is followed.

    Raises:
        FileNotFoundError: there is none.
    """
    return storage.read_bytes(uri, within=storage.parent(storage.parent(uri)))


def parsed_samples(content: bytes, *, uri: str) -> Iterator[Sample]:
    """The samples in the content of a file; raises `StorageError` if it is damaged."""
    for number, line in enumerate(sample_lines(content, uri=uri), 1):
        try:
            yield Sample.model_validate_json(line)
        except ValidationError as error:
            raise damaged_samples(uri, f"line {number:,}: {error.errors(include_input=False)[0]['msg']}") from error


def sample_lines(content: bytes, *, uri: str) -> Iterator[bytes]:
    """The lines in the content of a file with samples.

    Raises:
        StorageError: it is damaged, or a line has more than 64 MiB.
    """
    try:
        with gzip.open(io.BytesIO(content), "rb") as lines:
            while line := lines.readline(MOST_BYTES_OF_A_LINE + 1):
                if len(line) > MOST_BYTES_OF_A_LINE:
                    raise damaged_samples(uri, f"a line of more than {MOST_BYTES_OF_A_LINE:,} bytes")
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise damaged_samples(uri, str(error)) from error


def damaged_samples(uri: str, found: str) -> StorageError:
    """The error that says what is wrong with a file of samples."""
    return StorageError(
        expected=f"samples, one line of JSON each, in {uri}",
        found=found.partition("\n")[0],
        remedy="evaluate the cell again: delete its record.json first",
    )
