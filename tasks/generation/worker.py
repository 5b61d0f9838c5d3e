"""A worker: a job that takes shards from the queue, sends their prompts to the pool, and writes the answers.

If it is killed, its shards return to the queue, and their next worker gets the answers so far from the pool's journal.
Does not import Prefect.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import secrets
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import httpx2
import openai
import orjson
from openai import DefaultAsyncHttpxClient

from pools.endpoint import RunningModel
from pools.proxy.client import ProxyAddress, ProxyClient
from pools.settings import POOL_KEY_VARIABLE
from resources.actors.actors import ActorHandle
from resources.actors.leased_queue import Lease
from resources.errors import AssayError, BadInput, EndpointUnusable, ProxyFailed, ProxyRefused
from resources.settings import variable
from tasks.generation.config import GenerationConfig, PromptsConfig, SamplingConfig, UnusableRow, prompt_maker
from tasks.generation.output import AnswerFolder, AnswerRow, ShardSummary
from tasks.generation.prompts import Row, rows_of
from tasks.generation.queue import Shard, ShardProgress

_OPEN_SHARDS = 4
"""Shards processed at once: while the last answers of a shard are pending, the next shard uses the free slots."""
_IDLE_SECONDS, _RETRY_SECONDS, _PROGRESS_SECONDS = 0.5, 0.2, 2.0
_PATIENCE_SECONDS = 30.0  # for a proxy that is restarted at its address
_Answer = TypeVar("_Answer")
_log = logging.getLogger("assay.generation")


@dataclass(frozen=True)
class WorkOrder:
    """A worker's configuration, without the pool's keys, which are in its environment."""

    worker: str
    config: GenerationConfig
    origin: SharedColumns
    output: AnswerFolder
    proxy: ProxyAddress
    running: RunningModel
    in_flight: int
    """Concurrent requests of this worker."""

    def cell(self, shard: Shard) -> str:
        """Returns the name under which the pool keeps the answers of an unwritten shard."""
        origin = self.origin
        return f"generation-{origin.parameters}-{origin.checkpoint_digest[:12]}-{shard.number}"


def run_worker(order: WorkOrder, queue: ActorHandle) -> None:
    """Processes shards until none is left."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # the client's; it logs a line for each request
    try:
        asyncio.run(_Worker(order, queue).work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def patiently(call: Callable[[], _Answer], seconds: float, *, but: type[AssayError] | tuple[()] = ()) -> _Answer:
    """Repeats a call on ProxyFailed and BadInput for so many seconds; raises the last error, and `but` at once."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except (BadInput, ProxyFailed) as error:
            if isinstance(error, but) or time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_SECONDS)


class _Worker:
    def __init__(self, order: WorkOrder, queue: ActorHandle) -> None:
        self._order, self._queue = order, queue
        self._key = variable(POOL_KEY_VARIABLE) or ""
        self._proxy = ProxyClient(order.proxy, key=self._key)
        self._open: dict[str, tuple[asyncio.Task[None], ShardProgress]] = {}

    async def work(self) -> None:
        order = self._order
        running = replace(order.running, api_key=self._key)
        await self._tell("begin")
        async with client_of(running, in_flight=order.in_flight) as client:
            asker = Asker(
                client,
                prompts=order.config.prompts,
                sampling=order.config.sampling,
                origin=order.origin,
                in_flight=order.in_flight,
            )
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(self._renew())
                await self._take_shards(asker, group)
                renewing.cancel()

    async def _take_shards(self, asker: Asker, group: asyncio.TaskGroup) -> None:
        while True:
            lease: Lease | None = await self._tell("lend")
            if lease is not None:
                progress, asked = ShardProgress(), asyncio.Event()
                task = group.create_task(self._do(asker, lease, progress, asked.set))
                self._open[lease.lease_id] = task, progress
                task.add_done_callback(lambda _, asked=asked, lease=lease: self._ended(lease, asked))
                await asked.wait()
                while len(self._open) >= _OPEN_SHARDS:
                    await asyncio.wait([task for task, _ in self._open.values()], return_when="FIRST_COMPLETED")
            elif self._open:
                await asyncio.wait([task for task, _ in self._open.values()], return_when="FIRST_COMPLETED")
            elif (await asyncio.to_thread(self._queue.state)).left == 0:
                return
            else:
                await asyncio.sleep(_IDLE_SECONDS)  # shards of other workers may come back

    def _ended(self, lease: Lease, asked: asyncio.Event) -> None:
        self._open.pop(lease.lease_id, None)
        asked.set()

    async def _do(self, asker: Asker, lease: Lease, progress: ShardProgress, on_all_asked: Callable[[], None]) -> None:
        shard: Shard = lease.item
        try:
            written = await self._written(asker, shard, progress, on_all_asked)
        except AssayError as error:
            hopeless = isinstance(error, BadInput)
            await self._tell("give_back", lease, error.found, hopeless=hopeless)
            if not hopeless:
                raise
            return
        done = ShardProgress(written.rows, written.completion_tokens, written.errors, progress.last_error)
        await self._tell("finish", lease, done)

    async def _written(
        self, asker: Asker, shard: Shard, progress: ShardProgress, on_all_asked: Callable[[], None]
    ) -> ShardSummary:
        order, output = self._order, self._order.output
        cell, attempt = order.cell(shard), secrets.token_hex(4)
        if await asyncio.to_thread(output.is_written, shard.number):
            await self._forget(cell, attempt)
            return await asyncio.to_thread(output.summary, shard.number)
        rows = await asyncio.to_thread(rows_of, shard)
        await self._proxied(self._proxy.open_cell, cell, attempt, mirror=None)
        answers = await asker.answers(
            rows,
            first_prompt=shard.first_prompt,
            prefix=f"/cells/{cell}/{attempt}",
            progress=progress,
            on_all_asked=on_all_asked,
        )
        written = await asyncio.to_thread(output.write, shard.number, answers)
        await self._forget(cell, attempt)
        return written

    async def _forget(self, cell: str, attempt: str) -> None:
        # A restarted proxy closes only cells that were opened again.
        await self._proxied(self._proxy.open_cell, cell, attempt, mirror=None)
        await self._proxied(self._proxy.close_cell, cell, attempt, drop=True)

    async def _proxied(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        attempt = partial(call, *arguments, **options)
        await asyncio.to_thread(patiently, attempt, _PATIENCE_SECONDS, but=ProxyRefused)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            so_far = {lease_id: replace(progress) for lease_id, (_, progress) in self._open.items()}
            for lease_id in await self._tell("advance", so_far):
                if lease_id in self._open:  # another worker has it
                    _log.info("a lease was lost; its shard is dropped")
                    self._open[lease_id][0].cancel()

    async def _tell(self, method: str, *arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self._queue, method), self._order.worker, *arguments, **options)


_RETRIES = 6
"""Retries; the pauses between them double up to 8 s, which covers the restart of a proxy."""
_PROMPTS_FAULT = (400, 413, 422)
_CONNECT_SECONDS = 30.0
_CONNECTIONS_OF_A_POOL = 16
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class SharedColumns:
    """Columns that all rows of a generation share."""

    checkpoint: str
    checkpoint_digest: str
    pool: str
    parameters: str


def client_of(running: RunningModel, *, in_flight: int) -> openai.AsyncOpenAI:
    """Returns an OpenAI client for this many concurrent requests."""
    return openai.AsyncOpenAI(
        base_url=running.base_url.removesuffix("/v1"),
        api_key=running.api_key,
        max_retries=_RETRIES,
        timeout=openai.Timeout(running.request_timeout_seconds, connect=_CONNECT_SECONDS),
        http_client=DefaultAsyncHttpxClient(
            transport=_InTurn(math.ceil(in_flight / _CONNECTIONS_OF_A_POOL)), trust_env=not running.direct
        ),
    )


# Several connection pools in turn, since each request makes a pool scan all of its connections: 4.5 ms of CPU time with
# 256 connections in a single pool, 1.8 ms with 8 pools. The caller bounds the number of open connections.
class _InTurn(httpx2.AsyncBaseTransport):
    def __init__(self, pools: int) -> None:
        context = ssl.create_default_context()
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._pools = [httpx2.AsyncHTTPTransport(verify=context, limits=limits) for _ in range(pools)]
        self._turns = itertools.cycle(self._pools)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return await next(self._turns).handle_async_request(request)

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()


class Asker:
    """Sends prompts to a checkpoint; `in_flight` bounds its concurrent requests over all shards. `client`: of the pool,
    with a base URL without `/v1`: each shard is a separate cell of the pool."""

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        *,
        prompts: PromptsConfig,
        sampling: SamplingConfig,
        origin: SharedColumns,
        in_flight: int,
    ) -> None:
        self._client = client
        self._prompts, self._sampling, self._origin = prompts, sampling, origin
        self._made = prompt_maker(prompts)
        self._path = "/v1/chat/completions" if prompts.chat else "/v1/completions"
        self._field = "messages" if prompts.chat else "prompt"
        self._body = {"model": origin.checkpoint, **sampling.body()}
        self._slots = asyncio.Semaphore(in_flight)

    async def answers(
        self,
        rows: Sequence[Row],
        *,
        first_prompt: int,
        prefix: str = "",
        progress: ShardProgress | None = None,
        on_all_asked: Callable[[], None] = lambda: None,
    ) -> list[AnswerRow]:
        """Requests all samples of all rows, and returns them in order. `first_prompt`: number of the first row's
        prompt. `prefix`: path of the cell that the requests belong to. `progress`: updated with each answer.
        `on_all_asked`: called when the last request has started, so that slots become free soon."""
        progress = progress or ShardProgress()
        samples = self._sampling.samples
        answer_rows: list[AnswerRow | None] = [None] * (len(rows) * samples)

        async def answer(place: int, row: Row, prompt: Any, index: int, sample: int) -> None:
            answered = await self._ask(prompt, sample, prefix)
            put(place, self._row(row, prompt, index, sample, **answered))

        def put(place: int, answered: AnswerRow) -> None:
            answer_rows[place] = answered
            error = answered.error[:_SHOWN_CHARACTERS] if answered.error is not None else None
            progress.add(ShardProgress(1, answered.completion_tokens or 0, int(error is not None), error))

        try:
            async with asyncio.TaskGroup() as group:
                for number, row in enumerate(rows):
                    index = first_prompt + number
                    try:
                        prompt = self._made(row)
                    except UnusableRow as error:
                        for sample in range(samples):
                            put(number * samples + sample, self._row(row, None, index, sample, error=str(error)))
                        continue
                    for sample in range(samples):
                        await self._slots.acquire()
                        asked = group.create_task(answer(number * samples + sample, row, prompt, index, sample))
                        asked.add_done_callback(
                            lambda _: self._slots.release()
                        )  # also after a cancellation before the task starts
                on_all_asked()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [row for row in answer_rows if row is not None]

    async def _ask(self, prompt: Any, sample: int, prefix: str) -> dict[str, Any]:
        body = {**self._body, self._field: prompt}
        if self._sampling.seed is not None:
            body["seed"] = self._sampling.seed + sample
        try:
            # Not by `completions.create`, which would build an object for each part of an answer.
            response = await self._client.post(f"{prefix}{self._path}", body=body, cast_to=httpx2.Response)
        except openai.APIStatusError as error:
            if error.status_code in _PROMPTS_FAULT:
                return {"error": f"{error.status_code}: {_said(error)}"}
            raise _unusable(f"{error.status_code}: {_said(error)}") from None
        except openai.OpenAIError as error:
            raise _unusable(f"{type(error).__name__}: {error.__cause__ or error}") from None
        return self._read(response.content)

    def _read(self, content: bytes) -> dict[str, Any]:
        try:
            answer = orjson.loads(content)
            choice = answer["choices"][0]
            message = choice.get("message") or choice
            calls = message.get("tool_calls")
            usage = answer.get("usage") or {}
            return {
                "text": message.get("content" if self._prompts.chat else "text"),
                "tool_calls": orjson.dumps(calls).decode() if calls else None,
                "finish_reason": choice.get("finish_reason"),
                "prompt_tokens": usage.get("prompt_tokens"),
                "completion_tokens": usage.get("completion_tokens"),
            }
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _unusable(f"an answer that is none: {type(error).__name__}") from error

    def _row(self, row: Row, prompt: Any, index: int, sample: int, **answered: Any) -> AnswerRow:
        config, seed = self._prompts, self._sampling.seed
        kept = {name: row.get(name) for name in config.keep}
        name = row.get(config.id_column) if config.id_column else None
        return AnswerRow(
            prompt_index=index,
            prompt_id=str(index if name is None else name),
            sample=sample,
            prompt=prompt if isinstance(prompt, str) else _as_json(prompt) if prompt is not None else "",
            seed=None if seed is None else seed + sample,
            columns=_as_json(kept) if kept else None,
            **asdict(self._origin),
            **answered,
        )


def _said(error: openai.APIStatusError) -> str:
    body = error.body
    message = body.get("message") if isinstance(body, dict) else None
    return str(message or error.response.text)[:500]


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _unusable(problem: str) -> EndpointUnusable:
    return EndpointUnusable(
        expected="the pool to answer", found=problem, remedy="look at the pool's log; run again to go on"
    )
