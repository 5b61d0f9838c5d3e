"""The proxy over loopback HTTP: the real process in front of deterministic engines."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fakes.engine import FakeEngine
from fakes.malformed import KINDS
from fakes.polling import until
from fakes.proxy import (
    ADMIN_KEY,
    CLIENT_KEY,
    HEADERS,
    KEYS,
    PoolState,
    RunningProxy,
    replica_of,
    running_proxy,
    state_of,
)
from pools.protocol import DesiredState, ReplicaState
from pools.proxy.client import ProxyAddress, ProxySettings
from resources.errors import ProxyFailed
from resources.settings import process_environment

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def shared_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path_factory.mktemp("proxy"), probe_interval_seconds=0.05) as proxy:
        yield proxy


@pytest.fixture
def proxy(shared_proxy: RunningProxy) -> RunningProxy:
    shared_proxy.client.set_state(DesiredState())
    return shared_proxy


@pytest.fixture
def model() -> str:
    """A unique model name: the shared proxy counts by model."""
    return f"model-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=HEADERS, auto_decompress=False) as session:
        yield session


@pytest.fixture
async def start_engine() -> AsyncIterator[Callable[[], Awaitable[FakeEngine]]]:
    async with AsyncExitStack() as engines:

        async def start() -> FakeEngine:
            return await engines.enter_async_context(FakeEngine())

        yield start


@pytest.fixture
async def engine(start_engine: Callable[[], Awaitable[FakeEngine]]) -> FakeEngine:
    return await start_engine()


@pytest.fixture
async def other_engine(start_engine: Callable[[], Awaitable[FakeEngine]]) -> FakeEngine:
    return await start_engine()


Answer = tuple[int, bytes]


async def _post(http: aiohttp.ClientSession, url: str, body: bytes | dict[str, Any]) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(url, data=data) as reply:
        return reply.status, await reply.read()


async def _ask(http: aiohttp.ClientSession, proxy: RunningProxy, model: str, **fields: Any) -> Answer:
    return await _post(http, proxy.url + COMPLETIONS, {"model": model, "prompt": "Once", "max_tokens": 8, **fields})


def _error(body: bytes) -> dict[str, Any]:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def _results(proxy: RunningProxy, model: str) -> dict[str, int]:
    names = ("answered", "client_errors", "server_errors", "cancelled", "retried")
    counters = proxy.client.status().models[model]
    return {name: count for name in names if (count := getattr(counters, name))}


# --- Passing through -------------------------------------------------------------------------------------------------

BODIES = {
    "spacing-and-order": b'{ "prompt" :"a",\n\t"model":"MODEL" , "max_tokens":1 }',
    "float-digits": b'{"model":"MODEL","temperature":0.10000000000000000555,"top_p":1.0,"x":1e-7,"big":1E400}',
    "escapes": '{"model":"MODEL","prompt":"\\u00e9 \u00e9 \\ud83d\\ude00 \\/ \\u0000"}'.encode(),
    "vllm-only": b'{"model":"MODEL","prompt":"a","guided_json":{"type":"object"},"prompt_logprobs":1,"echo":true}',
    "token-ids": b'{"model":"MODEL","prompt":[[1,2,3],[4,5]],"logprobs":null,"max_tokens":0}',
    "six-stops": b'{"model":"MODEL","prompt":["a","b"],"stop":["1","2","3","4","5","6"],"n":2}',
    "repeated-keys": b'{"model":"x","model":"MODEL","prompt":"a","prompt":"b"}',
    "trailing-newline": b'{"model":"MODEL"}\r\n',
    "large": b'{"model":"MODEL","prompt":"' + b"lorem ipsum " * 200_000 + b'"}',
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_request_arrives_byte_for_byte(
    proxy: RunningProxy, engine: FakeEngine, http: aiohttp.ClientSession, model: str, path: str, body: bytes
) -> None:
    proxy.tell(state_of(model, engine))
    body = body.replace(b"MODEL", model.encode())
    status, _ = await _post(http, proxy.url + path, body)
    assert status in {200, 400}  # the engine decides; some bodies have no prompt
    assert engine.bodies[-1] == body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "Once", "max_tokens": 0, "echo": True, "logprobs": 2}),
        (COMPLETIONS, {"prompt": [[1, 2], [3]], "max_tokens": 5, "n": 2, "stop": "e"}),
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 3}),
    ],
)
async def test_answer_is_the_engines_byte_for_byte(
    proxy: RunningProxy,
    engine: FakeEngine,
    http: aiohttp.ClientSession,
    model: str,
    path: str,
    fields: dict[str, Any],
    stream: bool,
) -> None:
    proxy.tell(state_of(model, engine))
    body = {"model": model, "stream": stream, **fields}
    direct = await _post(http, engine.url + path, body)
    assert await _post(http, proxy.url + path, body) == direct
    assert direct[0] == 200


async def test_stream_is_forwarded_as_it_comes(
    proxy: RunningProxy, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    proxy.tell(state_of(model, engine))
    engine.faults.delay_seconds = 0.1
    body = {"model": model, "prompt": "a", "max_tokens": 6, "stream": True}
    async with http.post(proxy.url + COMPLETIONS, json=body) as reply:
        assert reply.content_type == "text/event-stream"
        first = await reply.content.readline()
        assert engine.stats.in_flight == 1
        assert first.startswith(b"data: {")
        assert (await reply.content.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("status", [400, 404, 422, 429])
async def test_engine_refusal_is_passed_through_once(
    proxy: RunningProxy,
    engine: FakeEngine,
    other_engine: FakeEngine,
    http: aiohttp.ClientSession,
    model: str,
    status: int,
) -> None:
    proxy.tell(state_of(model, engine, other_engine))
    for fake in (engine, other_engine):
        fake.faults.status, fake.faults.status_count = status, 5
    received_status, body = await _ask(http, proxy, model)
    assert (received_status, _error(body)["message"]) == (status, "a fault was asked for")
    assert engine.stats.requests + other_engine.stats.requests == 1
    assert _results(proxy, model) == {"client_errors": 1}


# --- Answers of the proxy itself --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (b"NaN" + b", NaN" * 200_000, 200),
        (b"NaN" + b", NaN" * 1_500_000, 400),
        (b"0" + b",0" * 5_000_000, 413),
        (b"[]" + b",[]" * 1_000_000, 413),
        (b"0" + b",0" * 3_000_000, 200),
        (b'"' + b"word " * 3_000_000 + b'"', 200),
    ],
    ids=["NaN", "much NaN", "too many numbers", "too many lists", "many numbers", "a long text"],
)
async def test_body_that_would_be_parsed_for_long_is_refused(
    proxy: RunningProxy, engine: FakeEngine, http: aiohttp.ClientSession, model: str, values: bytes, expected: int
) -> None:
    proxy.tell(state_of(model, engine))
    body = b'{"model": "%b", "prompt": "a", "max_tokens": 1, "ignored": [%b]}' % (model.encode(), values)
    status, answer = await _post(http, proxy.url + COMPLETIONS, body)
    assert status == expected, answer[:200]
    assert engine.stats.requests == (expected == 200)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"x"', b"{}", b'{"model": 1}', b"\xff\xfe\x00", b"[" * 200_000],
    ids=["empty", "cut", "list", "text", "no-model", "number", "no-utf8", "deep"],
)
async def test_body_without_a_model_is_answered_400_without_an_engine(
    proxy: RunningProxy, engine: FakeEngine, http: aiohttp.ClientSession, model: str, body: bytes
) -> None:
    proxy.tell(state_of(model, engine))
    status, answer = await _post(http, proxy.url + COMPLETIONS, body)
    assert (status, _error(answer)["type"], engine.stats.requests) == (400, "BadRequestError", 0)


async def test_unknown_model_is_answered_404_with_the_known_models(
    proxy: RunningProxy, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    proxy.tell(state_of(model, engine))
    status, answer = await _ask(http, proxy, "another")
    error = _error(answer)
    assert (status, error["type"], error["param"], engine.stats.requests) == (404, "NotFoundError", "model", 0)
    assert "`another`" in error["message"] and f"`{model}`" in error["message"]
    assert "another" not in proxy.client.status().models


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", COMPLETIONS),
        ("POST", CHAT),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/metrics/engines"),
        ("PUT", "/admin/state"),
        ("GET", "/admin/status"),
    ],
)
@pytest.mark.parametrize(
    "authorization", [None, "Bearer wrong", "Bearer", f"Basic {CLIENT_KEY}", "Bearer \u00e9", f"Basic {ADMIN_KEY}"]
)
async def test_request_without_the_key_is_answered_401(
    proxy: RunningProxy, method: str, path: str, authorization: str | None
) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    async with aiohttp.request(method, proxy.url + path, headers=headers, data=b"{}") as reply:
        assert reply.status == 401
        assert _error(await reply.read())["code"] == 401


async def test_keys_open_only_their_own_paths(proxy: RunningProxy, http: aiohttp.ClientSession) -> None:
    async with http.put(f"{proxy.url}/admin/state") as reply:
        assert reply.status == 401
    async with http.get(f"{proxy.url}/v1/models", headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as reply:
        assert reply.status == 401


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", COMPLETIONS, 405)])
async def test_unknown_path_or_method_is_an_openai_error(
    proxy: RunningProxy, http: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    async with http.request(method, proxy.url + path) as reply:
        assert reply.status == status
        assert _error(await reply.read())["code"] == status


async def test_models_lists_every_model_of_the_state(proxy: RunningProxy, http: aiohttp.ClientSession) -> None:
    proxy.tell(PoolState({"run-200": "d2", "run-100": "d1"}))
    async with http.get(f"{proxy.url}/v1/models") as reply:
        listed = await reply.json()
    assert listed["object"] == "list"
    assert [(entry["id"], entry["object"]) for entry in listed["data"]] == [("run-100", "model"), ("run-200", "model")]


async def test_health_needs_no_key_and_follows_the_state(proxy: RunningProxy, engine: FakeEngine, model: str) -> None:
    async def health() -> tuple[int, str]:
        async with aiohttp.request("GET", f"{proxy.url}/health") as reply:
            return reply.status, (await reply.json())["status"]

    assert await health() == (503, "holding")
    proxy.tell(state_of(model, engine))
    assert await health() == (200, "ready")
    assert proxy.client.status().status == "ready"
    proxy.tell(PoolState({}, failed="gave up"))
    assert await health() == (503, "failed")


async def test_bad_state_is_refused_and_the_former_state_kept(
    proxy: RunningProxy, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    proxy.tell(state_of(model, engine))
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    for body in (b"{", b'{"replicas": [{"name": "a", "url": "nowhere"}]}', b'{"unheard": 1}'):
        async with http.put(f"{proxy.url}/admin/state", data=body, headers=headers) as reply:
            assert reply.status == 400
    assert (await _ask(http, proxy, model))[0] == 200


# --- Holding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "digest"), [("starting", "d"), ("draining", "d"), ("dead", "d"), ("ready", "other"), ("ready", None)]
)
async def test_request_is_held_until_a_replica_is_ready(
    proxy: RunningProxy,
    engine: FakeEngine,
    http: aiohttp.ClientSession,
    model: str,
    state: ReplicaState,
    digest: str | None,
) -> None:
    replica = replica_of(engine, state=state, digest=digest)
    proxy.tell(PoolState({model: "d"}, (replica,)))
    asked = asyncio.create_task(_ask(http, proxy, model))
    await until(lambda: proxy.client.status().held == 1)
    assert engine.stats.requests == 0
    proxy.tell(state_of(model, engine))
    assert (await asked)[0] == 200
    assert proxy.client.status().held == 0


async def test_request_before_the_first_state_is_held(
    tmp_path: Path, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    with running_proxy(tmp_path) as proxy:
        asked = asyncio.create_task(_ask(http, proxy, model))
        await until(lambda: proxy.client.status().held == 1)
        proxy.tell(state_of(model, engine))
        assert (await asked)[0] == 200


async def test_requests_held_too_long_are_answered_503(tmp_path: Path, http: aiohttp.ClientSession, model: str) -> None:
    with running_proxy(tmp_path, hold_timeout_seconds=0.2) as proxy:
        proxy.tell(PoolState({model: "d"}))
        answers = await asyncio.gather(*(_ask(http, proxy, model) for _ in range(2)))
        assert [status for status, _ in answers] == [503, 503]
        assert proxy.client.status().held == 0
        assert _results(proxy, model) == {"server_errors": 2}


async def test_request_beyond_the_held_requests_is_answered_429(
    tmp_path: Path, http: aiohttp.ClientSession, model: str
) -> None:
    with running_proxy(tmp_path, max_held=2) as proxy:
        proxy.tell(PoolState({model: "d"}))
        asked = [asyncio.create_task(_ask(http, proxy, model)) for _ in range(2)]
        await until(lambda: proxy.client.status().held == 2)
        async with http.post(proxy.url + COMPLETIONS, json={"model": model}) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (429, "1")
        async with http.post(proxy.url + COMPLETIONS, json={"model": "unknown"}) as reply:
            assert reply.status == 404
        assert _results(proxy, model) == {"server_errors": 1}
        for task in asked:
            task.cancel()


async def test_failed_pool_answers_503_with_its_reason_at_once(
    proxy: RunningProxy, http: aiohttp.ClientSession, model: str
) -> None:
    proxy.tell(PoolState({model: "d"}))
    held = asyncio.create_task(_ask(http, proxy, model))
    await until(lambda: proxy.client.status().held == 1)
    proxy.tell(PoolState({model: "d"}, failed="the engine died three times"))
    for status, answer in (await held, await _ask(http, proxy, model)):
        assert (status, _error(answer)["message"]) == (503, "the engine died three times")


async def test_pool_that_tries_again_holds_what_comes_after_it_has_given_up_but_not_for_a_cell(
    proxy: RunningProxy, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    gave_up = PoolState({model: "d"}, failed="the engine died three times").desired
    gave_up = gave_up.model_copy(update={"tries_again": True})
    proxy.client.set_state(gave_up)
    in_cell = await _post(http, f"{proxy.url}/cells/a/b{COMPLETIONS}", {"model": model, "prompt": "Once"})
    assert (in_cell[0], _error(in_cell[1])["message"]) == (503, "the engine died three times")
    for again in (gave_up, state_of(model, engine).desired):
        held = asyncio.create_task(_ask(http, proxy, model))
        await until(lambda: proxy.client.status().held == 1)
        proxy.tell(PoolState({model: "d"}))
        assert proxy.client.status().held == 1
        proxy.client.set_state(again)
        proxy.announce(replica_of(engine))
        assert (await held)[0] == (503 if again is gave_up else 200)


async def test_held_request_of_a_client_that_leaves_is_dropped(
    proxy: RunningProxy, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    proxy.tell(PoolState({model: "d"}))
    held = asyncio.create_task(_ask(http, proxy, model))
    await until(lambda: proxy.client.status().held == 1)
    held.cancel()
    await until(lambda: proxy.client.status().held == 0)
    proxy.tell(state_of(model, engine))
    assert (await _ask(http, proxy, model))[0] == 200
    assert engine.stats.requests == 1
    assert _results(proxy, model) == {"answered": 1, "cancelled": 1}


# --- The journal -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_deterministic_request_is_asked_of_an_engine_once_even_across_restarts(
    tmp_path: Path, engine: FakeEngine, http: aiohttp.ClientSession, model: str, stream: bool
) -> None:
    answers, hits = [], 0
    for _ in range(2):
        with running_proxy(tmp_path, journal=tmp_path / "journal.sqlite") as proxy:
            proxy.tell(state_of(model, engine))
            answers += [await _ask(http, proxy, model, temperature=0, stream=stream) for _ in range(2)]
            hits = proxy.client.status().models[model].journal_hits
    assert hits == 2
    assert engine.stats.requests == 1
    assert answers == [answers[0]] * 4
    assert answers[0][0] == 200


@pytest.mark.parametrize("fault", ["status_count", "die_mid_stream"])
async def test_answer_that_is_an_error_or_cut_is_not_journaled(
    tmp_path: Path, engine: FakeEngine, http: aiohttp.ClientSession, model: str, fault: str
) -> None:
    engine.faults.status = 400
    setattr(engine.faults, fault, 1)
    with running_proxy(tmp_path, journal=tmp_path / "journal.sqlite") as proxy:
        proxy.tell(state_of(model, engine))
        first, second = [await _ask(http, proxy, model, temperature=0, stream=True) for _ in range(2)]
    assert b"error" in first[1]
    assert (second[0], second[1].endswith(b"data: [DONE]\n\n")) == (200, True)
    assert engine.stats.requests == 2


LIKELIHOODS = {
    "prompt": [[1, 2, 3, 4], [5, 6, 7]],
    **{"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True},
}
GENERATION = {"prompt": ["Once", "upon"], "n": 2, "max_tokens": 9, "temperature": 0}
SCORED_TEXT = {"prompt": ["Once", "upon"], "max_tokens": 3, "echo": True, "logprobs": 0, "temperature": 0}
CONVERSATION = {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "logprobs": True, "top_logprobs": 2}
OF_ROWS = (
    *("too few rows", "too many rows", "only the last row", "positive", "null", "not a number", "infinite"),
    "no log-probabilities",
)
MALFORMED = [
    *((kind, COMPLETIONS, LIKELIHOODS) for kind in KINDS),
    *((kind, COMPLETIONS, SCORED_TEXT) for kind in ("too few rows", "all zero", "another prompt", "no text")),
    *((kind, COMPLETIONS, GENERATION) for kind in KINDS if kind not in (*OF_ROWS, "all zero", "another prompt")),
    *((kind, CHAT, CONVERSATION) for kind in KINDS if kind not in ("no text", "all zero", "another prompt")),
]


@pytest.mark.parametrize(("kind", "path", "fields"), MALFORMED)
async def test_malformed_answer_is_asked_for_again_and_never_given(
    proxy: RunningProxy,
    engine: FakeEngine,
    http: aiohttp.ClientSession,
    model: str,
    kind: str,
    path: str,
    fields: dict[str, Any],
) -> None:
    bodies = [{"model": model, "user": str(number), "temperature": 0, **fields} for number in range(40)]
    right = await asyncio.gather(*(_post(http, engine.url + path, body) for body in bodies))
    engine.faults.malformation = kind
    proxy.tell(state_of(model, engine))
    for every in (10, 100):
        engine.faults.malformed_every = every
        assert await asyncio.gather(*(_post(http, proxy.url + path, body) for body in bodies)) == right
    assert _results(proxy, model) == {"answered": 80, "retried": 5}


async def test_stream_of_malformed_answers_is_broken_off(
    proxy: RunningProxy, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    engine.faults.no_echo = True
    proxy.tell(state_of(model, engine))
    status, body = await _ask(http, proxy, model, stream=True, echo=True, logprobs=1)
    assert (status, b"[DONE]" in body) == (200, False)
    assert _error(body.rsplit(b"data: ", 1)[1])["code"] == 502


async def test_samples_given_while_the_journal_is_locked_are_not_given_again_after_a_kill(
    tmp_path: Path, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    engine.faults.fresh_samples = True

    async def four(proxy: RunningProxy, attempt: str) -> list[tuple[int, bytes]]:
        url = f"{proxy.url}/cells/cell/{attempt}{COMPLETIONS}"
        fields = {"model": model, "prompt": "Once", "temperature": 1}
        return await asyncio.gather(*(_post(http, url, fields) for _ in range(4)))

    with running_proxy(tmp_path, journal=tmp_path / "journal.sqlite") as proxy:
        proxy.tell(state_of(model, engine))
        proxy.client.open_cell("cell", "first", mirror=None)
        kept = await four(proxy, "first")
    with running_proxy(tmp_path, journal=tmp_path / "journal.sqlite") as proxy:
        proxy.tell(state_of(model, engine))
        proxy.client.open_cell("cell", "second", mirror=None)
        with closing(sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            before = await four(proxy, "second")
            proxy.process.kill()
            proxy.process.wait()
    with running_proxy(tmp_path, journal=tmp_path / "journal.sqlite") as proxy:
        proxy.tell(state_of(model, engine))
        proxy.client.open_cell("cell", "second", mirror=None)
        after = await four(proxy, "second")
    assert len({*kept}) == 4
    assert len({*before, *after}) == 8


async def test_late_request_of_an_ended_attempt_takes_nothing_from_the_next(
    tmp_path: Path, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    engine.faults.fresh_samples = True

    async def ask(proxy: RunningProxy, attempt: str) -> tuple[int, bytes]:
        url = f"{proxy.url}/cells/cell/{attempt}{COMPLETIONS}"
        return await _post(http, url, {"model": model, "prompt": "Once", "temperature": 1})

    with running_proxy(tmp_path, journal=tmp_path / "journal.sqlite") as proxy:
        proxy.tell(state_of(model, engine))
        proxy.client.open_cell("cell", "first", mirror=None)
        kept = [await ask(proxy, "first") for _ in range(4)]
        proxy.client.open_cell("cell", "second", mirror=None)
        given = [await ask(proxy, "second")]
        late = [await ask(proxy, attempt) for attempt in ("first", "another")]
        given.append(await ask(proxy, "second"))
    with running_proxy(tmp_path, journal=tmp_path / "journal.sqlite") as proxy:
        proxy.tell(state_of(model, engine))
        late.append(await ask(proxy, "first"))
        proxy.client.open_cell("cell", "second", mirror=None)
        given += [await ask(proxy, "second") for _ in range(3)]
        late.append(await ask(proxy, "first"))
        proxy.client.close_cell("cell", "second", drop=True)
        late.append(await ask(proxy, "first"))
    assert given[:4] == kept
    assert [status for status, _ in given + late] == [200] * 10
    assert len({*given}) == 5
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as journal:
        assert journal.execute("SELECT count(*) FROM answers").fetchone() == (0,)


# --- Failing replicas ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["refuse", "die_mid_body", "status_count"])
async def test_attempt_that_fails_is_repeated_on_another_replica(
    proxy: RunningProxy,
    engine: FakeEngine,
    other_engine: FakeEngine,
    http: aiohttp.ClientSession,
    model: str,
    fault: str,
) -> None:
    proxy.tell(state_of(model, engine, other_engine))
    setattr(engine.faults, fault, 1)
    setattr(other_engine.faults, fault, 0)
    answers = [await _ask(http, proxy, model) for _ in range(2)]  # one of the two meets the fault
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0][1] == answers[1][1]
    assert _results(proxy, model) == {"answered": 2, "retried": 1}


async def test_only_replica_that_breaks_the_connection_is_asked_again_once_it_answers_probes(
    proxy: RunningProxy, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    proxy.tell(state_of(model, engine))
    engine.faults.refuse, engine.faults.unhealthy = 1, True
    asked = asyncio.create_task(_ask(http, proxy, model))
    await until(lambda: engine.stats.health_checks >= 3)
    assert proxy.client.status().held == 1
    assert proxy.client.status().status == "holding"
    engine.faults.unhealthy = False
    assert (await asked)[0] == 200
    assert proxy.client.status().status == "ready"


async def test_request_that_kills_engines_is_tried_three_times_in_all(
    proxy: RunningProxy, start_engine: Callable[[], Awaitable[FakeEngine]], http: aiohttp.ClientSession, model: str
) -> None:
    engines = [await start_engine() for _ in range(5)]
    for engine in engines:
        engine.faults.refuse = 1
    proxy.tell(state_of(model, *engines))
    status, answer = await _ask(http, proxy, model)
    assert (status, _error(answer)["code"]) == (502, 502)
    assert sorted(engine.stats.requests for engine in engines) == [0, 0, 1, 1, 1]
    assert _results(proxy, model) == {"server_errors": 1, "retried": 2}


async def test_engine_error_that_stays_is_passed_through_after_three_attempts(
    proxy: RunningProxy, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    proxy.tell(state_of(model, engine))
    engine.faults.status, engine.faults.status_count = 500, 10
    status, answer = await _ask(http, proxy, model)
    assert (status, _error(answer)["message"]) == (500, "a fault was asked for")
    assert engine.stats.requests == 3
    assert _results(proxy, model) == {"server_errors": 1, "retried": 2}


async def test_replica_declared_dead_gives_up_its_requests_to_others(
    proxy: RunningProxy, engine: FakeEngine, other_engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    proxy.tell(state_of(model, engine))
    engine.faults.hang = 3
    asked = [asyncio.create_task(_ask(http, proxy, model)) for _ in range(3)]
    await until(lambda: engine.stats.in_flight == 3)
    dead = replica_of(engine, state="dead")
    proxy.tell(PoolState({model: "d"}, (dead, replica_of(other_engine))))
    assert {status for status, _ in await asyncio.gather(*asked)} == {200}
    await until(lambda: engine.stats.aborted == 3)


async def test_draining_replica_finishes_what_it_has_and_gets_nothing_new(
    proxy: RunningProxy, engine: FakeEngine, other_engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    proxy.tell(state_of(model, engine))
    engine.faults.delay_seconds = 0.5
    first = asyncio.create_task(_ask(http, proxy, model))
    await until(lambda: engine.stats.in_flight == 1)
    draining = replica_of(engine, state="draining")
    proxy.tell(PoolState({model: "d"}, (draining, replica_of(other_engine))))
    replicas = {
        replica.name: (replica.announcement.state, replica.in_flight) for replica in proxy.client.status().replicas
    }
    assert sorted(replicas.values()) == [("draining", 1), ("ready", 0)]
    assert (await _ask(http, proxy, model))[0] == 200
    assert (await first)[0] == 200
    assert (engine.stats.requests, other_engine.stats.requests) == (1, 1)


async def test_engine_that_takes_too_long_is_left_for_another_and_finally_504(
    tmp_path: Path, engine: FakeEngine, other_engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    with running_proxy(tmp_path, engine_timeout_seconds=1, probe_interval_seconds=0.05) as proxy:
        proxy.tell(state_of(model, engine, other_engine))
        engine.faults.hang = 1
        answers = [await _ask(http, proxy, model) for _ in range(2)]
        assert [status for status, _ in answers] == [200, 200]
        proxy.tell(state_of(model, engine))
        engine.faults.hang = 1
        status, answer = await _ask(http, proxy, model)
        assert (status, _error(answer)["type"]) == (504, "TimeoutError")
        await until(lambda: engine.stats.in_flight == 0)
        await until(lambda: proxy.client.status().status == "ready")  # slow, not dead
        assert (await _ask(http, proxy, model))[0] == 200


async def test_stream_that_breaks_ends_with_an_error_event(
    proxy: RunningProxy, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    proxy.tell(state_of(model, engine))
    engine.faults.die_mid_stream = 1
    status, body = await _ask(http, proxy, model, stream=True)
    events = [event.removeprefix("data: ") for event in body.decode().split("\n\n") if event.strip()]
    *pieces, last = (json.loads(event) for event in events)
    assert status == 200
    assert len(pieces) == 2 and all("choices" in piece for piece in pieces)
    assert last["error"]["code"] == 502
    assert engine.stats.requests == 1
    assert _results(proxy, model) == {"server_errors": 1}


async def test_stream_that_breaks_before_its_first_event_is_tried_again(
    proxy: RunningProxy, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    proxy.tell(state_of(model, engine))
    engine.faults.refuse = 1
    status, body = await _ask(http, proxy, model, stream=True)
    assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)


async def test_stream_that_falls_silent_ends_with_an_error_event(
    tmp_path: Path, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    with running_proxy(tmp_path, engine_timeout_seconds=1) as proxy:
        proxy.tell(state_of(model, engine))
        asked = asyncio.create_task(_ask(http, proxy, model, stream=True, max_tokens=400))
        engine.faults.delay_seconds = 0.1
        await until(lambda: engine.stats.in_flight == 1)
        engine.faults.delay_seconds = 30
        assert b'"code": 502' in (await asked)[1]


# --- Clients that disconnect, and load --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_ends_the_engines_work(
    proxy: RunningProxy, engine: FakeEngine, http: aiohttp.ClientSession, model: str, stream: bool
) -> None:
    proxy.tell(state_of(model, engine))
    if stream:
        engine.faults.delay_seconds = 0.05
    else:
        engine.faults.hang = 1
    asked = asyncio.create_task(_ask(http, proxy, model, stream=stream, max_tokens=4000))
    await until(lambda: engine.stats.in_flight == 1)
    asked.cancel()
    await until(lambda: engine.stats.aborted == 1)
    await until(lambda: _results(proxy, model)["cancelled"] == 1)
    [replica] = proxy.client.status().replicas
    assert (replica.in_flight, replica.suspect) == (0, False)


async def test_storm_of_clients_that_time_out_blocks_no_request(
    proxy: RunningProxy, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    proxy.tell(state_of(model, engine))
    engine.faults.hang = 50
    asked = [asyncio.create_task(_ask(http, proxy, model)) for _ in range(50)]
    await until(lambda: engine.stats.in_flight == 50)
    for task in asked:
        task.cancel()
    answers = await asyncio.gather(*(_ask(http, proxy, model) for _ in range(20)))
    assert {status for status, _ in answers} == {200}
    await until(lambda: engine.stats.aborted == 50)
    assert _results(proxy, model) == {"answered": 20, "cancelled": 50}


# --- Counting and logging --------------------------------------------------------------------------------------------


async def test_log_has_a_line_per_failed_request_and_no_secrets(
    tmp_path: Path, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    secret = "the-prompt-nobody-may-read"
    with running_proxy(tmp_path, probe_interval_seconds=0.05) as proxy:
        proxy.tell(state_of(model, engine))
        assert (await _ask(http, proxy, model, prompt=secret))[0] == 200
        engine.faults.status, engine.faults.status_count = 400, 1
        assert (await _ask(http, proxy, model, prompt=secret))[0] == 400
        assert (await _ask(http, proxy, f"{secret}-model"))[0] == 404
        assert (await _post(http, proxy.url + COMPLETIONS, f'{{"prompt": "{secret}'.encode()))[0] == 400
        engine.faults.refuse = 10
        assert (await _ask(http, proxy, model, prompt=secret))[0] == 502
        reader, writer = await asyncio.open_connection(proxy.address.host, proxy.address.port)
        writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {CLIENT_KEY}\x00\r\n".encode())
        writer.write(f"Content-Length: {secret}\r\n\r\n{secret}".encode())
        assert b"400" in await reader.readline()
        writer.close()
    log = proxy.log_file.read_text()
    failed = [line for line in log.splitlines() if "request=" in line]
    assert [re.sub(r".*model=(\S+) status=(\d+) seconds=[\d.]+$", r"\1 \2", line) for line in failed] == [
        f"{model} 400",
        "- 404",
        "- 400",
        f"{model} 502",
    ]
    for hidden in (secret, CLIENT_KEY, ADMIN_KEY):
        assert hidden not in log


# --- The process -----------------------------------------------------------------------------------------------------


async def test_sigterm_ends_the_process_with_requests_under_way(
    tmp_path: Path, engine: FakeEngine, http: aiohttp.ClientSession, model: str
) -> None:
    with running_proxy(tmp_path) as proxy:
        proxy.tell(PoolState({model: "d", "held": "other"}, (replica_of(engine),)))
        engine.faults.hang = 1
        hanging = asyncio.create_task(_ask(http, proxy, model))
        waiting = asyncio.create_task(_ask(http, proxy, "held"))
        await until(lambda: engine.stats.in_flight == 1 and proxy.client.status().held == 1)
        proxy.process.send_signal(signal.SIGTERM)
        await until(lambda: proxy.process.poll() is not None)
        assert proxy.process.returncode == 0
        assert (await waiting)[0] == 503
        with pytest.raises(aiohttp.ClientError):
            await hanging
        await until(lambda: engine.stats.aborted == 1)
        with pytest.raises(ProxyFailed, match="Refused"):
            proxy.client.status()


def test_proxy_that_was_killed_starts_on_the_same_port_at_once(tmp_path: Path) -> None:
    with running_proxy(tmp_path) as first:
        open_connection = socket.create_connection((first.address.host, first.address.port))
        first.process.kill()
        first.process.wait()
        with running_proxy(tmp_path, port=first.address.port) as second:
            assert second.address.port == first.address.port
            assert second.client.status().status == "holding"
        open_connection.close()


def test_process_hides_its_keys_and_may_open_many_files(shared_proxy: RunningProxy) -> None:
    process = Path("/proc") / str(shared_proxy.address.pid)
    if not process.is_dir():
        pytest.skip("needs /proc")
    command = (process / "cmdline").read_text()
    assert CLIENT_KEY not in command and ADMIN_KEY not in command
    [open_files] = [line for line in (process / "limits").read_text().splitlines() if "open files" in line]
    assert int(open_files.split()[3]) == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@pytest.mark.parametrize(
    ("host", "keys", "message"),
    [("127.0.0.1", {}, "ASSAY_POOL_KEY"), ("192.0.2.1", KEYS.as_environment(), "192.0.2.1")],
    ids=["no-keys", "no-address"],
)
def test_start_that_cannot_work_says_why_and_ends(
    tmp_path: Path, host: str, keys: dict[str, str], message: str
) -> None:
    settings = ProxySettings(host=host)
    ended = subprocess.run(
        [sys.executable, *settings.arguments],
        env=process_environment({"ASSAY_POOL_KEY": "", "ASSAY_ANNOUNCEMENT": str(tmp_path / "proxy.json"), **keys}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "proxy.json").exists()


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:9/v1"), ("0.0.0.0", "http://127.0.0.1:9/v1"), ("::", "http://[::1]:9/v1")],
)
def test_address_base_url_can_be_connected_to(host: str, url: str) -> None:
    assert ProxyAddress(host=host, port=9, pid=1).base_url == url
