"""Results of calls: written by the real program, read back, and refused if other users could have written them."""

from __future__ import annotations

import hmac
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fakes.jobs import FakeJob
from resources.backends.processes import PROGRAMS, import_folders
from resources.errors import BadInput, JobFailed
from resources.jobs.jobs import Call, JobDetails, JobStatus
from resources.jobs.results import pickled, result_of
from resources.jobs.user_key import USER_KEY_VARIABLE

OURS, THEIRS = "a key of this user, with enough letters", "a key of another user, as long as that of ours"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USER_KEY_VARIABLE, OURS)


class Spy:
    """Writes to standard output when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.write, (1, b"unpickled")


class Picky(Exception):
    """Can be pickled but not unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def left_by(function: Callable[[], object], folder: Path, *, job_id: str = "job-1") -> bytes | None:
    """Returns the content of the file that the program writes for a call in a job."""
    call, result = folder / "call.pickle", folder / "result"
    call.write_bytes(pickled(Call(function), job_id=job_id))
    places: Mapping[str, str] = {"ASSAY_JOB_ID": job_id, "ASSAY_REPLICA_INDEX": "0", "ASSAY_RESULT": str(result)}
    argv = [sys.executable, str(PROGRAMS / "run_call.py"), str(call), *import_folders()]
    subprocess.run(argv, env={**os.environ, **places}, capture_output=True, check=False)
    return result.read_bytes() if result.exists() else None


def read(left: bytes | None, *, status: JobStatus = JobStatus.SUCCEEDED) -> Any:
    job = FakeJob("job-1", JobDetails(job_id="job-1", name="job", status=status, replicas=1, returns=True), log="last")
    return result_of(job, None, replica=0, read=lambda: left, where="look")


def test_result_is_the_value_or_none_at_all(tmp_path: Path) -> None:
    assert read(left_by(lambda: {"score": 0.5}, tmp_path)) == {"score": 0.5}
    assert read(left_by(lambda: None, tmp_path)) is None


def test_result_of_another_user_another_job_or_another_content_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ours = left_by(lambda: 1, tmp_path)
    elsewhere = left_by(lambda: 1, tmp_path, job_id="job-2")
    assert ours is not None and elsewhere is not None
    monkeypatch.setenv(USER_KEY_VARIABLE, THEIRS)
    theirs = left_by(lambda: 1, tmp_path)
    monkeypatch.setenv(USER_KEY_VARIABLE, OURS)
    for forged in (theirs, elsewhere, ours[:48] + pickle.dumps(("returned", Spy())), pickle.dumps(Spy()), b""):
        with pytest.raises(BadInput, match="signature"):
            read(forged)
    assert "unpickled" not in capfd.readouterr().out


def test_result_signed_by_another_job_is_not_unpickled(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    call, forged = tmp_path / "call.pickle", tmp_path / "forged"

    def forge() -> None:
        seal = call.read_bytes()[:48]
        body = pickle.dumps(("returned", pickle.dumps(Spy())))
        forged.write_bytes(seal[:16] + hmac.digest(seal[16:], b"job-1\x000\x00" + body, "sha256") + body)

    left_by(forge, tmp_path, job_id="job-2")
    with pytest.raises(BadInput, match="of another job"):
        read(forged.read_bytes())
    left_by(forge, tmp_path, job_id="job-1")
    read(forged.read_bytes())  # readable in its own job: only the job is wrong
    assert capfd.readouterr().out.count("unpickled") == 1


def test_exit_before_the_return_leaves_no_result_and_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="job-1 to have left a result"):
        read(left_by(lambda: sys.exit(0), tmp_path))
    with pytest.raises(JobFailed, match="last"):
        read(left_by(lambda: os._exit(3), tmp_path), status=JobStatus.FAILED)


def test_value_left_by_a_job_that_failed_afterwards_does_not_count(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="last"):
        read(left_by(lambda: 1, tmp_path), status=JobStatus.FAILED)


def test_unreadable_exception_is_reported_with_type_text_and_traceback(tmp_path: Path) -> None:
    def raise_it() -> None:
        raise Picky("first", "second")

    def raise_large() -> None:
        raise ValueError("x" * 1_000_000)

    with pytest.raises(JobFailed, match="Picky: first second") as caught:
        read(left_by(raise_it, tmp_path), status=JobStatus.FAILED)
    assert "in raise_it" in str(caught.value.__cause__)
    with pytest.raises(JobFailed, match="ValueError: xxx"):
        read(left_by(raise_large, tmp_path), status=JobStatus.FAILED)
