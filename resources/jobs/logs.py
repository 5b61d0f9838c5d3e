"""Logs of jobs: the part after a position, and the ends of several logs under headings."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from resources.errors import BadInput
from resources.storage.regular_files import UnsafeFile, open_within

PART_BYTES = 1 << 20
"""Approximate size limit of a part."""


@dataclass(frozen=True)
class LogPart:
    """A part of a replica's log."""

    output: bytes
    """Bytes as written, if the backend keeps them, else whole lines; empty without new output."""
    end: str
    """Position after this part, from which the next part is requested."""
    follows_dropped: bool = False
    """True if the backend has dropped lines between the position and this part."""


def part_of_file(path: Path, after: str) -> LogPart:
    """Returns the part of a log file after a position, which is a byte offset."""
    start = int(after or 0)
    try:
        with os.fdopen(open_within(path), "rb") as log:
            log.seek(start)
            output = log.read(PART_BYTES)
    except (FileNotFoundError, UnsafeFile):  # nothing has started yet
        output = b""
    return LogPart(output, str(start + len(output)))


def part_of_hosts(read: Callable[[int, str], LogPart], hosts: int, *, after: str) -> LogPart:
    """Returns the part of a replica's log from its hosts; with several hosts, each line has its host number as prefix.

    `read` returns a part of a host's log for the host index and a position without spaces; with several hosts, whole
    lines.
    """
    if hosts == 1:
        return read(0, after)
    positions = after.split(" ") if after else [""] * hosts
    parts = [read(host, position) for host, position in enumerate(positions)]
    output = b"".join(
        b"(host %d) %b\n" % (host, line)
        for host, part in enumerate(parts)
        for line in part.output.removesuffix(b"\n").split(b"\n")
        if part.output
    )
    return LogPart(output, " ".join(part.end for part in parts), any(part.follows_dropped for part in parts))


def logs_by_replica(read: Callable[[int], str], count: int, *, replica: int | None) -> str:
    """Returns the log of a replica by its index, or the logs of all `count` replicas under headings when None."""
    if replica is None and count > 1:
        return "\n".join(f"==> replica {index} <==\n{read(index)}" for index in range(count))
    check_replica(replica or 0, count)
    return read(replica or 0)


def check_replica(replica: int, count: int) -> None:
    """Raises `BadInput` for the index of a replica that a job does not have."""
    if not 0 <= replica < count:
        raise BadInput(expected=f"a replica from 0 to {count - 1}", found=str(replica), remedy="Choose one of those.")
