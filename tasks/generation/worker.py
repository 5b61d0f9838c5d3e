"""A worker: a job that takes shards from the queue, sends their prompts to the pool, and writes the answers.

If it is killed, its shards return to the queue, and their next worker gets the answers so far from the pool's journal.
Does not import Prefect.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from pools.endpoint import RunningModel
from pools.proxy.client import ProxyAddress, ProxyClient
from pools.settings import POOL_KEY_VARIABLE
from resources.actors.actors import ActorHandle
from resources.actors.leased_queue import Lease
from resources.errors import AssayError, BadInput, ProxyFailed, ProxyRefused
from resources.settings import variable
from tasks.generation.asking import Asker, Origin, client_of
from tasks.generation.config import GenerationConfig
from tasks.generation.output import Output, ShardSummary
from tasks.generation.prompts import rows_of
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
    origin: Origin
    output: Output
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
