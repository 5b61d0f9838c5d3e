"""The output of a generation: shards written once, a manifest at the end, and a page of samples."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest

from fakes.conditional_store import conditional_store
from resources.errors import BadInput
from resources.storage import storage
from tasks.generation.config import GenerationConfig
from tasks.generation.output import (
    SCHEMA,
    SHOWN_PROMPTS,
    AnswerFolder,
    AnswerRow,
    Format,
    WrittenBy,
    decoded,
    write_samples_page,
)
from tasks.generation.prompts import plan_prompts

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


HOSTILE = (
    "<script>alert(1)</script>",
    "</pre></main><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "<style>*{display:none}</style><!--",
    '"><a href="javascript:alert(1)">x</a>',
    "&lt;b&gt;\u202eabc\x00",
)
ELEMENTS = {
    *("html", "head", "meta", "link", "title", "style", "body", "main", "h1", "h2", "h3", "p", "section", "div"),
    *("table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre", "article"),
}


class Seen(HTMLParser):
    """Elements of a page, and texts in elements for prompts and models."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.headings: list[str] = []
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag
        self.elements.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "pre":
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "pre":
            self.texts[-1] += data.removeprefix("\n")
        if self._open == "h2":
            self.headings.append(data)


def answer(checkpoint: str, index: int, sample: int, prompt: str, **fields: Any) -> AnswerRow:
    given = {
        **{"text": f"{checkpoint} says {index}.{sample}", "tool_calls": None, "finish_reason": "stop"},
        **{"prompt_tokens": 3, "completion_tokens": 2, "seed": None, "columns": None, "error": None},
        **fields,
    }
    return AnswerRow(
        prompt_index=index,
        prompt_id=str(index),
        sample=sample,
        prompt=prompt,
        checkpoint=checkpoint,
        checkpoint_digest="d",
        pool="p",
        parameters="h",
        **given,
    )


def page_of(
    folder: Path, answers: dict[str, list[AnswerRow]], *, prompts: int, form: Format = "parquet", chat: bool = False
) -> str:
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": "p"}) + "\n" for _ in range(prompts)))
    config = GenerationConfig.model_validate(
        {
            "model_path": "runs/a",
            "prompts": {"files": [str(folder / "prompts.jsonl")], "chat": chat},
            "output_path": str(folder / "generated"),
            "output_format": form,
            "prompts_per_shard": 10,
            "sampling": {"samples": 1 + max(row.sample for rows in answers.values() for row in rows)},
        }
    )
    plan = plan_prompts(config.prompts, prompts_per_shard=config.prompts_per_shard)
    written = []
    for name, rows in answers.items():
        output = AnswerFolder(str(folder / "generated" / name), form)
        for shard in plan.shards:
            inside = range(shard.first_prompt, shard.first_prompt + shard.prompts)
            output.write(shard.number, [row for row in rows if row.prompt_index in inside])
        totals = {"rows": len(rows), "errors": 0, "completion_tokens": 2 * len(rows)}
        written.append(WrittenBy(name, output, totals))
    return Path(write_samples_page(config, plan, written)).read_text()


@pytest.mark.parametrize("chat", [False, True])
def test_samples_page_shows_hostile_prompts_answers_and_errors_as_texts(tmp_path: Path, chat: bool):
    def put(text: str) -> str:
        return json.dumps([{"role": "user", "content": text}]) if chat else text

    rows = [
        answer("a-1", index, sample, put(text), **({"error": text, "text": None} if sample else {"text": text}))
        for index, text in enumerate(HOSTILE)
        for sample in (0, 1)
    ]
    page = page_of(tmp_path, {"a-1": rows}, prompts=len(HOSTILE), chat=chat)
    seen = Seen(page)
    assert set(seen.elements) <= ELEMENTS
    assert not {name for name in seen.attributes if name.startswith("on")}
    assert "default-src 'none'" in page
    for text in HOSTILE:  # as a prompt, as an answer, as an error
        assert seen.texts.count(text) == 3, text


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_samples_page_shows_the_same_fifty_prompts_of_each_checkpoint_and_each_time(tmp_path: Path, form: Format):
    answers = {
        name: [answer(name, index, sample, f"prompt {index}") for index in range(203) for sample in range(6)]
        for name in ("a-1", "a-2")
    }
    first = page_of(tmp_path, answers, prompts=203, form=form)
    seen = Seen(first)
    shown = [int(heading.split()[1]) for heading in seen.headings]
    assert len(shown) == SHOWN_PROMPTS and shown == sorted(set(shown)) and shown[-1] > 100
    for index in shown:
        for name in answers:
            assert [f"{name} says {index}.{sample}" in seen.texts for sample in range(6)] == [True] * 4 + [False] * 2
    assert "the first 4 of 6 samples" in first
    assert page_of(tmp_path, answers, prompts=203, form=form) == first


def test_samples_page_shortens_what_no_page_has_room_for_and_says_so(tmp_path: Path):
    rows = [answer("a-1", 0, 0, "p" * 10_000, text="t" * 5_000, finish_reason="length", completion_tokens=1)]
    page = page_of(tmp_path, {"a-1": rows}, prompts=1)
    assert "6,000 characters more" in page and "1,000 characters more" in page
    assert "length · 1 token<" in page
    assert len(page) < 20_000
