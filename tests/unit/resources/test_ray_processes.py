"""Controller and node of the Ray backend without a Ray: duplicate orders, early ends."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.polling import eventually
from resources.backends.ray.controller import ControlledJob, Controller, LogFile
from resources.backends.ray.orders import JobOrder, Output, ProcessEnd, ProcessOrder, SentFolder, this_machine
from resources.backends.ray.replica import run_process
from resources.config import ResourceConfig
from resources.jobs.jobs import Command, EnvironmentConfig, JobRequest, JobStatus
from resources.jobs.logs import LogPart

pytestmark = pytest.mark.timeout(60)

JOB_ID = "job-0123abcd"
FOR_EVER = "while :; do sleep 1; done"


def shell(script: str) -> Command:
    return Command("sh", ("-c", script))


def job_order(workspace: Path) -> JobOrder:
    return JobOrder(
        job_id=JOB_ID,
        request=JobRequest(
            "job",
            shell("true"),
            resources=ResourceConfig(),
            environment=EnvironmentConfig(workspace=workspace, python=Path(sys.executable)),
            max_retries_preemption=0,
        ),
        client="client",
        entrypoint=shell("true"),
        workspace=SentFolder.of(workspace, digest=None),
        working_directory=str(workspace),
        imports=(),
        grace_seconds=0.5,
        submitted_at=0.0,
        address="127.0.0.1:6379",
    )


def process_order(workspace: Path, script: str) -> ProcessOrder:
    job = replace(job_order(workspace), entrypoint=shell(script), grace_seconds=20.0)
    return ProcessOrder(job=job, attempt=1, replica=0, host=0, device_variables={})


def run_until(condition: Callable[[], object], workspace: Path, script: str) -> tuple[ProcessEnd, bytes]:
    """Runs a process until `condition` is true; returns its end and all of its output."""
    reported: list[bytes] = []
    over = threading.Event()

    def ask(method: str, **arguments: Any) -> Any:
        if method == "ends_within":
            return bool(eventually(lambda: over.is_set() or condition()))
        reported.append(arguments["output"].content)
        return None

    try:
        end = run_process(process_order(workspace, script), ask=ask, fetch=lambda name: b"")
    finally:
        over.set()
    return end, b"".join([*reported, end.output.content])


def test_process_told_to_end_as_its_supervisor_begins_was_stopped_and_not_preempted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    end, _ = run_until(lambda: list(tmp_path.glob(f"assay-{JOB_ID}-*/supervisor.log")), tmp_path, FOR_EVER)
    assert end.outcome == "stopped"


def test_process_told_to_end_ends_in_good_order(tmp_path: Path) -> None:
    script = f"trap 'echo bye; exit 0' TERM; echo $$ > {tmp_path}/pid; {FOR_EVER}"
    end, output = run_until((tmp_path / "pid").exists, tmp_path, script)
    assert end.outcome == "stopped"
    assert output.endswith(b"bye\n")


def test_process_ended_from_outside_was_preempted(tmp_path: Path) -> None:
    def kill_once() -> None:
        file = tmp_path / "pid"
        if file.exists() and (pid := file.read_text()):
            os.kill(int(pid), signal.SIGKILL)
            file.unlink()

    end, _ = run_until(kill_once, tmp_path, f"echo $$ > {tmp_path}/pid; {FOR_EVER}")
    assert (end.outcome, end.reason) == ("preempted", "exit code -9")


def test_worker_without_a_started_process_survives_the_order_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    over, threads = threading.Event(), set(threading.enumerate())
    order = process_order(tmp_path, FOR_EVER)
    order = replace(order, job=replace(order.job, working_directory=str(tmp_path / "no-such-folder")))
    try:
        end = run_process(order, ask=lambda method, **arguments: over.wait(50), fetch=lambda name: b"")
    finally:
        over.set()
    assert end.outcome == "refused"
    for thread in set(threading.enumerate()) - threads:
        thread.join(20)
    assert exits == []


async def test_order_that_reaches_the_controller_twice_creates_a_single_job(tmp_path: Path) -> None:
    controller = Controller(
        None, start=lambda place, order, sent: asyncio.Future()
    )  # never placed: there is no cluster
    order = job_order(tmp_path)
    assert await controller.submit(order=order, adopt_existing=False) == JOB_ID
    assert await controller.submit(order=order, adopt_existing=False) == JOB_ID
    assert [details.job_id for details in await controller.jobs()] == [JOB_ID]
    arguments = pickle.dumps({"job_id": JOB_ID})
    while not (details := pickle.loads(await controller.answer("details", arguments))).status.finished:
        await asyncio.sleep(0)
    assert details.status is JobStatus.FAILED


async def test_job_that_has_ended_keeps_no_callable_in_memory(tmp_path: Path) -> None:
    order = replace(job_order(tmp_path), entrypoint=b"x" * 1000)
    job = ControlledJob(None, order, sent={}, start=lambda *_: None)
    assert job.kept_bytes == 1000
    job.stop("terminated")
    await job.run()
    assert job.status.finished and job.kept_bytes == 0 and job.details().returns


def test_host_0_speaks_for_a_replica_of_several(tmp_path: Path) -> None:
    job = ControlledJob(None, job_order(tmp_path), sent={}, start=lambda *_: None)
    for host in (1, 0, 1, 2):
        job.report(0, (0, host), output=Output(), announcement=f"from {host}", started=True)
    assert job.announced(0) == "from 0"


def test_output_that_is_reported_twice_is_in_the_log_once(tmp_path: Path) -> None:
    job = ControlledJob(None, job_order(tmp_path), sent={}, start=lambda *_: None)
    for output in (Output(b"1\n2"), Output(b"1\n2"), Output(b"\n3\n", 3)):
        job.report(0, (0, 0), output=output, announcement=None, started=True)
    assert job.read_log("", replica=0).output == b"1\n2\n3\n"


def test_log_of_a_process_drops_its_first_half_beyond_its_bound_and_reports_that() -> None:
    log = LogFile(most_bytes=100)
    for number in range(30):
        log.add(b"line %03d\n" % number)
    part = log.part("", whole_lines=False)
    assert part.output.splitlines() == [b"line %03d" % number for number in range(30 - part.output.count(b"\n"), 30)]
    assert len(part.output) + 9 >= 50 and len(part.output) <= 100 and part.follows_dropped
    log.add(b"last\n")
    assert log.part(part.end, whole_lines=False) == LogPart(b"last\n", "275")
    assert log.last(2) == "line 029\nlast"


def test_machine_is_another_with_another_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    word = this_machine()
    assert word == this_machine()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert word != this_machine()
