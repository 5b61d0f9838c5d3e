"""Reads training texts from files in any store, in bounded memory: JSON lines, Parquet, plain text.

The files are named directly, or by the configuration of a training.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, BinaryIO, Literal

from resources.errors import BadInput
from resources.storage import storage
from resources.storage.listings import FileInfo
from resources.storage.parquet_batches import bounded_batches
from tasks.spec.loading import read_mapping

Form = Literal["lines", "parquet", "text"]
_FORMS: dict[str, Form] = {
    **{".jsonl": "lines", ".json": "lines", ".ndjson": "lines"},
    **{".parquet": "parquet", ".txt": "text", ".text": "text", ".md": "text"},
}
_PACKED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_BRACES = re.compile(r"\{([^{}]*)\}")
_PART_BYTES = 2**28  # size of the parts in which processes read an uncompressed file of lines
_BLOCK_BYTES = 2**20
_LONGEST_LINE_BYTES = 2**29
_PIECE_CHARACTERS = 2**20
_OVERLAP_CHARACTERS = 2**16  # of the pieces of a long text; the longest match across pieces
_ROWS = 256
_SECTIONS = ("training", "train_config")
_LEVANTER_FIELDS = {
    "text": {"text_key": "text"},
    "chat": {"messages_field": "messages"},
    "supervised": {"input_key": "input", "target_key": "target"},
}
"""Options of Levanter's formats that name a field, with their defaults."""


@dataclass(frozen=True)
class TextSource:
    """Training texts of a kind: a location, possibly with wildcards or braces, and the field with a document's text."""

    location: str
    field: str = "text"


@dataclass(frozen=True)
class TextPart:
    """A share of the texts for a single process: a file, or the lines of it that begin in a range of bytes."""

    uri: str
    form: Form
    field: str
    size: int
    mark: str
    start: int = 0
    end: int | None = None

    @property
    def bytes(self) -> int:
        return (self.size if self.end is None else self.end) - self.start


@dataclass
class ReadingCounts:
    """Statistics of reading a part: `unreadable` lines are no JSON, `without_text` have no text in the field."""

    documents: int = 0
    unreadable: int = 0
    without_text: int = 0
    keys: list[str] = field(default_factory=list)


def training_texts(uri: str) -> tuple[list[TextSource], list[str]]:
    """Returns the training texts, and the components without files, each with the reason. Components of weight 0 are
    only validated on, and left out. `uri`: YAML with a TrainAndEvaluateConfig, a TrainLmOnPodConfig or Levanter's own
    configuration."""
    content, _ = read_mapping(uri, kind="a file with a training's configuration")
    for name in _SECTIONS:
        within = content.get(name, content)
        content = read_mapping(within)[0] if isinstance(within, str) else within
    data = content.get("data")
    if not isinstance(data, Mapping):
        raise BadInput(
            expected=f"data of a training in {uri}", found=", ".join(map(str, content)), remedy="name its configuration"
        )
    sources: list[TextSource] = []
    not_read: list[str] = []
    for name, component in _components(data):
        source, fields = component.get("source") or {}, _fields_of(component)
        if source.get("train_urls") and fields:
            sources += [TextSource(str(url), field) for url in source["train_urls"] for field in fields]
        elif source.get("id"):
            not_read.append(f"{name}: data set {source['id']} of a hub; scan its files with --texts")
        else:
            not_read.append(f"{name}: no texts are named, only what was made of them")
    return sources, not_read


def parts_of(sources: Iterable[TextSource]) -> list[TextPart]:
    """Returns the parts of all files in the sources, without duplicates."""
    parts_by_file: dict[tuple[str, str], list[TextPart]] = {}
    listed: dict[str, dict[str, FileInfo]] = {}
    for source in sources:
        for location in _without_braces(source.location):
            for uri in _files(location):
                parts_by_file.setdefault((uri, source.field), _parts(_listed(uri, listed), source.field))
    return [part for parts in parts_by_file.values() for part in parts]


def texts_in(part: TextPart, reading: ReadingCounts) -> Iterator[str]:
    """Yields the texts of a part; texts longer than 1 MiB in overlapping pieces."""
    match part.form:
        case "lines":
            documents = _from_lines(part, reading)
        case "parquet":
            documents = _from_parquet(part, reading)
        case "text":
            yield from _from_text(part, reading)
            return
    for text in documents:
        reading.documents += 1
        yield from _pieces(text)
    if reading.documents == 0 and reading.without_text > 0 and part.field not in reading.keys:
        raise BadInput(
            expected=f"texts in the field {part.field!r} of {part.uri}",
            found=f"the fields {', '.join(reading.keys) or 'of no document'}",
            remedy="name the field with --field",
        )
    if reading.documents == 0 and reading.unreadable > 0:
        raise BadInput(
            expected=f"a document as JSON in each line of {part.uri}",
            found=f"{reading.unreadable:,} lines, none of which is a JSON document",
            remedy="write a document a line, in UTF-8; an array of documents is not read",
        )


def _without_braces(location: str) -> list[str]:
    choices = [_choices(inside) for inside in _BRACES.findall(location)]
    pattern = _BRACES.sub("{}", location)
    return [pattern.format(*chosen) for chosen in product(*choices)] if choices else [location]


def _choices(inside: str) -> list[str]:
    first, dots, last = inside.partition("..")
    if dots and first.isdecimal() and last.isdecimal():
        low, high = sorted((int(first), int(last)))
        return [str(number).zfill(len(first)) for number in range(low, high + 1)]
    return inside.split(",")


def _files(location: str) -> list[str]:
    uris = storage.matching_files(location)
    if storage.is_folder(location):
        uris = [uri for uri in uris if _ending(uri) is not None and not storage.basename(uri).startswith(".")]
    if not uris:
        raise BadInput(expected=f"training texts at {location}", found="none", remedy="check the location")
    return uris


def _ending(uri: str) -> tuple[Form, str | None] | None:
    name = storage.basename(uri).lower()
    packed = next((packed for packed in _PACKED if name.endswith(packed)), None)
    name = name.removesuffix(packed or "")
    for ending, form in _FORMS.items():
        if name.endswith(ending):
            return form, packed
    return None


def _listed(uri: str, folders: dict[str, dict[str, FileInfo]]) -> FileInfo:
    folder = storage.parent(uri)
    if folder not in folders:
        folders[folder] = {file.uri: file for file in storage.list_files(folder)}
    return folders[folder].get(uri) or storage.list_files(uri)[0]


def _parts(file: FileInfo, name: str) -> list[TextPart]:
    uri, known = file.uri, _ending(file.uri)
    if known is None:
        raise BadInput(
            expected=f"texts as {', '.join(_FORMS)}, but for Parquet also packed as {', '.join(_PACKED)}",
            found=uri,
            remedy="name such files, or a folder that holds them",
        )
    form, packed = known
    mark = file.checksum or f"{file.size} {file.modified}"
    whole = TextPart(uri, form, name, file.size, mark)
    if form != "lines" or packed or file.size <= _PART_BYTES:
        return [whole]
    ends = [*range(_PART_BYTES, file.size, _PART_BYTES), file.size]
    return [
        TextPart(uri, form, name, file.size, mark, start, end) for start, end in zip([0, *ends], ends, strict=False)
    ]


@contextmanager
def _unpacked(uri: str) -> Iterator[BinaryIO]:
    import pyarrow

    packed = (_ending(uri) or (None, None))[1]
    with storage.opened(uri) as file:
        if packed is None:
            yield io.BufferedReader(file, _BLOCK_BYTES)  # pyright: ignore[reportArgumentType]
        else:
            with pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), _PACKED[packed]) as stream:
                yield io.BufferedReader(stream, _BLOCK_BYTES)


def _from_lines(part: TextPart, reading: ReadingCounts) -> Iterator[str]:
    import orjson

    with _unpacked(part.uri) as file:
        for line in _lines(file, part):
            if not line.strip():
                continue
            try:
                document = orjson.loads(line)
            except orjson.JSONDecodeError:
                reading.unreadable += 1
                continue
            if (text := _text(document, part.field, reading)) is not None:
                yield text


def _lines(file: BinaryIO, part: TextPart) -> Iterator[bytes]:
    at, is_own = part.start, part.start == 0
    if not is_own:  # a line that continues here belongs to the part before
        at -= 1
        file.seek(at)
    while (part.end is None or at < part.end) and (line := file.readline(_LONGEST_LINE_BYTES + 1)):
        if len(line) > _LONGEST_LINE_BYTES:
            raise BadInput(
                expected=f"lines of JSON of at most {_LONGEST_LINE_BYTES:,} bytes in {part.uri}",
                found=f"a longer line after byte {at:,}",
                remedy="write a document per line",
            )
        if is_own:
            yield line
        is_own, at = True, at + len(line)


def _from_parquet(part: TextPart, reading: ReadingCounts) -> Iterator[str]:
    from pyarrow import ArrowInvalid, parquet

    with storage.opened(part.uri) as file:
        try:
            table = parquet.ParquetFile(file)
            if part.field not in table.schema_arrow.names:
                reading.keys, reading.without_text = list(table.schema_arrow.names), 1
                return
            for group in range(table.num_row_groups):
                for batch in bounded_batches(table, file, rows=_ROWS, columns=[part.field], group=group):
                    for value in batch.column(0).to_pylist():
                        if (text := _text({part.field: value}, part.field, reading)) is not None:
                            yield text
        except ArrowInvalid as error:
            raise BadInput(expected=f"Parquet in {part.uri}", found=str(error), remedy="write it again") from error


def _text(document: object, name: str, reading: ReadingCounts) -> str | None:
    value: Any = document.get(name) if isinstance(document, dict) else None
    if isinstance(value, list):
        turns = [turn.get("content") for turn in value if isinstance(turn, dict)]
        value = "\n".join(turn for turn in turns if isinstance(turn, str))
    if isinstance(value, str) and value:
        return value
    reading.without_text += 1
    reading.keys = reading.keys or (list(map(str, document)) if isinstance(document, dict) else [])
    return None


def _from_text(part: TextPart, reading: ReadingCounts) -> Iterator[str]:
    reading.documents = 1
    with _unpacked(part.uri) as file:
        rest = b""
        while block := file.read(_BLOCK_BYTES):
            rest += block
            yield rest.decode(errors="replace")
            rest = rest[-_OVERLAP_CHARACTERS:]


def _pieces(text: str) -> Sequence[str]:
    if len(text) <= _PIECE_CHARACTERS:
        return (text,)
    step = _PIECE_CHARACTERS - _OVERLAP_CHARACTERS
    return [text[start : start + _PIECE_CHARACTERS] for start in range(0, len(text) - _OVERLAP_CHARACTERS, step)]


def _components(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    weights = _weights(data.get("train_weights"))
    for name, component in (data.get("components") or {}).items():
        if weights is not None and not weights.get(name):
            continue
        children = component.get("children") if isinstance(component, Mapping) else None
        for part, child in (children or {"": component}).items():
            if isinstance(child, Mapping):
                yield f"{name}/{part}" if part else str(name), child


def _weights(given: Any) -> dict[str, float] | None:
    stages = [stage[1] for stage in given] if isinstance(given, list) else [given] if given else []
    if not stages:
        return None
    names = {name for stage in stages for name in stage}
    return {name: max(stage.get(name, 0.0) for stage in stages) for name in names}


def _fields_of(component: Mapping[str, Any]) -> list[str]:
    kinds = [component.get("format"), (component.get("source") or {}).get("format")]
    given = next((kind for kind in kinds if isinstance(kind, Mapping)), {})
    defaults = _LEVANTER_FIELDS.get(str(given.get("type", "text")), {})
    return [str(given.get(option, default)) for option, default in defaults.items()]
