"""Output of Slurm's commands, translated into Assay's terms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resources.backends.slurm.states import (
    Seen,
    classify_slurm,
    from_outside,
    seen_by_sacct,
    seen_by_scontrol,
    seen_by_squeue,
)

HELD = "launch failed requeued held"
KNOWN = {"status": "running", "reason": None, "attempts": 1, "failures": 0, "preemptions": 0}


@pytest.mark.parametrize(
    ("seen", "context", "status", "words", "preemptions"),
    [
        (Seen("RUNNING"), {}, "running", None, 0),
        (Seen("PENDING", "Resources"), {}, "pending", "Resources", 0),
        (None, {}, "failed", "knows Slurm's job 7 no more", 0),
        (None, {"is_to_stop": True}, "stopped", "terminated", 0),
        (Seen("CANCELLED"), {}, "stopped", "scancel", 0),
        (Seen("CANCELLED"), {"is_to_stop": True}, "stopped", "terminated", 0),
        (Seen("FAILED", exit_code=-9), {"is_owned": True}, "pending", "is queued again", 0),
        (Seen("FAILED", exit_code=-9), {"is_recent": True}, "pending", "is queued again", 0),
        (Seen("FAILED", exit_code=-9), {}, "failed", "scontrol requeue", 1),
        (Seen("NODE_FAIL", is_forgotten=True), {"is_owned": True}, "failed", "cannot queue it again", 1),
        (Seen("TIMEOUT"), {"is_owned": True, "max_retries_preemption": 0}, "failed", "ended from outside once", 1),
        (Seen("FAILED", exit_code=1), {"is_owned": True}, "failed", "read /jobs/batch.log", 0),
        (Seen("FAILED", exit_code=1), {"is_owned": True, "left_machines": True}, "pending", "is queued again", 0),
        (Seen("OUT_OF_MEMORY"), {"is_owned": True}, "failed", "resources.ram", 0),
        (Seen("PENDING", HELD), {"is_owned": True, "max_retries_preemption": 0}, "pending", "its submitter", 0),
        (Seen("PENDING", HELD), {}, "pending", "scontrol release", 0),
        (Seen("PENDING", HELD), {"max_retries_preemption": 0}, "failed", "a node could not start", 1),
    ],
)
def test_state_of_an_unfinished_job_from_outside(
    seen: Seen | None, context: dict[str, Any], status: str, words: str | None, preemptions: int
) -> None:
    options = {**dict.fromkeys(("is_to_stop", "is_owned", "is_recent"), False), "max_retries_preemption": 5, **context}
    known = {**KNOWN, "left_machines": options.pop("left_machines", False)}
    now = from_outside(known, seen, name="Slurm's job 7", log=Path("/jobs/batch.log"), **options)
    assert (now["status"], now["preemptions"], now["attempts"]) == (status, preemptions, 1)
    assert now["reason"] == words if words is None else words in now["reason"]


@pytest.mark.parametrize(
    ("state", "exit_code", "ending"),
    [
        ("PENDING", 0, None),
        ("CONFIGURING", 0, None),
        ("RUNNING", 0, None),
        ("COMPLETING", 0, None),
        ("SUSPENDED", 0, None),
        ("COMPLETED", 0, "preempted"),  # its program exits 0 only after it has recorded the job's end
        ("BOOT_FAIL", 0, "preempted"),
        ("NODE_FAIL", 0, "preempted"),
        ("PREEMPTED", 0, "preempted"),
        ("REVOKED", 0, "preempted"),
        ("TIMEOUT", 0, "preempted"),
        ("DEADLINE", 0, "failed"),
        ("SPECIAL_EXIT", 1, "failed"),
        ("OUT_OF_MEMORY", 0, "failed"),
        ("FAILED", 1, "failed"),
        ("FAILED", 143, "preempted"),
        ("FAILED", -9, "preempted"),
        ("FAILED", -11, "failed"),
        ("CANCELLED", -15, "stopped"),
        ("SOME_NEW_STATE", 0, None),
    ],
)
def test_state_of_a_batch_job_that_said_nothing_counts_as(state: str, exit_code: int, ending: str | None) -> None:
    assert classify_slurm(Seen(state, exit_code=exit_code)) == ending


def test_squeue_lists_states_and_what_jobs_wait_for() -> None:
    seen = seen_by_squeue(f"12|RUNNING|None\n13|PENDING|BeginTime\n14|PENDING|Resources\n15|PENDING|{HELD}\n")
    assert seen == {
        "12": Seen("RUNNING"),
        "13": Seen("PENDING", "BeginTime"),
        "14": Seen("PENDING", "Resources"),
        "15": Seen("PENDING", HELD),
    }
    assert [seen[job].waits_after_requeue for job in ("12", "13", "14", "15")] == [False, True, False, False]
    assert [seen[job].was_not_launched for job in ("12", "13", "14", "15")] == [False, False, False, True]


def test_scontrol_says_how_a_job_ended_and_nothing_about_unknown_jobs() -> None:
    described = (
        "JobId=2 JobName=job UserId=root(0) Account=(null) QOS=(null) JobState=FAILED Reason=NonZeroExitCode "
        "Dependency=(null) Requeue=1 Restarts=1 BatchFlag=1 Reboot=0 ExitCode=0:9 DerivedExitCode=0:0 RunTime=00:00:05"
    )
    assert seen_by_scontrol(described) == Seen("FAILED", "NonZeroExitCode", -9)
    held = seen_by_scontrol("JobId=2 JobState=PENDING Reason=launch_failed_requeued_held Dependency=(null)")
    assert held is not None and held.was_not_launched
    assert seen_by_scontrol("slurm_load_jobs error: Invalid job id specified") is None


def test_sacct_says_how_the_last_run_of_a_job_ended() -> None:
    assert seen_by_sacct("NODE_FAIL|0:0\nCANCELLED by 1000|0:15\n") == Seen(
        "CANCELLED", exit_code=-15, is_forgotten=True
    )
    assert seen_by_sacct("TIMEOUT|0:0\n") == Seen("TIMEOUT", is_forgotten=True)
    assert seen_by_sacct("Slurm accounting storage is disabled\n") is None
