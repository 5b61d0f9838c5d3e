"""Logs of jobs: the part of one that comes after a position, and the ends of several under headings."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from resources.errors import BadInput
from resources.storage.regular_files import UnsafeFile, open_within

PART_BYTES = 1 << 20
"""Longest part that is read at once, about."""


@dataclass(frozen=True)
class LogPart:
    """A piece of what a replica has written."""

    output: bytes
    """As it was written, where the backend keeps that, else whole lines; empty where there is nothing new."""
    end: str
    """Position after it: what to ask with for the piece that follows."""
    dropped_lines: int | None = 0
    """Lines before it that the backend keeps no more; None where it does not say how many."""


def part_of_file(path: Path, after: str) -> LogPart:
    """The part of a log that lies in a file; positions are offsets."""
    start = int(after or 0)
    try:
        with os.fdopen(open_within(path), "rb") as log:
            log.seek(start)
            output = log.read(PART_BYTES)
    except (FileNotFoundError, UnsafeFile):  # nothing has started yet
        output = b""
    return LogPart(output, str(start + len(output)))


def part_of_hosts(read: Callable[[int, str], LogPart], hosts: int, *, after: str) -> LogPart:
    """The part of a replica's log that its hosts wrote, each line behind the number of its host if there are several.

    Args:
        read: gives a part of one host's log, given its index and a position without spaces; whole lines if there are
            several hosts.
        hosts: how many there are.
        after: the position after the last part.
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
    dropped = [part.dropped_lines for part in parts]
    known = [count for count in dropped if count is not None]
    return LogPart(output, " ".join(part.end for part in parts), sum(known) if len(known) == len(dropped) else None)


def logs_by_replica(read: Callable[[int], str], count: int, *, replica: int | None) -> str:
    """The log of one replica, or those of all under headings when None.

    Args:
        read: gives the log of one, by its index.
        count: how many there are.
        replica: which one.
    """
    if replica is None and count > 1:
        return "\n".join(f"==> replica {index} <==\n{read(index)}" for index in range(count))
    check_replica(replica or 0, count)
    return read(replica or 0)


def check_replica(replica: int, count: int) -> None:
    """Refuses the index of a replica that a job does not have."""
    if not 0 <= replica < count:
        raise BadInput(expected=f"a replica from 0 to {count - 1}", found=str(replica), remedy="Choose one of those.")
