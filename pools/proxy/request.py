"""Reading a client's request: all of its bytes, and the two fields the proxy needs to know."""

from __future__ import annotations

import json
from dataclasses import dataclass

from aiohttp import web
from multidict import CIMultiDict

from pools.proxy.replies import OURS_TO_KEEP, Refusal, passed_on


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's request. `target` is its path with the query; `headers` are those a replica gets to see."""

    target: str
    headers: CIMultiDict[str]
    body: bytes
    model: str
    stream: bool


async def read_request(request: web.BaseRequest, *, limit_bytes: int) -> Asked:
    """A completion request, whole.

    Raises:
        Refusal: it is too large, not JSON, or names no model.
    """
    body = await read_body(request, limit_bytes=limit_bytes)
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, "The body is not valid JSON.") from None
    model = fields.get("model") if isinstance(fields, dict) else None
    if not isinstance(model, str):
        raise Refusal(400, "The body must be a JSON object with the name of a model.", param="model")
    return Asked(
        target=request.path_qs,
        headers=passed_on(request.headers, dropped=OURS_TO_KEEP),
        body=body,
        model=model,
        stream=bool(fields.get("stream")),
    )


async def read_body(request: web.BaseRequest, *, limit_bytes: int) -> bytes:
    """The whole body of a request.

    Raises:
        Refusal: it is larger than the limit, or not well-formed HTTP.
    """
    too_large = Refusal(413, f"The body is larger than {limit_bytes} bytes.")
    if (request.content_length or 0) > limit_bytes:
        raise too_large
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # none of these bytes belong to the answer
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except web.RequestPayloadError:
        raise Refusal(400, "The body is not well-formed HTTP.") from None
