"""How answers lie in the journal: compressed, and unless the user allows prompts on disk, encrypted.

The key of the encryption follows from the request. Whoever has the request can read its answer, nobody else can.
"""

from __future__ import annotations

import os
import zlib

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE_BYTES = 12
_PLAIN, _COMPRESSED = b"\0", b"\1"
_LEAST_COMPRESSED_BYTES = 2048
"""Smaller bodies are encrypted as they are: compressing 1 kB saves 400 bytes and takes longer than all else here."""


class Unreadable(Exception):
    """A stored body is damaged, or belongs to another request."""


def compressed(body: bytes) -> bytes:
    """A body as a zlib stream, made for speed."""
    return zlib.compress(body, 1)


def decompressed(stored: bytes) -> bytes:
    """The body behind a zlib stream.

    Raises:
        Unreadable: it is none, or is damaged.
    """
    try:
        return zlib.decompress(stored)
    except (zlib.error, TypeError) as error:
        raise Unreadable(str(error)) from None


def sealed(body: bytes, *, seal: bytes, content_type: str) -> bytes:
    """A body encrypted with AES-256-GCM: 12 bytes nonce, then the cipher text with its tag.

    The plain text is a zero byte and the body, or a one and the body as a zlib stream.
    """
    nonce = os.urandom(_NONCE_BYTES)
    plain = _PLAIN + body if len(body) < _LEAST_COMPRESSED_BYTES else _COMPRESSED + compressed(body)
    return nonce + AESGCM(seal).encrypt(nonce, plain, content_type.encode())


def unsealed(stored: bytes, *, seal: bytes, content_type: str) -> bytes:
    """The body that was sealed.

    Raises:
        Unreadable: it is damaged, or was sealed for another request or content type.
    """
    try:
        plain = AESGCM(seal).decrypt(stored[:_NONCE_BYTES], stored[_NONCE_BYTES:], content_type.encode())
    except (InvalidTag, ValueError, TypeError, AttributeError) as error:
        raise Unreadable(type(error).__name__) from None
    return plain[1:] if plain.startswith(_PLAIN) else decompressed(plain[1:])
