"""First process of a pod: runs a replica, or prints the replica's announcements and result.

    python3 -I -S run_in_pod.py run <job folder> <run folder> <heartbeat folder> <termination message>
    python3 -I -S run_in_pod.py announce <run folder>

Needs the standard library only. The job folder is a mounted Secret: `pod.json`, and for a callable `call.pickle` and
`run_call.py`. The heartbeat folder is a mounted ConfigMap that the job's owner keeps rewriting: if its content has not
changed for `lease_seconds` by this pod's clock, the owner is gone and the program ends the replica.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ORPHANED = "the process that submitted it has ended"
_NOT_STARTED = 127  # exit code of shells for a command that cannot be executed
_TERMINATED = 128 + signal.SIGTERM
_LOOKS_PER_LEASE = 10
_ANNOUNCEMENT_SECONDS = 0.2
_POLL_SECONDS = 0.05
_PRINTING_SECONDS = 60.0  # the announcer container may be restarting
_MEGASCALE_PORT = 8081
_PRINTED_BYTES = 6 * 1024  # bytes of a result per printed line: container runtimes split lines at 16 KiB


def variables(specification: dict[str, Any], inherited: dict[str, str], *, run_folder: Path) -> dict[str, str]:
    """Returns the environment of a replica's process; variables set by GKE override those derived from names."""
    replica, host = divmod(int(inherited.get("JOB_COMPLETION_INDEX", "0")), specification["vms"])
    slices: dict[str, str] = {}
    if jobset := inherited.pop("ASSAY_JOBSET", ""):
        replica = int(inherited.pop("ASSAY_SLICE_INDEX"))
        slices = {
            "MEGASCALE_COORDINATOR_ADDRESS": f"{jobset}-slice-0-0.{jobset}:{_MEGASCALE_PORT}",
            "MEGASCALE_PORT": str(_MEGASCALE_PORT),
            "MEGASCALE_NUM_SLICES": str(specification["replicas"]),
            "MEGASCALE_SLICE_ID": str(replica),
        }
    environment = {
        **slices,
        **inherited,
        "PYTHONUNBUFFERED": "1",
        **specification["env_vars"],
        "ASSAY_JOBS": specification["jobs"],
        "ASSAY_JOB_ID": specification["job_id"],
        "ASSAY_REPLICA_INDEX": str(replica),
        "ASSAY_REPLICA_COUNT": str(specification["replicas"]),
        "ASSAY_HOST_INDEX": str(host),
        "ASSAY_HOST_COUNT": str(specification["vms"]),
        "ASSAY_ANNOUNCEMENT": str(run_folder / "announcement"),
        "ASSAY_RESULT": str(run_folder / "result"),
    }
    if first := specification["path_first"]:
        environment["PATH"] = os.pathsep.join([first, environment.get("PATH", os.defpath)])
    return environment


def run(job_folder: Path, run_folder: Path, heartbeat_folder: Path, message: Path) -> int:
    """Runs the replica to its end and returns its exit code, which is 128 + n after signal n."""
    specification = json.loads((job_folder / "pod.json").read_text())
    argv = specification["argv"] or [
        sys.executable,
        *(str(job_folder / name) for name in ("run_call.py", "call.pickle")),
        str(Path.cwd()),
    ]
    environment = variables(specification, dict(os.environ), run_folder=run_folder)
    stopping, orphaned = threading.Event(), threading.Event()
    replica: list[subprocess.Popen[bytes]] = []

    def stop(*_: object) -> None:
        stopping.set()
        for process in replica:
            _send(process.pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)  # otherwise the first process of a pod ignores SIGTERM
    try:
        process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"could not be started: {error}", flush=True)
        return _NOT_STARTED
    replica.append(process)
    if stopping.is_set():
        _send(process.pid, signal.SIGTERM)
    if specification["lease_seconds"]:
        lease = _Lease(heartbeat_folder, specification["lease_seconds"], specification["grace_seconds"])
        threading.Thread(target=_end_when_orphaned, args=(process, lease, orphaned, message), daemon=True).start()
    while True:  # as PID 1 this process also reaps orphans
        pid, status = os.waitpid(-1, 0)
        if pid == process.pid:
            code = os.waitstatus_to_exitcode(status)
            process.returncode = code
            if code == 0 and (stopping.is_set() or orphaned.is_set()):
                return _TERMINATED  # a program that exits with 0 on request has not finished
            _wait_until_printed(run_folder / "result", stopping, orphaned)
            return code if code >= 0 else 128 - code


def _wait_until_printed(result: Path, *ended: threading.Event) -> None:
    deadline = time.monotonic() + _PRINTING_SECONDS
    while result.exists() and time.monotonic() < deadline and not any(event.is_set() for event in ended):
        time.sleep(_POLL_SECONDS)


def announce(run_folder: Path) -> None:
    """Prints the announcement as a JSON line on each change until the pod ends, and the result in pieces."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    printed: str | None = None
    while True:
        with suppress(OSError):
            text = (run_folder / "announcement").read_text()
            if text != printed:
                print(json.dumps(text), flush=True)
                printed = text
        with suppress(FileNotFoundError):
            _print_result(run_folder / "result")
            if printed is not None:  # keeps the announcement as the last line
                print(json.dumps(printed), flush=True)
        time.sleep(_ANNOUNCEMENT_SECONDS)


def _print_result(path: Path) -> None:
    content = path.read_bytes()
    pieces = [content[start : start + _PRINTED_BYTES] for start in range(0, len(content), _PRINTED_BYTES)]
    for index, piece in enumerate(pieces):
        line = {"result": base64.b64encode(piece).decode(), "piece": index, "pieces": len(pieces)}
        print(json.dumps(line), flush=True)
    path.unlink()


class _Lease(NamedTuple):
    folder: Path
    lease_seconds: float
    grace_seconds: float


def _end_when_orphaned(
    process: subprocess.Popen[bytes], lease: _Lease, orphaned: threading.Event, message: Path
) -> None:
    seen, seen_at = _beat(lease.folder), time.monotonic()
    while time.monotonic() - seen_at < lease.lease_seconds:
        time.sleep(lease.lease_seconds / _LOOKS_PER_LEASE)
        if (beat := _beat(lease.folder)) != seen:
            seen, seen_at = beat, time.monotonic()
    orphaned.set()
    with suppress(OSError):
        message.write_text(ORPHANED)
    print(f"{ORPHANED}: no sign of it for {lease.lease_seconds:g} s", flush=True)
    _send(process.pid, signal.SIGTERM)
    time.sleep(lease.grace_seconds)
    os._exit(_TERMINATED)  # the kernel then ends all other processes of the pod


def _beat(folder: Path) -> str:
    try:
        return (folder / "beat").read_text()
    except OSError:
        return ""


def _send(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def main(arguments: list[str]) -> None:
    """Runs the mode named by the first argument: `run` or `announce`."""
    if arguments[0] == "announce":
        announce(Path(arguments[1]))
    else:
        sys.exit(run(*map(Path, arguments[1:])))


if __name__ == "__main__":
    main(sys.argv[1:])
