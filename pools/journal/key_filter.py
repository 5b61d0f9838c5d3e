"""In-memory filter of the journal's keys, so that most new requests need no look-up in the file."""

from __future__ import annotations

import sqlite3

_BITS = 2**26
"""8 MiB, of which only the written pages take memory; with four million keys, 1 in 20 look-ups is a false positive."""
_SLICE_KEYS = 1000
_SCANS = tuple(
    f"SELECT key FROM answers WHERE {kind} AND key > ? ORDER BY key LIMIT {_SLICE_KEYS}"  # each read from an index
    for kind in ("deterministic = 1 AND imported = 0", "deterministic = 1 AND imported = 1", "deterministic = 0")
)


class KeyFilter:
    """The keys of a file's rows: existing keys are read in slices, and new keys are added.

    Until all keys are read, every key counts as possibly present. A deleted key stays.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._bits = bytearray(_BITS // 8)
        self._last_id = self._newest_id()
        self._version = -1
        self._scans = [*_SCANS] if self._last_id else []
        self._after = b""

    @property
    def is_complete(self) -> bool:
        return not self._scans

    def committed(self, number: int, key: bytes) -> None:
        self._add(key)
        if number == self._last_id + 1:  # else another connection has written too; look_for_news reads its rows
            self._last_id = number

    def may_hold(self, key: bytes) -> bool:
        """Returns False if no row with this key existed at the last look for news."""
        if self._scans:
            return True
        place = int.from_bytes(key[:4]) % _BITS
        return bool(self._bits[place >> 3] & 1 << (place & 7))

    def read_slice(self) -> None:
        keys = self._connection.execute(self._scans[0], (self._after,)).fetchall()
        for (key,) in keys:
            self._add(key)
        if len(keys) == _SLICE_KEYS:
            self._after = keys[-1][0]
        else:
            self._scans.pop(0)
            self._after = b""

    def look_for_news(self) -> None:
        """Adds the keys that other connections have committed since the last call."""
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        if version == self._version:
            return
        self._version = version
        for number, key in self._connection.execute("SELECT id, key FROM answers WHERE id > ?", (self._last_id,)):
            self._add(key)
            self._last_id = number

    def _newest_id(self) -> int:
        return self._connection.execute("SELECT coalesce(max(id), 0) FROM answers").fetchone()[0]

    def _add(self, key: bytes) -> None:
        place = int.from_bytes(key[:4]) % _BITS
        self._bits[place >> 3] |= 1 << (place & 7)
