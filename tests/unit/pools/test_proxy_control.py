"""Messages from the pool, its replicas and users to the proxy, over loopback HTTP: orders, leases, status, metrics."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from fakes.engine import FakeEngine
from fakes.polling import eventually, until
from fakes.proxy import CLIENT_KEY, HEADERS, JOIN_TOKEN, RunningProxy, replica_of, running_proxy, state_of
from pools.protocol import Announcement, DesiredState, Failure, Lease, LoadReport, Orders, ServedModel
from resources.errors import ProxyRefused

LEASE_SECONDS = 1.0
MODELS = {"m1": ServedModel(digest="d"), "m2": ServedModel(digest="e")}
BODY = {"prompt": "Once", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path, lease_seconds=LEASE_SECONDS) as running:
        yield running


async def _ask(proxy: RunningProxy, model: str) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession(headers=HEADERS) as http,
        http.post(f"{proxy.url}/v1/completions", data=json.dumps({"model": model, **BODY})) as reply,
    ):
        return reply.status, await reply.read()


def _orders(proxy: RunningProxy, announcement: Announcement) -> Orders:
    return proxy.client.announce("a", announcement, join_token=JOIN_TOKEN)


def test_replica_with_a_wrong_token_is_refused(proxy: RunningProxy) -> None:
    for token in ("", CLIENT_KEY, JOIN_TOKEN + "x"):
        with pytest.raises(ProxyRefused, match="401"):
            proxy.client.announce("a", Announcement(instance="i"), join_token=token or "none")
    assert proxy.client.status().replicas == ()


def test_replica_that_waits_for_orders_hears_of_them_at_once(proxy: RunningProxy) -> None:
    proxy.client.set_state(DesiredState(models=MODELS, orders={"a": None}))
    seen = _orders(proxy, Announcement(instance="i"))
    heard: list[Orders] = []
    waiting = threading.Thread(
        target=lambda: heard.append(_orders(proxy, Announcement(instance="i", seen=seen.version, wait_seconds=20)))
    )
    waiting.start()
    proxy.client.set_state(DesiredState(models=MODELS, orders={"a": "m2"}))
    waiting.join(timeout=15)
    assert heard and heard[0].model == "m2"


def test_unknown_replica_must_stop(proxy: RunningProxy) -> None:
    assert not _orders(proxy, Announcement(instance="i")).stop
    proxy.client.set_state(DesiredState(models=MODELS, orders={"b": None}))
    assert _orders(proxy, Announcement(instance="i")).stop


def test_second_instance_that_waits_for_a_name_is_refused_as_soon_as_the_first_speaks(proxy: RunningProxy) -> None:
    proxy.client.set_state(DesiredState(models=MODELS, orders={"a": None}))
    _orders(proxy, Announcement(instance="first"))
    seen = _orders(proxy, Announcement(instance="second"))
    with ThreadPoolExecutor(1) as threads:
        second = Announcement(instance="second", sequence=1, seen=seen.version, wait_seconds=20)
        waiting = threads.submit(_orders, proxy, second)
        assert not _orders(proxy, Announcement(instance="first", sequence=1)).stop
        refused = waiting.result(timeout=15)
    assert (refused.stop, refused.refusal) == (True, "another instance has the name a and is there")
    assert proxy.client.status().replicas[0].announcement.instance == "first"


@pytest.fixture
def patient_proxy(tmp_path: Path) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path, lease_seconds=60) as running:
        yield running


def test_instance_waiting_for_a_name_gets_it_when_its_holder_leaves(patient_proxy: RunningProxy) -> None:
    proxy = patient_proxy
    proxy.client.set_state(DesiredState(models=MODELS, orders={"a": "m1"}))
    version = _orders(proxy, Announcement(instance="first")).version
    words = Announcement(instance="first", sequence=1, seen=version, wait_seconds=20).model_dump_json()
    address = urlsplit(proxy.url)
    first = http.client.HTTPConnection(address.hostname or "", address.port)
    first.request("POST", "/replicas/a", body=words, headers={"Authorization": f"Bearer {JOIN_TOKEN}"})
    eventually(lambda: proxy.client.status().replicas[0].announcement.sequence == 1)
    assert not _orders(proxy, Announcement(instance="second")).known
    first.close()  # as of a process that was killed
    eventually(lambda: _orders(proxy, Announcement(instance="second")).model == "m1")
    assert proxy.client.status().replicas[0].announcement.instance == "second"


async def test_replica_that_falls_silent_loses_its_requests_to_another(proxy: RunningProxy) -> None:
    async with FakeEngine() as silent, FakeEngine() as lively:
        silent.faults.hang = 1
        proxy.client.set_state(state_of("m1", silent, lively).desired)
        await asyncio.to_thread(proxy.announce, replica_of(silent))
        asked = asyncio.create_task(_ask(proxy, "m1"))
        await until(lambda: silent.stats.requests == 1)

        async def renew() -> None:
            while True:
                await asyncio.to_thread(proxy.announce, replica_of(lively))
                await asyncio.sleep(LEASE_SECONDS / 4)

        renewing = asyncio.create_task(renew())
        status, _ = await asyncio.wait_for(asked, 20)
        renewing.cancel()
    assert (status, lively.stats.answered) == (200, 1)


async def test_model_that_cannot_be_served_is_refused_with_the_reason_held_requests_too(proxy: RunningProxy) -> None:
    desired = DesiredState(models=MODELS, orders={"a": None})
    proxy.client.set_state(desired)
    held = asyncio.create_task(_ask(proxy, "m2"))
    await until(lambda: proxy.client.status().held == 1)
    failure = Failure(kind="ModelUnusable", expected="numbers", found="NaN\nand a long log", remedy="train again")
    proxy.client.set_state(desired.model_copy(update={"unusable": {"m2": failure}}))
    for status, body in (await asyncio.wait_for(held, 10), await _ask(proxy, "m2")):
        assert status == 503
        assert json.loads(body)["error"]["message"] == "m2 cannot be served: NaN"


def test_status_waits_for_news_and_comes_when_there_is_some(proxy: RunningProxy) -> None:
    before = proxy.client.status()
    assert proxy.client.status(after=before.version, wait_seconds=0.2).version == before.version
    later: list[int] = []
    waiting = threading.Thread(
        target=lambda: later.append(proxy.client.status(after=before.version, wait_seconds=20).version)
    )
    waiting.start()
    proxy.client.take_lease("one", Lease(holder="a test", seconds=30, models=MODELS, wants=("m2",)))
    waiting.join(timeout=15)
    assert later and later[0] > before.version
    [lease] = proxy.client.status().leases.values()
    assert (lease.holder, lease.wants, set(lease.models)) == ("a test", ("m2",), {"m1", "m2"})
    proxy.client.end_lease("one")
    assert proxy.client.status().leases == {}


def test_lease_that_gives_a_name_in_use_to_another_checkpoint_is_refused(proxy: RunningProxy) -> None:
    proxy.client.take_lease("one", Lease(holder="the first", seconds=30, models=MODELS))
    other = {"m1": ServedModel(digest="another")}
    with pytest.raises(ProxyRefused, match="the first uses the name m1"):
        proxy.client.take_lease("two", Lease(holder="the second", seconds=30, models=other))
    proxy.client.take_lease("one", Lease(holder="the first", seconds=30, models=other))


async def test_cells_are_counted_apart(proxy: RunningProxy) -> None:
    async with FakeEngine() as engine:
        proxy.tell(state_of("m1", engine))
        proxy.client.open_cell("cell", "attempt-1", mirror=None)
        async with aiohttp.ClientSession(headers=HEADERS) as http:
            for path in ("/cells/cell/attempt-1/v1/completions", "/cells/cell/attempt-2/v1/completions"):
                async with http.post(proxy.url + path, data=json.dumps({"model": "m1", **BODY})) as reply:
                    assert reply.status == 200
        assert (await _ask(proxy, "m1"))[0] == 200
        assert proxy.client.cell_counts("cell", "attempt-1").answered == 1
        counters = proxy.client.status().models["m1"]
        assert (counters.answered, counters.upstream) == (3, 3)
        assert counters.completion_tokens == 12


async def test_metrics_are_prometheus_text_with_loads_tokens_and_replicas(proxy: RunningProxy) -> None:
    load = LoadReport(number=1, model="m1", digest="d", how="reload", seconds=0.2, phases={"reload": 0.125})
    async with FakeEngine() as engine:
        proxy.client.set_state(state_of("m1", engine).desired)
        replica = replica_of(engine)
        for _ in range(2):
            announcement = replica.announcement.model_copy(update={"loads": (load,), "restarts": 3})
            proxy.client.announce(replica.name, announcement, join_token=JOIN_TOKEN)
        assert (await _ask(proxy, "m1"))[0] == 200
        async with aiohttp.ClientSession(headers=HEADERS) as http, http.get(f"{proxy.url}/metrics") as reply:
            text = await reply.text()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    name = f'replica="{replica.name}"'
    assert values['assay_proxy_requests_total{status="200"}'] == "1"
    assert values[f'assay_proxy_loads_total{{{name},how="reload"}}'] == "1"
    assert values[f'assay_proxy_load_seconds_total{{{name},phase="reload"}}'] == "0.125"
    assert values[f"assay_proxy_engine_restarts_total{{{name}}}"] == "3"
    assert values[f"assay_proxy_replica_ready{{{name}}}"] == "1"
    assert values['assay_proxy_tokens_total{model="m1",direction="out"}'] == "4"
    assert values["assay_proxy_request_seconds_count"] == "1"
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    helps = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert helps == families


# --- Traces ----------------------------------------------------------------------------------------------------------

TRACE, OF_CLIENT = (f"00-{digit * 32}-{digit * 16}-01" for digit in "ab")


async def test_requests_of_a_cell_carry_its_span_to_the_engine_and_are_answered_by_the_journal_all_the_same(
    tmp_path: Path,
) -> None:
    async with FakeEngine() as engine, aiohttp.ClientSession(headers=HEADERS) as http:
        with running_proxy(tmp_path, journal=tmp_path / "journal.sqlite") as proxy:
            proxy.tell(state_of("m1", engine))

            async def ask(prefix: str, prompt: str, **headers: str) -> None:
                body = {**BODY, "model": "m1", "prompt": prompt}
                async with http.post(f"{proxy.url}{prefix}/v1/completions", json=body, headers=headers) as reply:
                    assert reply.status == 200

            await ask("", "a")
            await ask("", "b", traceparent=OF_CLIENT)
            await asyncio.to_thread(proxy.client.open_cell, "cell", "first", mirror=None, traceparent=TRACE)
            await ask("/cells/cell/first", "c")
            await ask("/cells/cell/first", "d", Traceparent=OF_CLIENT)
            await ask("/cells/cell/second", "e")
            await asyncio.to_thread(proxy.client.close_cell, "cell", "first", drop=False)
            await ask("/cells/cell/first", "f")
            assert list(engine.traceparents) == [None, OF_CLIENT, TRACE, OF_CLIENT, None, None]
            await asyncio.to_thread(proxy.client.open_cell, "other", "first", mirror=None, traceparent=OF_CLIENT)
            await ask("/cells/other/first", "c")
            assert (await asyncio.to_thread(proxy.client.cell_counts, "other", "first")).journal_hits == 1
            assert len(engine.traceparents) == 6


@pytest.mark.parametrize("trace", ["", "00-a-b-01", f"{TRACE}\r\nAuthorization: x", TRACE.upper(), f"{TRACE}\n"])
def test_span_that_is_no_traceparent_is_refused(proxy: RunningProxy, trace: str) -> None:
    with pytest.raises(ProxyRefused, match="400"):
        proxy.client.open_cell("cell", "first", mirror=None, traceparent=trace)
