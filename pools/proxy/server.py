"""What answers each path of the proxy, and who may ask."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web
from pydantic import ValidationError

from pools.proxy.counters import Tally, prometheus_text
from pools.proxy.forwarding import Forwarder
from pools.proxy.replies import Refusal
from pools.proxy.request import read_body
from pools.proxy.routing import RoutingTable
from pools.proxy.state import DesiredState, ProxyLimits, ProxyStatus
from resources.settings import ProxyKeys

_log = logging.getLogger("assay.proxy")

Answerer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class ProxyServer:
    """Authorization, and the way from a path to what answers it.

    Args:
        session: for requests to replicas.
        limits: bounds and time-outs.
        keys: of clients and of the pool.
    """

    def __init__(self, session: aiohttp.ClientSession, *, limits: ProxyLimits, keys: ProxyKeys) -> None:
        self._limits = limits
        self._table = RoutingTable()
        self._tally = Tally()
        self._forwarder = Forwarder(session, table=self._table, tally=self._tally, limits=limits)
        client_key = keys.client.get_secret_value().encode()
        admin_key = keys.admin.get_secret_value().encode()
        self._started = int(time.time())
        self._routes: dict[str, tuple[str, bytes | None, Answerer]] = {
            "/v1/completions": ("POST", client_key, self._forwarder.answer),
            "/v1/chat/completions": ("POST", client_key, self._forwarder.answer),
            "/v1/models": ("GET", client_key, self._models),
            "/metrics": ("GET", client_key, self._metrics),
            "/health": ("GET", None, self._health),
            "/admin/state": ("PUT", admin_key, self._set_state),
            "/admin/status": ("GET", admin_key, self._status),
        }

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The answer to any request."""
        try:
            route = self._routes.get(request.path)
            if route is None:
                raise Refusal(404, "There is nothing at this path.")
            method, key, answerer = route
            if key is not None and not _carries(request, key):
                raise Refusal(401, "The Authorization header must be Bearer and this pool's key.")
            if request.method != method:
                raise Refusal(405, f"This path takes {method}.")
            return await answerer(request)
        except Refusal as refusal:
            return refusal.response()
        except Exception as error:  # noqa: BLE001 - the boundary: one request must not show its text in a log
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            place = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else "?"
            _log.error("%s at %s", type(error).__name__, place)
            return Refusal(500, "The proxy failed to handle this request.").response()

    def refuse_all(self, reason: str) -> None:
        """Answers every request that waits, and every later one, with 503 and this reason."""
        self._table.failed = reason
        self._forwarder.table_changed([])

    async def close(self) -> None:
        """Ends what runs beside requests."""
        await self._forwarder.close()

    async def _models(self, _request: web.BaseRequest) -> web.Response:
        entry = {"object": "model", "created": self._started, "owned_by": "assay"}
        names = sorted(self._table.models or {})
        return web.json_response({"object": "list", "data": [{"id": name, **entry} for name in names]})

    async def _health(self, _request: web.BaseRequest) -> web.Response:
        health = self._table.health
        replicas = [
            {"name": one.name, "state": one.state, "suspect": one.suspect, "in_flight": one.in_flight}
            for one in self._table.replicas.values()
        ]
        reply = {"status": health, "replicas": replicas, "held": self._forwarder.held}
        return web.json_response(reply, status=200 if health == "ready" else 503)

    async def _metrics(self, _request: web.BaseRequest) -> web.Response:
        replicas = [replica.status for replica in self._table.replicas.values()]
        text = prometheus_text(self._tally, replicas=replicas, held=self._forwarder.held)
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _set_state(self, request: web.BaseRequest) -> web.Response:
        body = await read_body(request, limit_bytes=self._limits.max_body_bytes)
        try:
            desired = DesiredState.model_validate_json(body)
        except ValidationError as error:
            raise Refusal(400, str(error)) from None
        self._forwarder.table_changed(self._table.apply(desired))
        return await self._status(request)

    async def _status(self, _request: web.BaseRequest) -> web.Response:
        status = ProxyStatus(
            status=self._table.health,
            replicas=tuple(replica.status for replica in self._table.replicas.values()),
            held=self._forwarder.held,
            models={name: tally.counters for name, tally in self._tally.models.items()},
        )
        return web.Response(body=status.model_dump_json().encode(), content_type="application/json")


def _carries(request: web.BaseRequest, key: bytes) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key) and scheme.lower() == "bearer"
