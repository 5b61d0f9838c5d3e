"""A page that compares the checkpoints' answers to a few prompts."""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined

from resources.storage import storage
from tasks.generation.config import GenerationConfig
from tasks.generation.output import Output, decoded
from tasks.generation.prompts import Plan
from tasks.spec.names import how_many

SHOWN_PROMPTS = 50
_SHOWN_SAMPLES = 4
_SHOWN_CHARACTERS = 4000
_READERS = 4

Row = Mapping[str, Any]


@dataclass(frozen=True)
class WrittenBy:
    """A checkpoint with its output and its totals."""

    name: str
    output: Output
    totals: Mapping[str, int]


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt: its text, or its messages as role and text, and the answers of each checkpoint in order."""

    number: int
    id: str
    messages: tuple[tuple[str, str], ...]
    answers: tuple[Sequence[Row], ...]


def samples_uri(config: GenerationConfig) -> str:
    """Returns the path of the page."""
    return storage.join(storage.absolute(config.output_path), f"samples-{config.run_name}.html")


def shown_prompts(plan: Plan) -> list[int]:
    """Returns the numbers of the shown prompts: a random sample, deterministic for the same prompts."""
    return sorted(random.Random(plan.digest).sample(range(plan.prompts), min(SHOWN_PROMPTS, plan.prompts)))


def write_samples_page(config: GenerationConfig, plan: Plan, written: Sequence[WrittenBy]) -> str:
    """Writes the page once all answers are written, and returns its path."""
    numbers = shown_prompts(plan)
    drawn = [_rows(checkpoint.output, plan, numbers) for checkpoint in written]
    prompts = [_shown(number, [rows.get(number, []) for rows in drawn], chat=config.prompts.chat) for number in numbers]
    uri = samples_uri(config)
    storage.write_bytes(uri, rendered(config, plan, written, prompts).encode())
    return uri


def rendered(config: GenerationConfig, plan: Plan, written: Sequence[WrittenBy], prompts: Sequence[ShownPrompt]) -> str:
    """Returns the page. It has no scripts and loads nothing; prompts and answers are escaped."""
    templates = Environment(loader=PackageLoader("tasks.generation", "pages"), autoescape=True,
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


def _rows(output: Output, plan: Plan, numbers: Sequence[int]) -> dict[int, list[Row]]:
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
