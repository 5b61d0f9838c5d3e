"""Read-only server of a view, for a single user with its address.

Every path must start with a random token. Requests with an unknown `Host` name are refused, against DNS rebinding by
other sites. Only the page's files and the columns are served: no name is a path on disk.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import secrets
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import urlsplit

import orjson
from aiohttp import web

from resources.errors import BadInput, StorageError
from tasks.reports.viewer.columns import Progress, packed
from tasks.reports.viewer.page import CONTENT_TYPES, page_files
from tasks.reports.viewer.view import View

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Security headers of every response."""
_EARLY = ("questions.json", "flags.bin", "scores/", "part/")  # answered while samples are being read
_NUMBER = re.compile(r"[0-9]{1,6}")
_PATIENCE_SECONDS = 0.5  # wait of a request for samples before it gets a progress response
_CLOSING_SECONDS = 1.0
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve(view: View, *, host: str, port: int, on_address: Callable[[str], None]) -> None:
    """Serves a view until Ctrl-C or SIGTERM; calls `on_address` with address and token. Port 0 takes a free port."""
    asyncio.run(_serve(view, host, port, on_address))


async def _serve(view: View, host: str, port: int, on_address: Callable[[str], None]) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    token = secrets.token_urlsafe(24)
    runner = web.AppRunner(application(view, token=token, host=host), access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, shutdown_timeout=_CLOSING_SECONDS).start()
        except OSError as error:
            raise BadInput(
                expected=f"to listen at {host}, port {port}", found=str(error), remedy="name another --host or --port"
            ) from error
        name, bound = runner.addresses[0][:2]
        on_address(f"http://{f'[{name}]' if ':' in name else name}:{bound}/{token}/")
        await ended.wait()
    finally:
        view.end_reading()
        await runner.cleanup()


def application(view: View, *, token: str, host: str) -> web.Application:
    """Returns the web application of a view; `token` is the first part of every path.

    `host` is an accepted `Host` name, in addition to `localhost` and IP addresses.
    """
    reading: dict[str, asyncio.Future[None]] = {}

    @web.middleware
    async def guarded(request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.path.lstrip("/").partition("/")[0]
        if not _is_own_name(request.headers.get("Host", ""), host):
            response: web.StreamResponse = _refusal(403, "This server is not known by that name.")
        elif not hmac.compare_digest(given.encode(errors="replace"), token.encode()):
            response = _refusal(403, "The address lacks the token that assay view has printed.")
        elif request.method not in ("GET", "HEAD"):
            response = _refusal(405, "This server can only be read.")
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = _refusal(error.status, error.reason)
            except StorageError as error:
                response = _refusal(500, str(error))
        response.headers.update(HEADERS)
        return response

    async def answered(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"] or "index.html"
        if name in page_files():
            kind = CONTENT_TYPES[name.rpartition(".")[2]]
            return _response(request, page_files()[name], kind)
        key, _, asked = name.partition("/")
        if key in view.boards:
            early = asked.startswith(_EARLY)
            begun = early and await asyncio.to_thread(view.has_scores, key)
            progress = await _progress(key, patience_seconds=0.0 if begun else _PATIENCE_SECONDS)
            if progress is not None and not (begun or (early and await asyncio.to_thread(view.has_scores, key))):
                return web.Response(body=orjson.dumps(progress), status=202, content_type="application/json")
        if key in view.boards and asked == "search.json":
            matches = await asyncio.to_thread(view.search, key, request.query.get("text", ""))
            return _response(request, orjson.dumps(matches), "application/json")
        unread = request.query.get("unread", "")
        content = await asyncio.to_thread(view.answer, name, unread=int(unread) if _NUMBER.fullmatch(unread) else None)
        if content is None:
            raise web.HTTPNotFound
        return _response(request, content, "application/octet-stream" if name.endswith(".bin") else "application/json")

    async def _progress(key: str, *, patience_seconds: float) -> Progress | None:
        if await asyncio.to_thread(view.unread, key) is None:
            return None
        if key not in reading:
            reading[key] = asyncio.ensure_future(asyncio.to_thread(view.read, key))
        running = reading[key]
        ended, _ = await asyncio.wait([running], timeout=patience_seconds)
        progress = await asyncio.to_thread(view.unread, key)
        if ended:
            if reading.get(key) is running:
                del reading[key]
            error = running.exception()
            if error is not None or progress is not None:
                raise StorageError(
                    expected=f"to read the samples of {view.boards[key].shown.benchmark}",
                    found=f"{type(error).__name__}: {error}" if error else "some that are still not read",
                    remedy="load the page again, which reads the missing samples",
                ) from error
        return progress

    made = web.Application(middlewares=[guarded])
    made.router.add_route("*", "/{token}/{name:.*}", answered)
    return made


def _is_own_name(given: str, host: str) -> bool:
    try:
        name = urlsplit(f"//{given}").hostname
    except ValueError:
        return False
    if not name:
        return False
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return name in ("localhost", host.lower())


def _response(request: web.Request, content: bytes, kind: str) -> web.Response:
    response = web.Response(body=content, content_type=kind, charset="utf-8" if kind.startswith("text/") else None)
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        response.body = packed(content)
        response.headers["Content-Encoding"] = "gzip"
    return response


def _refusal(status: int, text: str) -> web.Response:
    return web.Response(body=orjson.dumps({"error": text}), status=status, content_type="application/json")
