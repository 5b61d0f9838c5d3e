"""The page with samples: its selection of prompts, and texts of prompts and models that stay texts."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tasks.generation.config import GenerationConfig
from tasks.generation.output import SHOWN_PROMPTS, AnswerFolder, AnswerRow, Format, WrittenBy, write_samples_page
from tasks.generation.prompts import plan_prompts

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
