"""Hashes the words of texts, 1 MiB at a time, to compare questions with training texts.

HTML entities and escapes such as \\u00e9 are decoded once, characters are normalized to NFKC, and invisible characters
(soft hyphens, zero-width spaces, direction marks, variation selectors) are dropped. Words are lower case, separated by
everything but letters and digits, including punctuation beyond ASCII (general, Latin-1, Chinese and Japanese). Each
Chinese or Japanese character is a word. Questions and training texts go through the same function.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the import takes 0.15 s, unneeded in most processes
    import numpy as np

SEPARATOR = "\x01"
"""A word that no question contains, put between texts, so that no match spans two texts."""
_SPACE, _PAD = 0x20, 16
_KEPT = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyz\x01")
_TABLE = bytes(byte if byte in _KEPT or byte >= 0x80 else _SPACE for byte in range(256))
_MIX, _FOLD, _STEP = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F  # odd: multiplication is invertible
_WHOLE = 2**64
_ESCAPES = re.compile(r"(?:\\u[0-9a-fA-F]{4})+")
_INVISIBLE = r"[\p{Cf}\x{34f}\x{fe00}-\x{fe0f}\x{e0100}-\x{e01ef}]+"  # and a joiner, and variation selectors


class Words(NamedTuple):
    """The words of some texts, concatenated: start and end of each in the text, and a hash for each."""

    text: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray

    def between(self, first: int, last: int) -> list[bytes]:
        """Returns the normalized words from index `first` to before `last`."""
        return [
            self.text[start:end].tobytes()
            for start, end in zip(self.starts[first:last], self.ends[first:last], strict=True)
        ]


def words_of(texts: Sequence[str]) -> Words:
    """Returns the words of texts, with a separator between texts."""
    import numpy as np
    import pyarrow
    from pyarrow import compute

    joined = f" {SEPARATOR} ".join(_decoded(text).replace(SEPARATOR, " ") for text in texts)
    if not joined.isascii():
        joined = unicodedata.normalize("NFKC", joined)  # Arrow's normalization keeps accents separate
    try:
        whole = pyarrow.array([joined], pyarrow.large_string())
    except UnicodeEncodeError:  # half of a surrogate pair
        return words_of([text.encode(errors="replace").decode() for text in texts])
    if not joined.isascii():
        options = compute.ReplaceSubstringOptions(_INVISIBLE, "")
        whole = compute.call_function("replace_substring_regex", [whole], options)
    lower = compute.call_function("utf8_lower", [whole])
    content = bytes(lower.buffers()[2] or b"").translate(_TABLE)
    text = np.frombuffer(bytearray(content + bytes([_SPACE]) * _PAD), dtype=np.uint8)
    beyond = np.flatnonzero(text >= 0x80)
    if len(beyond):
        _blank_punctuation(text, beyond)
    inside = text != _SPACE
    begins = inside.copy()
    begins[1:] &= ~inside[:-1]
    if len(beyond):
        asian = beyond[(text[beyond] >= 0xE3) & (text[beyond] <= 0xE9)]  # U+3000 to U+9FFF, three bytes each
        begins[asian] = True
        begins[asian + 3] = inside[asian + 3]
    stops = inside[:-1] & (~inside[1:] | begins[1:])
    starts, ends = np.flatnonzero(begins), np.flatnonzero(stops) + 1
    return Words(text, starts, ends, _hashes(text, starts, ends))


def runs_of(hashes: np.ndarray, length: int) -> np.ndarray:
    """Returns a hash for each window of `length` words, by its start; shorter than `hashes` by `length` - 1."""
    import numpy as np

    total, covered = None, 0
    power, span = hashes, 1
    for bit in range(length.bit_length()):
        if length >> bit & 1:
            if total is None:
                total, covered = power, span
            else:
                size = max(0, min(len(total) - span, len(power)))
                total = power[:size] * np.uint64(pow(_STEP, covered, _WHOLE)) + total[span : span + size]
                covered += span
        if length >> (bit + 1):
            size = max(0, len(power) - span)
            power = power[:size] * np.uint64(pow(_STEP, span, _WHOLE)) + power[span : span + size]
            span *= 2
    assert total is not None
    return total


def _decoded(text: str) -> str:
    if "\\u" in text:  # first, since such escapes can encode an ampersand
        text = _ESCAPES.sub(
            lambda match: bytes.fromhex(match[0].replace("\\u", "")).decode("utf-16-be", "replace"), text
        )
    return html.unescape(text) if "&" in text else text


def _blank_punctuation(text: np.ndarray, beyond: np.ndarray) -> None:
    lead, second = text[beyond], text[beyond + 1]
    general = beyond[(lead == 0xE2) & ((second == 0x80) | (second == 0x81))]
    asian = beyond[(lead == 0xE3) & (second == 0x80)]
    third = text[beyond + 2]
    wide = beyond[(lead == 0xEF) & (second == 0xBC) & ((third <= 0x8F) | ((third >= 0x9A) & (third <= 0x9F)))]
    for positions in (general, asian, wide):
        for offset in range(3):
            text[positions + offset] = _SPACE
    latin = beyond[lead == 0xC2]
    text[latin] = _SPACE
    text[latin + 1] = _SPACE


def _hashes(text: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    import numpy as np

    eight = np.ndarray(len(text) - 7, dtype="<u8", buffer=text, strides=(1,))
    masks = np.array([(1 << (8 * size)) - 1 for size in range(9)], dtype=np.uint64)
    lengths = ends - starts
    hashes = eight[starts] & masks[np.minimum(lengths, 8)]
    hashes ^= hashes >> np.uint64(32)
    hashes *= np.uint64(_MIX)
    long = np.flatnonzero(lengths > 8)
    if len(long):
        more = eight[starts[long] + 8] & masks[np.minimum(lengths[long] - 8, 8)]
        last = eight[ends[long] - 8]
        hashes[long] += (more ^ (last >> np.uint64(7)) ^ lengths[long].astype(np.uint64)) * np.uint64(_FOLD)
    hashes ^= hashes >> np.uint64(29)
    return hashes
