"""Job requests from command line options, and new lines from ends of logs."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fakes.cli import invoke
from flows.cli.jobs import PlaceOptions, SubmitOptions, ending_of, follow, is_lost, job_name, request_of
from flows.cli.options.pools import MachineOptions
from resources.backends.local.client import LocalClient
from resources.config import CpuConfig, GpuConfig, ResourceConfig, TpuConfig
from resources.errors import BackendUnavailable, BadInput, NoMatchingRegion
from resources.jobs.jobs import Command, JobDetails, JobRequest, JobStatus
from resources.jobs.logs import LogPart


def job(workspace: Path, *command: str, **options: Any) -> JobRequest:
    machine = {field.name: options.pop(field.name) for field in fields(MachineOptions) if field.name in options}
    return request_of(
        command or ("python", "a.py"), SubmitOptions(**options), MachineOptions(**machine), workspace=workspace
    )


def test_submit_options_become_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FROM_HERE", "here")
    request = job(
        tmp_path,
        "python",
        "scripts/train it.py",
        "--steps=1",
        cpu=3,
        tpu="v5e-16",
        replicas=2,
        region=("eu-west4", "us-west4"),
        on_demand=True,
        extra=("eval,tpu", "more"),
        pip=("einops",),
        env=("FROM_HERE", "GIVEN=a=b", "EMPTY="),
        retries=1,
        preemption_retries=7,
    )
    assert request.name == "train-it"
    assert request.entrypoint == Command("python", ("scripts/train it.py", "--steps=1"))
    assert request.resources.device == TpuConfig(variant="v5litepod-16")
    assert request.resources.regions == ("europe-west4", "us-west4") and not request.resources.preemptible
    assert (request.replica_count, request.max_retries_failure, request.max_retries_preemption) == (2, 1, 7)
    assert request.outlives_parent
    environment = request.environment
    assert environment.workspace == tmp_path
    assert environment.extras == ("eval", "tpu", "more") and environment.pip_packages == ("einops",)
    assert {"FROM_HERE": "here", "GIVEN": "a=b", "EMPTY": ""}.items() <= environment.env_vars.items()


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({}, CpuConfig()),
        ({"gpu": "H100:8"}, GpuConfig(variant="H100", count=8)),
        ({"gpu": "A100-80GB"}, GpuConfig(variant="A100-80GB")),
        ({"gpu": "2"}, GpuConfig(count=2)),
        ({"tpu": "v5e-8, v6e-8"}, TpuConfig(variant="v5litepod-8", alternatives=("v6e-8",))),
    ],
)
def test_submit_reads_the_device_from_a_word(tmp_path: Path, options: dict[str, str], device: object):
    assert job(tmp_path, **options).resources.device == device


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"gpu": "H100", "tpu": "v4-8"}, "--tpu v4-8"),
        ({"gpu": "H100:many"}, "H100:many"),
        ({"gpu": ""}, "--gpu"),
        ({"tpu": "v5e-3"}, "v5e-3"),
        ({"cpu": 0}, "cpu"),
        ({"ram": "lots"}, "lots"),
        ({"env": ("ASSAY_TEST_IS_NOT_SET",)}, "not set"),
        ({"env": ("=1",)}, "KEY"),
        ({"region": ("us-east55",)}, "us-east5"),
        ({"name": "two words"}, "name"),
    ],
)
def test_submit_option_that_cannot_be_right_is_refused(tmp_path: Path, options: dict[str, object], hint: str):
    with pytest.raises(BadInput) as caught:
        job(tmp_path, **options)
    assert hint in str(caught.value)


def test_submit_to_a_region_without_the_device_names_another_region(tmp_path: Path):
    with pytest.raises(NoMatchingRegion, match="us-central2"):
        job(tmp_path, tpu="v4-8", region=("us-east1",))


@pytest.mark.parametrize(
    ("command", "name"),
    [(("python", "-u", "x/run_me.py", "a.py"), "run_me"), (("/bin/echo", "hi"), "echo"), (("./…",), "job")],
)
def test_job_name_follows_from_the_command(command: tuple[str, ...], name: str):
    assert job_name(command) == name


def test_cluster_without_an_address_says_how_to_set_it():
    with pytest.raises(BadInput, match="assay cluster status us-east5 --forward"):
        PlaceOptions(cluster="us-east5").client()
    with pytest.raises(BadInput, match="assay cluster up local"):
        PlaceOptions(cluster="local").client()
    with pytest.raises(BadInput, match="--cluster us-east5"):
        PlaceOptions(backend="local", cluster="us-east5").client()


def details(status: JobStatus, *, failures: int = 0, preemptions: int = 0) -> JobDetails:
    return JobDetails(job_id="a-1", name="a", status=status, reason="why", failures=failures, preemptions=preemptions)


def test_job_is_lost_only_if_it_never_failed_by_its_own_doing():
    assert is_lost(details(JobStatus.FAILED, preemptions=3))
    assert not is_lost(details(JobStatus.FAILED, failures=1, preemptions=3))
    assert not is_lost(details(JobStatus.STOPPED))
    assert ending_of(details(JobStatus.FAILED, preemptions=2)) == "a-1 failed: why, after 2 preemptions"


def followed(parts: list[LogPart], *, replicas: int = 1) -> tuple[str, list[str]]:
    """Returns the shown text and the notes of a job with this log, the same for each replica."""

    class Writing(FlakyJob):
        def details(self) -> JobDetails:
            return details(JobStatus.SUCCEEDED)

        def read_log(self, after: str = "", *, replica: int = 0) -> LogPart:
            number = int(after or 0)
            return replace(parts[number], end=str(number + 1)) if number < len(parts) else LogPart(b"", after)

    shown: list[bytes] = []
    notes: list[str] = []
    follow(Writing(0), replicas=range(replicas), write=shown.append, note=notes.append)
    return b"".join(shown).decode(), notes


LOADING = [LogPart(text.encode(), "") for text in ("Load", "ing…", " done\n10%\r", "20%\n\nla", "st")]


def test_following_a_replica_shows_its_log_as_written():
    assert followed(LOADING) == ("Loading… done\n10%\r20%\n\nlast\n", [])


def test_following_several_replicas_shows_whole_lines_behind_their_number():
    shown, _ = followed(LOADING, replicas=2)
    lines = [f"[{replica}] {line}" for replica in range(2) for line in ("Loading… done", "10%\r20%", "", "last")]
    assert sorted(shown.removesuffix("\n").split("\n")) == sorted(lines)


def test_following_says_that_lines_are_not_shown():
    shown, notes = followed([LogPart(b"1\n", ""), LogPart(b"2003\n", "", True), LogPart(b"9\n", "")])
    assert shown == "1\n2003\n9\n"
    assert [" ".join(note.split()[:4]) for note in notes] == ["replica 0: some lines"]


class FlakyJob:
    """A handle on a job with a backend that fails a few times and then reports the job's end."""

    job_id = "a-1"

    def __init__(self, silences: int) -> None:
        self._silences = silences

    def details(self) -> JobDetails:
        if self._silences:
            self._silences -= 1
            raise BackendUnavailable(expected="a head", found="nobody", remedy="wait")
        return details(JobStatus.SUCCEEDED)

    def logs(self, max_lines: int = 200, *, replica: int | None = None) -> str:
        return f"from {replica}"

    def read_log(self, after: str = "", *, replica: int = 0) -> LogPart:
        return LogPart(b"", after) if after else LogPart(b"from %d" % replica, "read")

    def status(self) -> JobStatus:
        return self.details().status

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        return self.status()

    def announced(self, replica: int = 0) -> str | None:
        return None

    def result(self, timeout: float | None = None, *, replica: int = 0) -> None:
        return

    def terminate(self) -> None:
        return


def test_following_bears_a_backend_that_is_silent_for_a_while():
    shown: list[bytes] = []
    notes: list[str] = []
    ended = follow(FlakyJob(2), replicas=range(2), write=shown.append, note=notes.append)
    assert ended.status is JobStatus.SUCCEEDED and b"".join(shown) == b"[0] from 0\n[1] from 1\n"
    assert len(notes) == 2 and "nobody" in notes[0]
    with pytest.raises(BackendUnavailable):
        follow(FlakyJob(2), replicas=[0], write=shown.append, note=notes.append, patience_seconds=0)


def test_submit_no_wait_with_auto_stop_is_refused():
    shown = invoke(["submit", "--no-wait", "--auto-stop", "--", sys.executable])
    assert isinstance(shown.exception, BadInput)


@pytest.mark.parametrize("alone", [False, True])
def test_jobs_show_a_reason_with_brackets_as_it_is(tmp_path: Path, alone: bool):
    client = LocalClient(tmp_path / "jobs")
    request = JobRequest("job", Command("true"), resources=ResourceConfig())
    submitted = client.submit(request)
    submitted.wait(60)
    status_file = tmp_path / "jobs" / submitted.job_id / "status.json"
    status_file.write_text(json.dumps({**json.loads(status_file.read_text()), "reason": "see [/tmp/x]"}))
    arguments = ["jobs", "list", *([submitted.job_id] if alone else []), "--backend", client.url]
    shown = invoke(arguments, env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "see [/tmp/x]" in shown.output
