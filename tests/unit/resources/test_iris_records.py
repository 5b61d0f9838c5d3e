"""Reports of replicas on Iris to a controller that fails."""

from __future__ import annotations

import json
import runpy
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import resources
from fakes.http_server import Answer, Request, http_server
from resources.settings import process_environment

pytestmark = pytest.mark.timeout(60)

PROGRAMS = Path(resources.__file__).parent / "backends/programs"
RECORDS = runpy.run_path(str(PROGRAMS / "iris_records.py"))


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", b"no HTTP at all\r\n\r\n", b""])
def test_answer_that_breaks_off_is_an_unreachable_controller_and_nothing_else(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def break_off() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=break_off)
        thread.start()
        with pytest.raises(OSError):
            RECORDS["call_controller"](f"127.0.0.1:{server.getsockname()[1]}", "ListEndpoints")
        thread.join()


@contextmanager
def refusing(refused: str, status: int, asked: list[str]) -> Iterator[str]:
    """Starts a controller that answers nothing useful and refuses a method; yields its address."""

    def answer(request: Request) -> Answer:
        asked.append(request.path.rpartition("/")[2])
        return status if asked[-1] == refused else 200, {}, b"{}"

    with http_server(answer) as address:
        yield address.removeprefix("http://")


def test_attempt_that_the_controller_has_given_up_does_not_besiege_it() -> None:
    asked: list[str] = []
    waiting = textwrap.dedent(
        """
        import sys, time
        from iris_records import Records
        place = {"job_id": "/me/job-1", "index": 0, "count": 1, "attempt": 0}
        records = Records(controller=sys.argv[1], **place, poll_seconds=5.0, lease_seconds=0.5)
        records.start()
        while not records.stop_reason:  # its lease is not renewed
            time.sleep(0.02)
        """
    )
    with refusing("RegisterEndpoint", 412, asked) as address:
        subprocess.run([sys.executable, "-S", "-c", waiting, address], cwd=PROGRAMS, check=True, timeout=50)
    assert set(asked) == {"RegisterEndpoint", "ListEndpoints"}
    assert len(asked) < 20


def test_lines_that_the_controller_does_not_take_go_by_way_of_the_worker(tmp_path: Path) -> None:
    asked: list[str] = []
    shipped = tmp_path / ".assay"
    shipped.mkdir()
    for name in ("iris_replica.py", "iris_records.py", "supervise.py", "attempts.py", "endings.py"):
        shutil.copy(PROGRAMS / name, shipped)
    script = "echo first; printf 'caf\\351\\n' >&2; echo last"
    job = {"argv": ["sh", "-c", script], "hosts": 1, "python": None, "pip_packages": [], "extras": []}
    job |= {"working_directory": ".", "max_retries_preemption": 0, "variables_by_tpu_type": {}, "outlives_parent": True}
    (shipped / "job.json").write_text(json.dumps({**job, "grace_seconds": 1, "poll_seconds": 1, "lease_seconds": 60}))
    with refusing("PushLogs", 503, asked) as address:
        iris = {"IRIS_TASK_ID": "/me/job-1/0:0", "IRIS_WORKDIR": str(tmp_path), "IRIS_CONTROLLER_ADDRESS": address}
        program = [sys.executable, "-S", "-u", shipped / "iris_replica.py", shipped]
        done = subprocess.run(program, env=process_environment(iris), capture_output=True, timeout=50)
    assert "PushLogs" in asked
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr.decode().splitlines() == ["first", "caf\ufffd", "last", "[assay] succeeded; restarted here: 0"]
