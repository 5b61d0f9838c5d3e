"""Paths of an engine that a client of the pool can reach through the proxy, and paths that it cannot reach."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fakes.engine import FakeEngine
from fakes.malformed import OF_TOKENS
from fakes.models import write_checkpoint
from fakes.proxy import CLIENT_KEY, FakeReplica, RunningProxy, replica_of, running_proxy, state_of
from pools.protocol import RequestCounters
from pools.proxy.connections.upstream import Upstream

MODEL, TOKENS = "m", "asked-for-tokens"
ENGINES_OWN = ("collective_rpc", "pause", "sleep", "reset_prefix_cache")
GENERATE = "/inference/v1/generate"
WEIGHED = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 0, "skip_reading_prefix_cache": False}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path_factory.mktemp("proxy")) as running:
        yield running


@pytest.fixture
async def engine(proxy: RunningProxy) -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        proxy.tell(state_of(MODEL, engine))
        yield engine


async def _sent(proxy: RunningProxy, target: str, body: bytes) -> int:
    # Sent raw: HTTP clients would normalize the target.
    reader, writer = await asyncio.open_connection(proxy.address.host, proxy.address.port)
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {CLIENT_KEY}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


@pytest.mark.parametrize(
    "target",
    [
        "/cells%2Fa%2Fb%2Fv1%2Fcompletions?/x/y/{path}",
        "/cells/a/b%2Fv1%2Fcompletions?/x/{path}",
        "http://x/cells%2Fa%2Fb%2Fv1%2Fcompletions?/x/y/{path}",
        "/cells/a/b/v1/completions/../../{path}",
        "/v1/completions?/../{path}",
        "/inference/v1/generate?/../{path}",
        "/inference/v1/{path}",
        "/%76%31/completions",
        "/v1/{path}",
        "/{path}",
    ],
)
@pytest.mark.parametrize("path", ENGINES_OWN)
async def test_key_of_a_client_never_reaches_the_engines_own_calls(
    proxy: RunningProxy, engine: FakeEngine, tmp_path: Path, target: str, path: str
) -> None:
    other = write_checkpoint(tmp_path / "other", seed=7)
    label = engine.label
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(other)}}
    await _sent(proxy, target.format(path=path), json.dumps({"model": MODEL, "prompt": "a", **call}).encode())
    assert (engine.label, engine.stats.reloads, engine.stats.prefix_cache_resets) == (label, 0, 0)
    assert await _sent(proxy, "/v1/completions", json.dumps({"model": MODEL, "prompt": "a"}).encode()) == 200


@pytest.mark.parametrize("target", ["/v1%2Fcompletions", "/%76%31/completions", "/cells/a%2Fb/c/v1/completions"])
async def test_path_with_an_encoded_character_is_refused(proxy: RunningProxy, engine: FakeEngine, target: str) -> None:
    assert await _sent(proxy, target, json.dumps({"model": MODEL, "prompt": "a"}).encode()) == 400
    assert engine.stats.requests == 0


async def test_query_of_a_client_does_not_reach_the_engine(proxy: RunningProxy, engine: FakeEngine) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    for path in ("/v1/completions", "/cells/a/b/v1/completions"):
        assert await _sent(proxy, f"{path}?api-version=1&/collective_rpc", body) == 200
    assert list(engine.targets) == ["/v1/completions"] * 2


async def test_tokens_are_weighed_for_a_cell_as_the_engine_weighs_them_and_replayed_from_the_journal(
    tmp_path: Path,
) -> None:
    # Outside a cell, sampled requests are sampled again, whether or not fields accompany their sampling parameters.
    headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
    weighed = {"model": MODEL, "token_ids": list(range(40, 80)), "sampling_params": WEIGHED}
    drawn = {"model": MODEL, "token_ids": [40, 41], "temperature": 0, "sampling_params": {"temperature": 1.0}}
    async with FakeEngine() as engine, httpx.AsyncClient(headers=headers) as http:
        with running_proxy(tmp_path, journal=tmp_path / "journal.sqlite") as proxy:
            proxy.tell(state_of(MODEL, engine))
            proxy.client.open_cell("cell", "first", mirror=None)
            url = f"{proxy.url}/cells/cell/first{GENERATE}"
            assert (await http.post(url, json=weighed, headers={"Authorization": "Bearer no"})).status_code == 401
            first = await http.post(url, json=weighed)
            assert (first.status_code, len(first.json()["prompt_logprobs"])) == (200, 40)
            own = (await http.post(f"{engine.url}{GENERATE}", json=weighed)).json()["prompt_logprobs"]
            assert len(own) == 8, "the engine has read two blocks of 16 before"
            assert own[1:] == first.json()["prompt_logprobs"][-7:]
            engine.faults.malformation = "last row missing"
            assert (await http.post(f"{proxy.url}{GENERATE}", json=weighed)).content == first.content
            engine.faults.malformation = ""
            asked = engine.stats.requests
            for _ in range(2):
                assert (await http.post(f"{proxy.url}{GENERATE}", json=drawn)).status_code == 200
            assert engine.stats.requests == asked + 2
            counts = proxy.client.cell_counts("cell", "first")
            assert (counts.answered, counts.upstream, counts.prompt_tokens) == (1, 1, 40)


@pytest.mark.parametrize("kind", OF_TOKENS)
async def test_malformed_answer_of_tokens_is_asked_for_again_and_never_given(
    proxy: RunningProxy, engine: FakeEngine, kind: str
) -> None:
    # Every prompt is requested before, so answers lack the rows of cached tokens.
    proxy.tell(state_of(TOKENS, engine))
    before = proxy.client.status().models.get(TOKENS, RequestCounters())
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {CLIENT_KEY}"}) as http:

        async def rows(url: str, number: int) -> list[Any]:
            ids = [number, *range(40, 80)]
            sampling = {**WEIGHED, "logprobs": 1, "skip_reading_prefix_cache": number % 2 == 1}
            answer = await http.post(
                f"{url}{GENERATE}", json={"model": TOKENS, "token_ids": ids, "sampling_params": sampling}
            )
            return answer.json()["prompt_logprobs"]

        for number in range(4):
            await rows(engine.url, number)
        right = [await rows(engine.url, number) for number in range(4)]
        assert [len(answer) for answer in right] == [9, 41, 9, 41]
        engine.faults.malformation, engine.faults.malformed_every = kind, 2
        assert [await rows(proxy.url, number) for number in range(4)] == right
    after = proxy.client.status().models[TOKENS]
    assert (after.answered - before.answered, after.retried - before.retried) == (4, 3)


async def test_stream_of_tokens_is_passed_on_whole_and_broken_off_where_it_breaks(
    proxy: RunningProxy, engine: FakeEngine
) -> None:
    proxy.tell(state_of(TOKENS, engine))
    body = {"model": TOKENS, "token_ids": [1, 2], "stream": True, "sampling_params": {"max_tokens": 5, "logprobs": 1}}
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {CLIENT_KEY}"}) as http:
        whole = await http.post(f"{proxy.url}{GENERATE}", json=body)
        assert whole.content == (await http.post(f"{engine.url}{GENERATE}", json=body)).content
        assert whole.content.endswith(b"data: [DONE]\n\n")
        engine.faults.die_mid_stream = 1
        broken = await http.post(f"{proxy.url}{GENERATE}", json=body)
    assert b"[DONE]" not in broken.content
    assert json.loads(broken.content.rsplit(b"data: ", 1)[1])["error"]["code"] == 502


@pytest.mark.parametrize("target", [b"/collective_rpc", b"/pause", b"/v1/completions?x", b"/v1/load_lora_adapter"])
async def test_nothing_but_what_is_listed_is_ever_sent_to_an_engine(engine: FakeEngine, target: bytes) -> None:
    upstream = Upstream(connect_timeout_seconds=5)
    call = upstream.call(engine.url, patience_seconds=5)
    try:
        with pytest.raises(ValueError, match="no request of the proxy"):
            await call.ask(b"POST", target, body=b"{}")
    finally:
        call.close()
        upstream.close()


async def test_openai_client_is_answered_at_every_path_that_is_passed_on(
    proxy: RunningProxy, engine: FakeEngine
) -> None:
    replica = replica_of(engine)
    announcement = replica.announcement.model_copy(update={"engine_version": "0.32.0", "sequence": 1})
    await asyncio.to_thread(proxy.announce, FakeReplica(replica.name, announcement))
    async with openai.AsyncOpenAI(base_url=proxy.address.base_url, api_key=CLIENT_KEY, max_retries=0) as client:
        whole = await client.responses.create(model=MODEL, input="Once", max_output_tokens=4)
        assert (whole.model, whole.status, len(whole.output_text)) == (MODEL, "completed", 4)
        events = [event async for event in await client.responses.create(model=MODEL, input="Once", stream=True)]
        assert [event.type for event in events] == ["response.created", "response.in_progress", "response.completed"]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError, match="another"):
            await client.models.retrieve("another")
        with pytest.raises(openai.NotFoundError, match="another"):
            await client.responses.create(model="another", input="Once")
    headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
    async with httpx.AsyncClient(base_url=proxy.url, headers=headers) as http:
        assert (await http.post("/tokenize", json={"model": MODEL, "prompt": "ab"})).json()["tokens"] == [97, 98]
        assert (await http.get("/version")).json() == {"version": "0.32.0"}
        assert (await http.get("/v1/responses/resp_0")).status_code == 404, "nothing is stored"
    counters = proxy.client.status().models[MODEL]
    assert (counters.server_errors, counters.journal_hits) == (0, 0)


async def test_stream_of_a_response_that_breaks_ends_with_an_error_event(
    proxy: RunningProxy, engine: FakeEngine
) -> None:
    engine.faults.die_mid_stream = 1
    async with openai.AsyncOpenAI(base_url=proxy.address.base_url, api_key=CLIENT_KEY, max_retries=0) as client:
        stream = await client.responses.create(model=MODEL, input="Once", stream=True)
        with pytest.raises(openai.APIError, match="broke off"):
            _ = [event async for event in stream]


async def test_sampled_response_is_always_asked_again_for_any_other_fields(tmp_path: Path) -> None:
    body = {"model": MODEL, "input": "Once", "max_tokens": 0, "echo": True, "temperature": 1}
    headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
    async with FakeEngine() as engine, httpx.AsyncClient(headers=headers) as http:
        with running_proxy(tmp_path, journal=tmp_path / "journal.sqlite") as proxy:
            proxy.tell(state_of(MODEL, engine))
            for _ in range(2):
                assert (await http.post(f"{proxy.url}/v1/responses", json=body)).status_code == 200
    assert engine.stats.requests == 2
