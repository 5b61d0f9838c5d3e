"""`assay submit`, `assay jobs` and the cluster of this machine as a user runs them: processes, signals, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

from fakes.polling import eventually
from resources.backends.local.client import LocalClient
from resources.settings import process_environment

ASSAY = str(Path(sys.executable).with_name("assay"))
PROGRAM = """
import os, sys, time
print("colour", os.environ.get("COLOUR"), flush=True)
if "wait" in sys.argv:
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    return folder


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [ASSAY, *arguments],
        cwd=folder,
        env=process_environment({"COLUMNS": "300"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assay(folder: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=110)
    return process.returncode, out, err


def read_until(stream: IO[str] | None, text: str) -> str:
    assert stream is not None
    read = ""
    while text not in read:
        line = stream.readline()
        assert line, read
        read += line
    return read


def jobs(folder: Path) -> dict[str, str]:
    code, out, err = assay(folder, "jobs", "list", "--json", "-n", "500")
    assert code == 0, err
    return {job["job_id"]: job["status"] for job in json.loads(out)}


def status(job_id: str) -> str:
    return LocalClient().attach(job_id).status()


def test_submit_writes_what_the_program_writes_and_ends_as_it_ends(project: Path):
    code, out, err = assay(project, "submit", "-e", "COLOUR=red", "--", "python", "program.py", "0", "--traceback")
    assert (code, out) == (0, "colour red\n"), err
    code, out, err = assay(project, "submit", "--retries", "1", "python", "program.py", "7")
    assert (code, out) == (1, "colour None\n--- attempt 2 ---\ncolour None\n"), err
    assert "failed 2 times" in err and "Traceback" not in err


def test_option_for_insecure_networks_works_at_any_position_and_is_inherited(project: Path):
    code, out, err = assay(
        project, "submit", "--insecure", "--", "sh", "-c", "echo $ASSAY_INSECURE $1", "sh", "--insecure"
    )
    assert (code, out) == (0, "true --insecure\n"), err


def test_submit_no_wait_prints_an_id_by_which_other_processes_find_the_job(project: Path):
    code, out, err = assay(project, "submit", "--no-wait", "--name", "found", "--", "python", "program.py", "0", "wait")
    assert code == 0, err
    job_id = out.strip()
    assert out == f"{job_id}\n" and job_id.startswith("found-")
    assert jobs(project)[job_id] == "running"

    with start(project, "jobs", "logs", "-f", job_id) as following:
        read_until(following.stdout, "colour None")
        code, out, err = assay(project, "jobs", "stop", job_id)
        assert code == 0 and "stopped" in out, err
        assert following.wait(30) == 1
        assert following.stdout and following.stdout.read() == ""
    assert status(job_id) == "stopped"


@pytest.mark.parametrize(("options", "outcome"), [(("--auto-stop",), "stopped"), ((), "running")])
def test_submit_that_is_interrupted_ends_the_job_only_on_request(project: Path, options: tuple[str, ...], outcome: str):
    with start(project, "submit", *options, "--", "python", "program.py", "0", "wait") as submitting:
        read_until(submitting.stdout, "colour")
        submitting.send_signal(signal.SIGINT)
        assert submitting.wait(30) == 130
        assert submitting.stderr
        stderr = submitting.stderr.read()
    job_id = stderr.split()[0]
    assert status(job_id) == outcome
    if outcome == "running":
        assert f"assay jobs logs -f {job_id}" in stderr
        LocalClient().attach(job_id).terminate()


def test_submit_with_a_killed_supervisor_ends_as_infrastructure(project: Path, session_cache: Path):
    with start(project, "submit", "--", "python", "program.py", "0", "wait") as submitting:
        read_until(submitting.stdout, "colour")
        assert submitting.stderr
        job_id = submitting.stderr.readline().split()[0]
        job_status = json.loads((session_cache / "jobs" / job_id / "status.json").read_text())
        os.kill(job_status["supervisor_pid"], signal.SIGKILL)
        assert submitting.wait(30) == 2
        assert "Expected" in submitting.stderr.read()


@pytest.fixture
def looks_like_another_ray(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that `ray stop` would end, because it matches process names."""
    folder = tmp_path / "raylet"
    folder.mkdir()
    sleep = shutil.which("sleep")
    assert sleep is not None
    shutil.copy(sleep, folder / "raylet")
    with subprocess.Popen([str(folder / "raylet"), "600"]) as process:
        yield process
        process.kill()


@pytest.mark.timeout(240)
def test_cluster_of_this_machine_runs_jobs_and_goes_without_touching_another_ray(
    project: Path, session_cache: Path, looks_like_another_ray: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
):
    # A head uses any token that Ray finds, such as a token left in the home folder by an earlier `ray.init()`.
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    try:
        code, out, err = assay(project, "cluster", "up", "local", "--cpus", "2")
        assert code == 0 and "assay submit --cluster local" in out, err
        cluster = json.loads((session_cache / "clusters" / "local.json").read_text())
        assert cluster["address"] in out and cluster["dashboard"] in out
        assert assay(project, "cluster", "up", "local")[1] == out, "it is up already"
        code, out, err = assay(
            project, "submit", "--cluster", "local", "-e", "COLOUR=blue", "--", "python", "program.py", "3"
        )
        assert (code, out) == (1, "colour blue\n"), err
    finally:
        code, out, err = assay(project, "cluster", "down", "local")
    assert code == 0 and cluster["job_id"] in out, err
    assert not processes_of(cluster["job_id"])
    assert not Path(cluster["folder"]).exists()
    assert looks_like_another_ray.poll() is None
    code, _, err = assay(project, "cluster", "status", "local")
    assert code == 3 and "assay cluster up local" in err


@pytest.mark.timeout(180)
def test_cluster_with_an_interrupted_start_leaves_no_head_behind(project: Path, session_cache: Path):
    def heads() -> list[str]:
        return [path.name for path in (session_cache / "jobs").glob("ray-head-*")]

    def is_starting(job_id: str) -> bool:
        started = False
        for pid in processes_of(job_id):
            with suppress(OSError):  # it may have ended
                started |= b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return started

    before = set(heads())
    with start(project, "cluster", "up", "local", "--cpus", "1") as starting:
        eventually(lambda: any(is_starting(job_id) for job_id in heads() if job_id not in before))
        starting.send_signal(signal.SIGINT)
        assert starting.wait(60) == 130
    [job_id] = set(heads()) - before
    assert status(job_id) == "stopped"
    assert not processes_of(job_id)


def processes_of(job_id: str) -> list[int]:
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"ASSAY_JOB_ID={job_id}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
    return pids
