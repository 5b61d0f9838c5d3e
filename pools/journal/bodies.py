"""Answers as they lie in the journal: a checksum, and the bytes, compressed where that pays."""

from __future__ import annotations

import zlib

_CHECKSUM_BYTES = 4
_PLAIN, _COMPRESSED = b"\0", b"\1"
_LEAST_COMPRESSED_BYTES = 2048
"""Smaller bodies are stored as they are: compressing 1 kB saves 400 bytes and takes longer than all else here."""


class Unreadable(Exception):
    """A stored body is damaged, or belongs to another request."""


def compressed(body: bytes) -> bytes:
    """A body as a zlib stream, made for speed."""
    return zlib.compress(body, 1)


def packed(body: bytes, *, key: bytes, content_type: str) -> bytes:
    """A body as it is stored: CRC-32 over all of it, then a zero byte and the body, or a one and a zlib stream."""
    content = _PLAIN + body if len(body) < _LEAST_COMPRESSED_BYTES else _COMPRESSED + compressed(body)
    return _checksum(content, key=key, content_type=content_type) + content


def unpacked(stored: bytes, *, key: bytes, content_type: str) -> bytes:
    """The body that was packed.

    Raises:
        Unreadable: it is damaged, or was packed for another request or content type.
    """
    try:
        content = stored[_CHECKSUM_BYTES:]
        if stored[:_CHECKSUM_BYTES] != _checksum(content, key=key, content_type=content_type):
            raise Unreadable("its checksum is another one")
        return content[1:] if content.startswith(_PLAIN) else zlib.decompress(content[1:])
    except (zlib.error, TypeError) as error:
        raise Unreadable(str(error)) from None


def _checksum(content: bytes, *, key: bytes, content_type: str) -> bytes:
    return zlib.crc32(content, zlib.crc32(key + content_type.encode())).to_bytes(_CHECKSUM_BYTES, "big")
