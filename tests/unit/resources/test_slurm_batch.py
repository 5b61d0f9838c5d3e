"""The program of a batch job, with scripted srun and scontrol."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import resources

PROGRAM = Path(resources.__file__).parent / "backends/programs/slurm_batch.py"
SUCCEEDED = json.dumps({"status": "succeeded", "failures": 0, "preemptions": 0, "ended_by": None})


def run_batch(folder: Path, *, srun: str, scontrol: str) -> tuple[int, dict[str, object]]:
    """Runs the program with shell lines as `srun` and `scontrol`; returns its exit code and the status of the job."""
    for name, line in (("srun", srun), ("scontrol", scontrol)):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    job = {"replicas": 1, "cpus": 1, "argv": ["true"], "working_directory": "/", "grace_seconds": 1.0}
    job |= {"max_retries_failure": 0, "max_retries_preemption": 0, "outlives_parent": True, "poll_seconds": 1.0}
    (folder / "specification.json").write_text(json.dumps(job))
    (folder / "status.json").write_text(
        json.dumps({"status": "pending", "attempts": 0, "failures": 0, "preemptions": 0})
    )
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run([sys.executable, PROGRAM, folder], env=variables, check=False, timeout=60)
    return done.returncode, json.loads((folder / "status.json").read_text())


@pytest.mark.parametrize(
    ("scontrol", "code", "status"),
    [
        ("JobId=7 JobState=RUNNING Reason=None PreemptTime=None", 0, "succeeded"),
        ("JobId=7 JobState=RUNNING Reason=None", 0, "succeeded"),
        ("", 0, "succeeded"),  # no answer
        ("JobId=7 JobState=COMPLETING Reason=None", 128 + signal.SIGTERM, "running"),
        ("JobId=7 JobState=RUNNING Reason=None PreemptTime=2026-11-25T03:07:05", 128 + signal.SIGTERM, "running"),
    ],
)
def test_replicas_that_end_well_while_slurm_takes_their_machines_have_not_succeeded(
    tmp_path: Path, scontrol: str, code: int, status: str
) -> None:
    exit_code, written = run_batch(tmp_path, srun=f"echo '0: 0 {SUCCEEDED}'", scontrol=f"echo {scontrol}")
    assert (exit_code, written["status"]) == (code, status)


@pytest.mark.parametrize(
    ("srun", "all_ended"),
    [
        (f"echo '0: 0 {SUCCEEDED}'", True),
        (f"echo '{SUCCEEDED}' > $PLACE/task-0/status.json", True),
        ("echo 'error: Node failure on node-b'", False),
        ('echo \'{"status": "running"}\' > $PLACE/task-0/status.json', False),
    ],
    ids=["said through srun", "said in its file", "silent", "running when last heard of"],
)
def test_job_begins_again_at_once_only_if_all_of_its_replicas_have_said_their_ends(
    tmp_path: Path, srun: str, all_ended: bool
) -> None:
    srun = srun.replace("$PLACE", str(tmp_path))
    _, written = run_batch(tmp_path, srun=srun, scontrol="echo JobId=7 JobState=COMPLETING")
    assert (written["left_machines"], written["all_ended"]) == (True, all_ended)


@pytest.mark.parametrize(("code", "preemptions"), [(137, 1), (1, 0)])
def test_killed_supervisor_counts_by_the_signal_that_killed_it(tmp_path: Path, code: int, preemptions: int) -> None:
    running = json.dumps({"status": "running", "failures": 0, "preemptions": 0, "ended_by": None})
    _, written = run_batch(tmp_path, srun=f"echo '0: {code} {running}'", scontrol="echo JobId=7 JobState=RUNNING")
    assert (written["status"], written["preemptions"]) == ("failed", preemptions)
