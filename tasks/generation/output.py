"""The output folder of a generation: its parameters, the shards of answers, each written once, and the manifest."""

from __future__ import annotations

import bisect
import hashlib
import io
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from jinja2 import Environment, PackageLoader, StrictUndefined

from resources.errors import BadInput, StorageError
from resources.storage import storage
from tasks.generation.config import GenerationConfig
from tasks.generation.prompts import PromptPlan
from tasks.spec.names import how_many

BEGUN, MANIFEST, SUMMARIES = "_generation.json", "_manifest.json", "_summaries"  # data set readers skip names with _
_PART = re.compile(r"part-(\d{5,})\.(parquet|jsonl)")
_READERS = 16
Format = Literal["parquet", "jsonl"]
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRow:
    """A sample of a prompt. `text` is unset if the model only called tools, or on errors."""

    prompt_index: int
    """Number of the prompt over all shards, from 0."""
    prompt_id: str
    """Content of `id_column`, else the number."""
    sample: int
    """Number among the samples of the prompt, from 0."""
    prompt: str
    """The prompt as sent: a text, or messages as JSON."""
    text: str | None = None
    tool_calls: str | None = None
    """Tool calls, as JSON."""
    finish_reason: str | None = None
    """stop, length or tool_calls."""
    prompt_tokens: int | None = None
    """Tokens of the prompt, as counted by the engine."""
    completion_tokens: int | None = None
    seed: int | None = None
    checkpoint: str
    checkpoint_digest: str
    """Digest over its weights, tokenizer and config."""
    pool: str
    """Name of the kept pool that answered."""
    parameters: str
    """Hash of all parameters that determine the requests; the manifest has them in full."""
    columns: str | None = None
    """Kept columns, as JSON."""
    error: str | None = None
    """Reason for a missing answer: refused, or too long for the context."""


_TYPES = {"int": pa.int64(), "str": pa.string()}


def _field(name: str, annotation: str) -> pa.Field:
    kind, _, optional = annotation.partition(" | ")
    return pa.field(name, _TYPES[kind], nullable=bool(optional))


SCHEMA = pa.schema(
    [_field(field.name, str(field.type)) for field in fields(AnswerRow)],
    metadata={"assay.schema_version": str(SCHEMA_VERSION)},
)
"""Columns of a Parquet file with answers."""


def encoded(rows: Sequence[AnswerRow], form: Format) -> bytes:
    """Encodes rows as a file; deterministic."""
    if form == "jsonl":
        return b"".join(orjson.dumps(row) + b"\n" for row in rows)
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    target = io.BytesIO()
    pq.write_table(pa.table(columns, schema=SCHEMA), target, compression="zstd")
    return target.getvalue()


def decoded(content: bytes, form: Format) -> list[dict[str, Any]]:
    """Decodes the rows of a file."""
    if form == "jsonl":
        return [orjson.loads(line) for line in content.splitlines()]
    return pq.read_table(io.BytesIO(content)).to_pylist()


@dataclass(frozen=True)
class ShardSummary:
    """Statistics of a written shard."""

    number: int
    rows: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class AnswerFolder:
    """The folder of a checkpoint's answers."""

    folder: str
    form: Format

    def part(self, number: int) -> str:
        return storage.join(self.folder, f"part-{number:05d}.{self.form}")

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Stores the generation's identity, or raises BadInput if the folder has another."""
        place = storage.join(self.folder, BEGUN)
        requested = orjson.loads(orjson.dumps(identity))
        content = orjson.dumps(requested, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
        # Checked first: not all fake stores honor conditional writes.
        if not storage.exists(place) and storage.create_bytes(place, content):
            return
        try:
            standing = orjson.loads(storage.read_bytes(place))
        except ValueError as error:
            raise StorageError(expected=f"JSON in {place}", found=str(error), remedy="delete the folder") from error
        if differing := list(_differences(requested, standing)):
            raise BadInput(
                expected=f"the parameters that {self.folder} was started with",
                found="; ".join(differing),
                remedy="choose another output folder, or the parameters that are noted there",
            )

    def write(self, number: int, rows: Sequence[AnswerRow]) -> ShardSummary:
        """Writes a shard unless it exists; returns the statistics of the existing file."""
        content = encoded(rows, self.form)
        # Checked first for stores that would overwrite it.
        if self.is_written(number) or not storage.create_bytes(self.part(number), content):
            return self.summary(number)
        return self._summarized(number, [asdict(row) for row in rows], content)

    def is_written(self, number: int) -> bool:
        return storage.exists(self.part(number))

    def written(self) -> list[int]:
        names = [storage.basename(file.uri) for file in storage.list_files(self.folder)]
        matches = (_PART.fullmatch(name) for name in names)
        return sorted(int(match[1]) for match in matches if match and match[2] == self.form)

    def summary(self, number: int) -> ShardSummary:
        """Returns the statistics of a written shard; recomputed if its writer was killed before it stored them."""
        try:
            return ShardSummary(**orjson.loads(storage.read_bytes(self._summary(number))))
        except (FileNotFoundError, ValueError, TypeError):
            content = storage.read_bytes(self.part(number))
            return self._summarized(number, decoded(content, self.form), content)

    def _summarized(self, number: int, rows: Sequence[Mapping[str, Any]], content: bytes) -> ShardSummary:
        summary = ShardSummary(
            number=number,
            rows=len(rows),
            errors=sum(row["error"] is not None for row in rows),
            prompt_tokens=sum(row["prompt_tokens"] or 0 for row in rows),
            completion_tokens=sum(row["completion_tokens"] or 0 for row in rows),
            bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
        )
        storage.write_bytes(self._summary(number), orjson.dumps(asdict(summary)))
        return summary

    def summaries(self, numbers: Sequence[int]) -> list[ShardSummary]:
        with ThreadPoolExecutor(_READERS) as threads:
            return list(threads.map(self.summary, numbers))

    def conclude(self, identity: Mapping[str, Any], *, shards: int) -> dict[str, Any]:
        """Writes the manifest once all shards are written; returns it."""
        summaries = self.summaries(range(shards))
        names = ("rows", "errors", "prompt_tokens", "completion_tokens", "bytes")
        manifest = {
            "schema_version": SCHEMA_VERSION,
            **identity,
            "totals": {name: sum(getattr(summary, name) for summary in summaries) for name in names},
            "shards": [{"file": storage.basename(self.part(each.number)), **asdict(each)} for each in summaries],
        }
        content = orjson.dumps(manifest, option=orjson.OPT_INDENT_2)
        storage.write_bytes(storage.join(self.folder, MANIFEST), content)
        return manifest

    def _summary(self, number: int) -> str:
        return storage.join(self.folder, SUMMARIES, f"part-{number:05d}.json")


def _differences(requested: Any, standing: Any, place: str = "") -> Iterable[str]:
    if isinstance(requested, dict) and isinstance(standing, dict):
        for name in dict.fromkeys([*requested, *standing]):
            yield from _differences(requested.get(name), standing.get(name), f"{place}.{name}" if place else name)
    elif requested != standing:
        yield f"{place}: {_short(requested)} now, {_short(standing)} there"


def _short(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."


SHOWN_PROMPTS = 50
_SHOWN_SAMPLES = 4
_SHOWN_CHARACTERS = 4000

Row = Mapping[str, Any]


@dataclass(frozen=True)
class WrittenBy:
    """A checkpoint with its output and its totals."""

    name: str
    output: AnswerFolder
    totals: Mapping[str, int]


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt: its text, or its messages as role and text, and the answers of each checkpoint in order."""

    number: int
    id: str
    messages: tuple[tuple[str, str], ...]
    answers: tuple[Sequence[Row], ...]


def write_samples_page(config: GenerationConfig, plan: PromptPlan, written: Sequence[WrittenBy]) -> str:
    """Writes the page once all answers are written, and returns its path; the same prompts give the same sample."""
    numbers = sorted(random.Random(plan.digest).sample(range(plan.prompts), min(SHOWN_PROMPTS, plan.prompts)))
    drawn = [_rows(checkpoint.output, plan, numbers) for checkpoint in written]
    prompts = [_shown(number, [rows.get(number, []) for rows in drawn], chat=config.prompts.chat) for number in numbers]
    uri = storage.join(storage.absolute(config.output_path), f"samples-{config.run_name}.html")
    storage.write_bytes(uri, rendered(config, plan, written, prompts).encode())
    return uri


def rendered(
    config: GenerationConfig, plan: PromptPlan, written: Sequence[WrittenBy], prompts: Sequence[ShownPrompt]
) -> str:
    """Returns the page. It has no scripts and loads nothing; prompts and answers are escaped."""
    templates = Environment(loader=PackageLoader("tasks.reports"), autoescape=True,
                            undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    templates.filters |= {"clipped": _clipped, "pretty": _pretty}
    return templates.get_template("samples.html.j2").render(
        title=f"Samples of {config.run_name}",
        place=config.place,
        written=written,
        prompts=prompts,
        drawn=len(prompts) < plan.prompts,
        counted=f"{len(prompts)} of {how_many(plan.prompts, 'prompt')}",
        samples=config.sampling.samples,
        shown_samples=min(config.sampling.samples, _SHOWN_SAMPLES),
        sampling=_pretty(config.sampling.model_dump(mode="json", exclude_defaults=True)),
    )


def _rows(output: AnswerFolder, plan: PromptPlan, numbers: Sequence[int]) -> dict[int, list[Row]]:
    first_prompts = [shard.first_prompt for shard in plan.shards]
    shards = sorted({bisect.bisect_right(first_prompts, number) - 1 for number in numbers})
    shown = frozenset(numbers)

    def read(shard: int) -> list[Row]:
        rows = decoded(storage.read_bytes(output.part(plan.shards[shard].number)), output.form)
        return [row for row in rows if row["prompt_index"] in shown and row["sample"] < _SHOWN_SAMPLES]

    by_number: dict[int, list[Row]] = {number: [] for number in numbers}
    with ThreadPoolExecutor(_READERS) as threads:
        for rows in threads.map(read, shards):
            for row in rows:
                by_number[row["prompt_index"]].append(row)
    return by_number


def _shown(number: int, answers: Sequence[Sequence[Row]], *, chat: bool) -> ShownPrompt:
    first = next((rows[0] for rows in answers if rows), {"prompt_id": str(number), "prompt": ""})
    messages = tuple(_messages(first["prompt"])) if chat else (("", first["prompt"]),)
    return ShownPrompt(number, first["prompt_id"], messages, tuple(answers))


def _messages(prompt: str) -> Iterator[tuple[str, str]]:
    try:
        messages = orjson.loads(prompt)
        for message in messages:
            content = message.get("content")
            yield str(message.get("role", "")), content if isinstance(content, str) else _pretty(content)
    except (ValueError, AttributeError, TypeError):
        yield "", prompt


def _clipped(text: str) -> str:
    more = len(text) - _SHOWN_CHARACTERS
    return f"{text[:_SHOWN_CHARACTERS]} … {more:,} characters more" if more > 0 else text


def _pretty(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
