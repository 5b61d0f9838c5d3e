"""The output of a generation: complete shards written once, a single set of parameters, a manifest at the end."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pyarrow.dataset
import pytest

from fakes.conditional_store import conditional_store
from resources.errors import BadInput
from resources.storage import storage
from tasks.generation.output import SCHEMA, AnswerFolder, AnswerRow, Format, decoded

ROW = AnswerRow(
    prompt_index=0,
    prompt_id="q0",
    sample=0,
    prompt="Q",
    text="ä",
    tool_calls=None,
    finish_reason="stop",
    prompt_tokens=3,
    completion_tokens=2,
    seed=None,
    checkpoint="run-1",
    checkpoint_digest="d",
    pool="warm",
    parameters="p",
    columns=None,
    error=None,
)
FAILED = replace(ROW, sample=1, text=None, prompt_tokens=None, completion_tokens=None, error="400: too long")


@pytest.fixture(params=["folder", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "folder":
        yield str(tmp_path / "out")
        return
    with conditional_store():
        yield "cond://bucket/out"


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_shard_is_written_once_and_later_writers_find_the_first(place: str, form: Format) -> None:
    output = AnswerFolder(place, form)
    assert output.written() == [] and not output.is_written(3)
    first = output.write(3, [ROW, FAILED])
    assert (first.rows, first.errors, first.prompt_tokens, first.completion_tokens) == (2, 1, 3, 2)
    content = storage.read_bytes(output.part(3))
    assert output.write(3, [replace(ROW, text="another sample")]) == first
    assert storage.read_bytes(output.part(3)) == content
    assert output.written() == [3] and output.is_written(3)
    rows = decoded(content, form)
    assert [row["text"] for row in rows] == ["ä", None] and rows[1]["error"] == "400: too long"
    assert list(rows[0]) == SCHEMA.names


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_numbers_of_a_shard_with_a_killed_writer_are_counted_again(tmp_path: Path, form: Format) -> None:
    output = AnswerFolder(str(tmp_path), form)
    first = output.write(0, [ROW, FAILED])
    [noted] = (tmp_path / "_summaries").iterdir()
    noted.unlink()
    assert output.summaries([0]) == [first]
    noted.write_text("{")
    assert output.summary(0) == first


def test_output_of_other_parameters_is_refused_with_what_differs(place: str) -> None:
    output = AnswerFolder(place, "parquet")
    identity = {"parameters": {"sampling": {"seed": 1, "stop": []}}, "prompts": {"digest": "a"}}
    output.begin(identity)
    output.begin(identity)
    with pytest.raises(BadInput, match=r"sampling\.seed: 2 now, 1 there; prompts\.digest: \"b\" now"):
        output.begin({"parameters": {"sampling": {"seed": 2, "stop": []}}, "prompts": {"digest": "b"}})


def test_manifest_adds_up_what_every_shard_holds(place: str) -> None:
    output = AnswerFolder(place, "jsonl")
    for number in range(2):
        output.write(number, [ROW, FAILED])
    manifest = output.conclude({"parameters": {"x": 1}}, shards=2)
    assert json.loads(storage.read_bytes(storage.join(place, "_manifest.json"))) == manifest
    assert manifest["totals"]["rows"] == 4 and manifest["totals"]["errors"] == 2
    assert [shard["file"] for shard in manifest["shards"]] == ["part-00000.jsonl", "part-00001.jsonl"]
    assert manifest["schema_version"] == 1 and manifest["parameters"] == {"x": 1}


def test_folder_is_a_data_set_with_columns_as_in_the_how_to(tmp_path: Path) -> None:
    output = AnswerFolder(str(tmp_path / "out"), "parquet")
    output.begin({})
    output.write(0, [ROW])
    output.write(1, [FAILED])
    output.conclude({}, shards=2)
    assert pyarrow.dataset.dataset(output.folder).to_table().num_rows == 2
    document = Path(__file__).parents[3] / "docs" / "how-to" / "generate-text-in-bulk.md"
    tables = "\n".join(line for line in document.read_text().splitlines() if line.startswith("| `"))
    assert re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in tables.splitlines())) == SCHEMA.names
