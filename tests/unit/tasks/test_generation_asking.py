"""Shards of a generation: their queue, and requests that give every prompt and sample a row despite errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fakes.engine import FakeEngine, Faults
from pools.endpoint import RunningModel
from resources.errors import EndpointUnusable
from tasks.generation.config import PromptsConfig, SamplingConfig
from tasks.generation.output import AnswerRow
from tasks.generation.queue import PromptSource, Shard, ShardProgress, ShardQueue
from tasks.generation.worker import Asker, SharedColumns, client_of

ORIGIN = SharedColumns("m", "digest", "warm", "hash")
ROWS = [{"prompt": f"Question {number}?", "name": f"q{number}"} for number in range(5)]


@asynccontextmanager
async def asking(
    engine: FakeEngine, *, prompts: dict[str, Any] | None = None, sampling: dict[str, Any] | None = None, slots: int = 3
) -> AsyncIterator[Asker]:
    running = RunningModel(f"{engine.url}/v1", "m", "", slots, True, 10.0, direct=True)
    async with client_of(running, in_flight=slots) as client:
        yield Asker(
            client,
            prompts=PromptsConfig.model_validate({"files": ["a.jsonl"], **(prompts or {})}),
            sampling=SamplingConfig.model_validate(sampling or {}),
            origin=ORIGIN,
            in_flight=slots,
        )


async def answers(engine: FakeEngine, rows: Sequence[dict[str, Any]] = ROWS, **options: Any) -> list[AnswerRow]:
    async with asking(engine, **options) as asker:
        return await asker.answers(rows, first_prompt=100)


def bodies(engine: FakeEngine) -> list[dict[str, Any]]:
    return [json.loads(body) for body in engine.bodies]


async def test_every_sample_of_every_prompt_has_a_row_in_order_and_slots_are_kept() -> None:
    async with FakeEngine(models=("m",), faults=Faults(delay_seconds=0.01)) as engine:
        rows = await answers(
            engine,
            prompts={"id_column": "name", "keep": ["name"], "template": "Say: {{ prompt }}"},
            sampling={"samples": 2, "seed": 7, "temperature": 0.5, "max_tokens": 4, "stop": ["#"]},
        )
        assert engine.stats.max_in_flight == 3
        asked = bodies(engine)
    assert [(row.prompt_index, row.prompt_id, row.sample, row.seed) for row in rows] == [
        (100 + number, f"q{number}", sample, 7 + sample) for number in range(5) for sample in range(2)
    ]
    first = rows[0]
    assert (first.prompt, first.columns) == ("Say: Question 0?", '{"name": "q0"}')
    assert (first.finish_reason, first.completion_tokens, first.error) == ("length", 4, None)
    assert first.prompt_tokens == len("Say: Question 0?")
    assert (first.checkpoint, first.checkpoint_digest, first.pool, first.parameters) == ("m", "digest", "warm", "hash")
    assert len(first.text or "") == 4
    assert sorted(body["seed"] for body in asked) == [7] * 5 + [8] * 5
    assert {(body["temperature"], body["max_tokens"], *body["stop"]) for body in asked} == {(0.5, 4, "#")}


async def test_conversations_are_asked_with_tools_and_schema_as_they_were_given() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    messages = [{"role": "user", "content": "Hi", "name": None}]
    async with FakeEngine(models=("m",)) as engine:
        rows = await answers(
            engine,
            [{"messages": messages}, {"messages": "Hello"}],
            prompts={"chat": True, "system": "Be kind."},
            sampling={"response_format": schema, "tools": tools, "extra_body": {"top_k": 5}},
        )
        assert {*engine.targets} == {"/v1/chat/completions"}
        first = bodies(engine)[0]
    assert first["messages"] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert (first["response_format"], first["tools"], first["top_k"]) == (schema, tools, 5)
    assert json.loads(rows[1].prompt)[1] == {"role": "user", "content": "Hello"}
    assert all(row.text and row.error is None for row in rows)


async def test_prompts_that_cannot_be_answered_are_rows_with_their_error_and_are_counted() -> None:
    rows = [{"prompt": "fine"}, {"prompt": "x" * 200}, {"other": 1}, {"prompt": 3}]
    progress = ShardProgress()
    async with (
        FakeEngine(models=("m",), max_model_len=100) as engine,
        asking(engine, sampling={"max_tokens": 8, "samples": 2}) as asker,
    ):
        answers = await asker.answers(rows, first_prompt=0, progress=progress)
        assert engine.stats.requests == 4
    assert [row.error is None for row in answers] == [True] * 2 + [False] * 6
    assert "maximum context length is 100" in str(answers[2].error) and str(answers[2].error).startswith("400: ")
    assert "expected a column prompt, found other" in str(answers[4].error)
    assert "expected a text as the prompt, found int" in str(answers[6].error)
    assert (progress.rows, progress.errors) == (8, 6)
    assert {row.text for row in answers[2:]} == {None}


@pytest.mark.parametrize("faults", [{"refuse": 1}, {"status_count": 1, "status": 503}, {"die_mid_body": 1}])
async def test_a_pool_that_stumbles_is_asked_again(faults: dict[str, Any]) -> None:
    async with FakeEngine(models=("m",), faults=Faults(**faults)) as engine:
        rows = await answers(engine)
    assert [row.error for row in rows] == [None] * 5


@pytest.mark.parametrize("faults", [{"status_count": 1000, "status": 404}, {"malformed": 1000}])
async def test_a_pool_that_does_not_answer_is_no_error_of_the_prompts(faults: dict[str, Any]) -> None:
    async with FakeEngine(models=("m",), faults=Faults(**faults)) as engine:
        with pytest.raises(EndpointUnusable, match="the pool to answer"):
            await answers(engine)


async def test_next_shard_begins_while_last_answers_of_a_shard_are_awaited() -> None:
    seen: list[int] = []
    async with FakeEngine(models=("m",), faults=Faults(delay_seconds=0.05)) as engine, asking(engine) as asker:
        progress = ShardProgress()
        await asker.answers(ROWS, first_prompt=0, progress=progress, on_all_asked=lambda: seen.append(progress.rows))
    assert len(seen) == 1 and seen[0] < len(ROWS)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"samples": 2, "temperature": 0}, "gives the same answer 2 times"),
        ({"extra_body": {"model": "x"}}, "model is set by the generation"),
        ({"samples": 0}, "greater than or equal to 1"),
    ],
)
def test_sampling_that_cannot_be_meant_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingConfig.model_validate(fields)


SHARDS = [Shard(number, PromptSource("a.jsonl", "jsonl"), number * 2, 2, number * 2) for number in range(3)]


def test_restarted_worker_gives_back_its_shards_and_late_words_are_ignored() -> None:
    queue = ShardQueue(SHARDS, max_deliveries=10)
    queue.begin("a")
    lost = queue.lend("a")
    assert lost is not None and lost.item == SHARDS[0]
    queue.advance("a", {lost.lease_id: ShardProgress(1, 10, 0)})
    assert (queue.state().progress.rows, queue.state().leased) == (1, 1)
    queue.begin("a")
    assert (queue.state().progress.rows, queue.state().leased, queue.state().waiting) == (0, 0, 3)
    assert queue.advance("a", {lost.lease_id: ShardProgress(2, 20, 0)}) == [lost.lease_id]
    assert queue.state().progress.rows == 0


def test_written_shards_are_counted_once_for_any_finisher() -> None:
    queue = ShardQueue(SHARDS[:1], max_deliveries=10)
    first = queue.lend("a")
    assert first is not None
    queue.begin("a")
    second = queue.lend("b")
    assert second is not None and second.item == SHARDS[0]
    queue.finish("a", first, ShardProgress(2, 20, 1, "400: no"))
    assert queue.state().progress.rows == 0
    queue.finish("b", second, ShardProgress(2, 20, 1, "400: no"))
    state = queue.state()
    assert (state.progress, state.done) == (ShardProgress(2, 20, 1, "400: no"), 1)
    assert state.left == 0 and queue.lend("b") is None


def test_unfinishable_shard_is_set_aside_with_the_last_reason() -> None:
    queue = ShardQueue(SHARDS[:1], max_deliveries=2)
    for _ in range(2):
        lease = queue.lend("a")
        assert lease is not None
        queue.give_back("a", lease, "the store is gone")
    assert queue.state().dead == ("shard 0: the store is gone",) and queue.state().left == 0


def test_shard_with_deleted_prompts_is_not_tried_again() -> None:
    queue = ShardQueue(SHARDS[:1], max_deliveries=10)
    lease = queue.lend("a")
    assert lease is not None
    queue.give_back("a", lease, "0 rows from row 0 on", hopeless=True)
    assert queue.state().dead == ("shard 0: 0 rows from row 0 on",) and queue.lend("a") is None
