"""Routes of the proxy: the handler of each path, and the keys that it accepts."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qs

from pydantic import ValidationError

from pools.journal.cells import CellScope
from pools.protocol import NAME_PATTERN, Announcement, CellOptions, DesiredState, Lease, Orders, ProxyStatus
from pools.proxy.client import ProxySettings
from pools.proxy.connections.messages import Head, Refusal, Reply, Request, Responder, unknown_model
from pools.proxy.counters import Tally, prometheus_text
from pools.proxy.forwarding import Forwarder
from pools.proxy.replicas import RoutedReplica
from pools.proxy.request import CHAT, COMPLETIONS, GENERATE, RESPONSES, TOKENIZE
from pools.proxy.routing import RoutingTable
from pools.proxy.users import Cells, Leases, of_known_models
from pools.settings import ProxyKeys
from resources.config import Config

_CELL = re.compile(rf"/cells/({NAME_PATTERN})/([A-Za-z0-9][A-Za-z0-9._+=@-]{{0,99}})(/(?:inference/)?v1/.*)")
_NAMED = re.compile(
    rf"(/v1/models/|/admin/leases/|/replicas/)({NAME_PATTERN})|(/admin/cells/)({NAME_PATTERN}/{NAME_PATTERN})"
)
_OF_ENGINES = (COMPLETIONS, CHAT, RESPONSES, GENERATE, TOKENIZE)
_PROMETHEUS = ((b"Content-Type", b"text/plain; version=0.0.4; charset=utf-8"),)
_LONGEST_WAIT_SECONDS = 30.0
_EXPIRY_SECONDS = 0.25

_log = logging.getLogger("assay.proxy")

Answerer = Callable[[Request, str], Awaitable[Reply]]
Value = TypeVar("Value", bound=Config)


class _Route(NamedTuple):
    # a path that ends in / is followed by a name; a path without keys is open
    methods: tuple[str, ...]
    keys: tuple[bytes, ...]
    answer: Answerer | None


class ProxyServer:
    """Authorizes requests and dispatches them by path."""

    def __init__(
        self,
        forwarder: Forwarder,
        *,
        table: RoutingTable,
        tally: Tally,
        cells: Cells,
        settings: ProxySettings,
        keys: ProxyKeys,
    ) -> None:
        self._settings = settings
        self._table = table
        self._tally = tally
        self._forwarder = forwarder
        self._cells = cells
        self._leases = Leases(asyncio.get_running_loop().time)
        self._news = asyncio.Event()
        self._started = int(time.time())
        self._instance = secrets.token_hex(6)
        self._admin_key = keys.admin.get_secret_value().encode()
        client, admin = (keys.client.get_secret_value().encode(),), (self._admin_key,)
        join = (keys.join.get_secret_value().encode(),)
        self._routes: dict[str, _Route] = {
            **{path.decode(): _Route(("POST",), client, None) for path in _OF_ENGINES},
            "/v1/models": _Route(("GET",), client, self._models),
            "/v1/models/": _Route(("GET",), client, self._model),
            "/version": _Route(("GET",), client, self._version),
            "/metrics": _Route(("GET",), client, self._metrics),
            "/metrics/engines": _Route(("GET",), client, self._metrics_of_engines),
            "/health": _Route(("GET",), (), self._health),
            "/pool": _Route(("GET",), client + admin, self._pool),
            "/admin/state": _Route(("PUT",), admin, self._set_state),
            "/admin/status": _Route(("GET",), client + admin, self._status),
            "/admin/leases/": _Route(("PUT", "DELETE"), client + admin, self._lease),
            "/admin/cells/": _Route(("PUT", "GET", "DELETE"), client + admin, self._cell),
            "/replicas/": _Route(("POST", "GET"), join, self._announced),
        }
        table.on_news = self._wake
        self._expiry = asyncio.create_task(self._expire())

    def refuse(self, head: Head) -> Reply | None:
        """Returns the refusal that is due before the body is read; None to go on."""
        try:
            route, _, _ = self._find(head.path)
            if route.keys and not any(_carries(head, key) for key in route.keys):
                raise Refusal(401, "The Authorization header must be Bearer and this pool's key.")
            if head.method not in route.methods:
                raise Refusal(405, f"This path takes {' or '.join(route.methods)}.")
        except Refusal as refusal:
            return refusal.reply()
        return None

    async def answer(self, request: Request, responder: Responder) -> None:
        try:
            route, name, scope = self._find(request.head.path)
            if route.answer is not None:
                responder.send(await route.answer(request, name))
                return
            if scope is not None:
                await self._cells.ensure_open(scope)
            trace = self._cells.traceparent(scope)
            await self._forwarder.answer(request, responder, target=name.encode(), scope=scope, trace=trace)
        except Refusal as refusal:
            responder.send(refusal.reply())

    def refuse_all(self, reason: str) -> None:
        self._table.failed = reason
        self._forwarder.table_changed([])

    async def close(self) -> None:
        self._expiry.cancel()
        await asyncio.gather(self._expiry, return_exceptions=True)
        await self._forwarder.close()
        await self._cells.close()

    def _find(self, path: str) -> tuple[_Route, str, CellScope | None]:
        # returns the name behind the route's path, else the path, between the two
        if "%" in path:  # a server behind it that decodes it might read another path
            raise Refusal(400, "The path must be written without %.")
        scope = None
        if path.startswith("/cells/") and (inside := _CELL.fullmatch(path)):
            scope, path = CellScope(inside[1], inside[2]), inside[3]
        route = self._routes.get(path)
        if route is not None and not path.endswith("/"):
            return route, path, scope
        if (named := _NAMED.fullmatch(path)) is not None:
            prefix, name = filter(None, named.groups())
            return self._routes[prefix], name, scope
        raise Refusal(404, "There is nothing at this path.")

    async def _models(self, _request: Request, _name: str) -> Reply:
        return _json({"object": "list", "data": self._known_models()})

    async def _model(self, _request: Request, name: str) -> Reply:
        entry = next((entry for entry in self._known_models() if entry["id"] == name), None)
        if entry is None:
            raise unknown_model(name, self._table.models or {})
        return _json(entry)

    async def _version(self, _request: Request, _name: str) -> Reply:
        versions = {replica.announcement.engine_version for replica in self._table.replicas.values()} - {None}
        if not versions:
            raise Refusal(503, "No engine has said its version yet.", retry_after_seconds=5)
        return _json({"version": ", ".join(sorted(map(str, versions)))})

    def _known_models(self) -> list[dict[str, object]]:
        entry = {"object": "model", "created": self._started, "owned_by": "assay"}
        lengths = {
            replica.announcement.digest: replica.announcement.max_model_len
            for replica in self._table.replicas.values()
            if replica.announcement.max_model_len
        }
        longest = min(lengths.values(), default=None)
        listed: list[dict[str, object]] = []
        for name, served in sorted((self._table.models or {}).items()):
            length = lengths.get(served.digest, longest)
            listed.append({"id": name, **entry, "root": served.uri, "max_model_len": length})
        return listed

    async def _health(self, _request: Request, _name: str) -> Reply:
        health = self._table.health
        replicas = [
            {
                "name": replica.name,
                "state": "lost" if replica.lost else replica.announcement.state,
                "in_flight": replica.in_flight,
            }
            for replica in self._table.replicas.values()
        ]
        reply = {"status": health, "replicas": replicas, "held": self._table.held}
        return _json(reply, status=200 if health == "ready" else 503)

    async def _metrics(self, _request: Request, _name: str) -> Reply:
        replicas, journal = self._table.status(), self._cells.journal_status
        text = prometheus_text(self._tally, replicas=replicas, held=self._table.held, journal=journal)
        return Reply(200, text.encode(), _PROMETHEUS)

    async def _metrics_of_engines(self, _request: Request, _name: str) -> Reply:
        return Reply(200, await self._forwarder.engine_metrics(), _PROMETHEUS)

    async def _pool(self, _request: Request, _name: str) -> Reply:
        if not self._settings.description:
            raise Refusal(404, "This proxy has no description of its pool.")
        checkpoints = {name: served.uri for name, served in (self._table.models or {}).items()}
        return _json({**json.loads(self._settings.description), "checkpoints": checkpoints})

    async def _set_state(self, request: Request, _name: str) -> Reply:
        self._change(self._table.apply(_read(DesiredState, request)))
        return _value(self._status_now())

    async def _status(self, request: Request, _name: str) -> Reply:
        query = parse_qs(request.head.target.partition(b"?")[2].decode("latin-1"))
        try:
            after, wait = int(query.get("after", ["-1"])[0]), float(query.get("wait", ["0"])[0])
        except ValueError:
            raise Refusal(400, "after must be a whole number, and wait a number of seconds.") from None
        await self._until(lambda: self._table.version != after, seconds=wait, gone=request.gone)
        return _value(self._status_now())

    async def _announced(self, request: Request, name: str) -> Reply:
        if request.head.method == "GET":
            heard = next((replica.announcement for replica in self._table.status() if replica.name == name), None)
            if heard is None:
                raise Refusal(404, f"Nothing has been heard of {name} yet.")
            return _value(heard)
        announcement = _read(Announcement, request)
        self._tally.announced(name, announcement)
        self._change(self._table.announce(name, announcement))
        waits = self._table.has_to_wait(name, announcement.instance)

        def orders() -> Orders:
            return self._table.orders_of(name, announcement.instance)

        def is_news() -> bool:
            now = orders()
            if waits and not self._table.has_to_wait(name, announcement.instance):
                return True
            return now.stop or (now.in_flight == 0 if announcement.until_idle else now.version != announcement.seen)

        try:
            await self._until(is_news, seconds=announcement.wait_seconds, gone=request.gone)
        finally:
            if request.gone.done():
                self._table.hung_up(name, announcement.instance)
        return _value(orders())

    async def _lease(self, request: Request, name: str) -> Reply:
        if request.head.method == "DELETE":
            self._leases.end(name)
        else:
            lease = _read(Lease, request)
            if not _carries(request.head, self._admin_key):
                lease = of_known_models(lease, self._table.models or {})
            self._check_digests(name, lease)
            self._leases.take(name, lease)
        self._table.bump()
        return _value(self._status_now())

    def _check_digests(self, name: str, lease: Lease) -> None:
        for other, held in self._leases.status().items():
            for model, served in lease.models.items():
                if other != name and model in held.models and held.models[model].digest != served.digest:
                    raise Refusal(409, f"{held.holder} uses the name {model} for another checkpoint.", param=model)

    async def _cell(self, request: Request, name: str) -> Reply:
        cell, _, attempt = name.partition("/")
        scope, options = CellScope(cell, attempt), _read(CellOptions, request) if request.body else CellOptions()
        mirrored = options.mirror is not None or self._cells.is_mirrored(cell)
        if mirrored and request.head.method != "GET" and not _carries(request.head, self._admin_key):
            raise Refusal(403, "Only the pool's admin key may have copies of answers written, or deleted.")
        match request.head.method:
            case "PUT":
                await self._cells.open(scope, options)
            case "DELETE":
                await self._cells.close_cell(scope, options)
        return _json(asdict(self._tally.cell(cell, attempt)))

    def _status_now(self) -> ProxyStatus:
        return ProxyStatus(
            instance=self._instance,
            version=self._table.version,
            status=self._table.health,
            replicas=self._table.status(),
            held=self._table.held,
            models=self._tally.models,
            demand=self._table.demand(),
            unusable=dict(self._table.unusable),
            failed=self._table.failed,
            replica_seconds=self._table.replica_seconds(),
            leases=self._leases.status(),
            journal=self._cells.journal_status,
        )

    def _change(self, lost: list[RoutedReplica]) -> None:
        self._forwarder.table_changed(lost)
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _until(self, condition: Callable[[], bool], *, seconds: float, gone: asyncio.Future[None]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_LONGEST_WAIT_SECONDS, seconds)):
                while not condition() and not gone.done():
                    await self._news.wait()

    async def _expire(self) -> None:
        loop, lease_seconds, stalled = asyncio.get_running_loop(), self._settings.lease_seconds, 0.0
        pause = min(_EXPIRY_SECONDS, lease_seconds / 4)
        while True:
            if lost := self._table.expire(lease_seconds, stalled_seconds=stalled):
                _log.warning("lease of %s has run out", ", ".join(replica.name for replica in lost))
                self._forwarder.table_changed(lost)
            if self._leases.expire():
                self._table.bump()
            due = loop.time() + pause
            await asyncio.sleep(pause)
            stalled = max(0.0, loop.time() - due)


def _read(kind: type[Value], request: Request) -> Value:
    try:
        return kind.model_validate_json(request.body)
    except ValidationError as error:
        raise Refusal(400, str(error)) from None


def _value(value: Config) -> Reply:
    return Reply(200, value.model_dump_json().encode())


def _json(content: object, *, status: int = 200) -> Reply:
    return Reply(status, json.dumps(content).encode())


def _carries(head: Head, key: bytes) -> bool:
    scheme, _, given = (head.header(b"authorization") or b"").partition(b" ")
    return hmac.compare_digest(given.strip(), key) and scheme.lower() == b"bearer"
