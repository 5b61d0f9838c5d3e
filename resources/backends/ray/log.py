"""The end of a process's output, in memory."""

from __future__ import annotations

from resources.backends.ray.orders import LOG_BYTES


class LogTail:
    """At least the last megabyte of what was added, and at most two."""

    def __init__(self) -> None:
        self._content = bytearray()

    def __len__(self) -> int:
        return len(self._content)

    def add(self, output: bytes) -> None:
        """Appends output."""
        self._content += output
        if len(self._content) > 2 * LOG_BYTES:
            del self._content[:-LOG_BYTES]

    def last(self, max_lines: int) -> str:
        """The last lines, of a megabyte at most."""
        lines = self._content[-LOG_BYTES:].decode(errors="replace").splitlines()
        return "\n".join(lines[-max_lines:] if max_lines > 0 else [])
