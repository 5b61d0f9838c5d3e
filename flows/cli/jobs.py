"""The commands that run any program on any backend: `assay submit` and `assay jobs`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Column

from flows.cli.options.pools import MachineOptions, OptionGroup, resources_asked
from flows.console.console import OUT, Json, note, print_json, say, table_of, write
from resources.backends.current import client_from_url, current_client
from resources.config import ResourceConfig
from resources.errors import BackendUnavailable, BadInput, JobFailed, exclusive
from resources.jobs.jobs import Client, Entrypoint, JobDetails, JobHandle, JobRequest, JobStatus, create_environment
from resources.regions.ray_clusters import LOCAL, local_cluster
from resources.regions.region_table import ADDRESS_LINE
from resources.regions.regions import known_regions, regions_for, where_to_write
from resources.settings import variable
from tasks.spec.loading import build_config

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.1, 2.0
_MUCH_BYTES = 64 << 10  # in a poll: more may be available already
_JobId = Annotated[str, Parameter(help="Id of the job.")]
_Follow = Annotated[bool, Parameter(("--follow", "-f"), help="All of it, until the job ends, with its exit code.")]


@Parameter(name="*")
@dataclass(frozen=True)
class PlaceOptions(OptionGroup):
    """The backend of jobs."""

    backend: str | None = None
    """local, ray://…, iris://…, kubernetes://… or slurm://…; see ASSAY_JOBS."""
    cluster: str | None = None
    """Region of the cluster, or local."""

    def client(self) -> Client:
        """Returns the client of the backend's address or of the region's cluster; else the default client."""
        if self.backend and self.cluster:
            raise exclusive(f"--backend {self.backend}", f"--cluster {self.cluster}")
        if self.cluster:
            return client_from_url(_address_of(self.cluster))
        return client_from_url(self.backend) if self.backend else current_client()


@Parameter(name="*")
@dataclass(frozen=True)
class SubmitOptions(OptionGroup):
    """A job, except its machine."""

    name: str | None = None
    """Name of the job; the script's when left out."""
    wait: Annotated[bool, Parameter(negative="--no-wait")] = True
    """Show its log until it ends, or only its id."""
    auto_stop: bool = False
    """End the job when this command ends."""
    env: Annotated[tuple[str, ...], Parameter(("--env", "-e"))] = ()
    """KEY=VALUE, or KEY; repeatable."""
    extra: tuple[str, ...] = ()
    """Extras of this project, a,b; repeatable."""
    pip: tuple[str, ...] = ()
    """Requirement for the job; repeatable."""
    replicas: int = 1
    """Replicas; they succeed or fail together."""
    retries: int = 0
    """Number of failed attempts that are tried again."""
    preemption_retries: int = 100
    """Number of preempted attempts that are tried again."""


def submit(
    command: Annotated[tuple[str, ...], Parameter(help="Program and arguments, such as -- python script.py.")],
    /,
    *,
    options: SubmitOptions = SubmitOptions(),
    place: PlaceOptions = PlaceOptions(),
    machine: MachineOptions = MachineOptions(),
) -> None:
    """Run a program as a job with this folder's code; exit code 0, 1 if it failed, 2 infrastructure, 3 bad input."""
    auto_stop = options.auto_stop
    if auto_stop and not options.wait:
        raise exclusive("--auto-stop, while this command waits,", "--no-wait")
    request = request_of(command, options, machine, workspace=Path.cwd())
    client = place.client()
    try:
        job = client.submit(request)
    except KeyboardInterrupt:
        note("Interrupted while the job was being submitted. assay jobs list   shows whether it is there")
        raise SystemExit(130) from None
    if not options.wait:
        say(job.job_id)
        return
    note(f"{job.job_id} on {client.description}")
    where = f" --cluster {place.cluster}" if place.cluster else f" --backend {place.backend}" if place.backend else ""
    goes_on = f"{job.job_id} goes on. assay jobs logs -f {job.job_id}{where}   comes back to it"
    try:
        details = follow(job, replicas=range(request.replica_count), write=write, note=note)
    except BackendUnavailable:
        if not auto_stop:
            note(goes_on)
        raise
    except (KeyboardInterrupt, SystemExit) as ended:
        if auto_stop:
            note(f"Ending {job.job_id} …")
            job.terminate()
        else:
            note(goes_on)
        raise SystemExit(130 if isinstance(ended, KeyboardInterrupt) else int(ended.code or 0)) from None
    _end_with(details)


def jobs_list(
    job_id: Annotated[str | None, Parameter(help="Id of a job, to be shown alone.")] = None,
    /,
    *,
    place: PlaceOptions = PlaceOptions(),
    lines: Annotated[int, Parameter(("--lines", "-n"))] = 20,
    as_json: Json = False,
) -> None:
    """Show the jobs that are running or that the backend still remembers, or a job with its reason.

    Args:
        lines: Number of jobs to show, the newest first.
    """
    client = place.client()
    if job_id is not None:
        details = client.attach(job_id).details()
        if as_json:
            print_json(asdict(details))
            return
        values = {**asdict(details), "submitted_at": _when(details.submitted_at)}
        rows = [(label.replace("_", " "), "–" if value is None else str(value)) for label, value in values.items()]
        OUT.print(table_of(rows=rows))
        return
    jobs = client.jobs()[:lines]
    if as_json:
        print_json([asdict(job) for job in jobs])
        return
    rows = [(job.job_id, job.status, str(job.attempts), _when(job.submitted_at), job.reason or "") for job in jobs]
    headings = (Column("Job", overflow="fold"), "Status", "Attempts", "Submitted", "Why")
    OUT.print(table_of(*headings, rows=rows) if rows else "No job is remembered there.")


def jobs_logs(
    job_id: _JobId,
    /,
    *,
    place: PlaceOptions = PlaceOptions(),
    follow_: _Follow = False,
    replica: int | None = None,
    lines: Annotated[int, Parameter(("--lines", "-n"))] = 200,
) -> None:
    """Show the log of a job.

    Args:
        replica: Index of a replica; all when left out.
        lines: Number of last lines to show; with -f all.
    """
    job = place.client().attach(job_id)
    if not follow_:
        text = job.logs(lines, replica=replica)
        write(f"{text}\n" if text else "")
        return
    replicas = [replica] if replica is not None else range(job.details().replicas or 1)
    _end_with(follow(job, replicas=replicas, write=write, note=note))


def jobs_stop(
    job_ids: Annotated[tuple[str, ...], Parameter(help="Ids of jobs.")], /, *, place: PlaceOptions = PlaceOptions()
) -> None:
    """End jobs with all their processes."""
    client = place.client()
    for job in [client.attach(job_id) for job_id in job_ids]:
        job.terminate()
        say(ending_of(job.details()))


class _ShownLog:
    def __init__(self, prefix: bytes) -> None:
        self.position = ""
        self._prefix = prefix
        self._unfinished = b""

    def shown(self, output: bytes) -> bytes:
        if not self._prefix:
            self._unfinished = output.rpartition(b"\n")[2] if output else self._unfinished
            return output
        *lines, self._unfinished = (self._unfinished + output).split(b"\n")
        return b"".join(b"%b%b\n" % (self._prefix, line) for line in lines)

    def rest(self) -> bytes:
        return self.shown(b"\n") if self._unfinished else b""


def follow(
    job: JobHandle,
    *,
    replicas: Sequence[int],
    write: Callable[[bytes], None],
    note: Callable[[str], None],
    patience_seconds: float = 60.0,
) -> JobDetails:
    """Writes a job's log from its beginning until the job ends; returns its final details. `note` receives remarks
    about the job itself: pending reasons, restarts, and silence of its backend, which may be restarting.
    """
    logs = {replica: _ShownLog(b"[%d] " % replica if len(replicas) > 1 else b"") for replica in replicas}
    noted: str | None = None
    pause = _FIRST_PAUSE_SECONDS
    last_answer = time.monotonic()
    while True:
        longest = 0
        try:
            details = job.details()  # before the logs, so that a finished job's log is complete
            for replica, log in logs.items():
                part = job.read_log(log.position, replica=replica)
                log.position = part.end
                if part.follows_dropped:
                    note(f"replica {replica}: some lines not shown, since they are kept no more")
                write(log.shown(part.output))
                longest = max(longest, len(part.output))
        except BackendUnavailable as error:
            if time.monotonic() - last_answer > patience_seconds:
                raise
            note(f"no answer, asking again: {error.found}")
            time.sleep(pause)
            pause = min(pause * 1.5, _LAST_PAUSE_SECONDS)
            continue
        last_answer = time.monotonic()
        if details.status.finished and not longest:
            for log in logs.values():
                write(log.rest())
            return details
        if (remark := _remark(details)) and remark != noted:
            note(remark)
        noted = remark or noted
        pause = _FIRST_PAUSE_SECONDS if longest else min(pause * 1.5, _LAST_PAUSE_SECONDS)
        if longest < _MUCH_BYTES and not details.status.finished:
            time.sleep(pause)


def is_lost(details: JobDetails) -> bool:
    """Returns True if a job failed without a failure of its program, hence by its infrastructure."""
    return details.status is JobStatus.FAILED and details.failures == 0


def ending_of(details: JobDetails) -> str:
    """Returns a sentence about how a job ended."""
    verb = f"was {details.status}" if details.status is JobStatus.STOPPED else str(details.status)
    reason = f": {details.reason}" if details.reason else ""
    count = details.preemptions
    preempted = f", after {count} preemption{'s' if count > 1 else ''}" if count else ""
    return f"{details.job_id} {verb}{reason}{preempted}"


def _remark(details: JobDetails) -> str | None:
    if details.status is JobStatus.PENDING:
        return f"pending: {details.reason}" if details.reason else None
    if details.attempts > 1:
        return f"attempt {details.attempts}, after {details.failures} failures and {details.preemptions} preemptions"
    return None


def request_of(
    command: tuple[str, ...], options: SubmitOptions, machine: MachineOptions, *, workspace: Path
) -> JobRequest:
    """Returns the job for the options, with the code of `workspace`."""
    program, *arguments = command
    asked = {**resources_asked(machine, cores=None), "replicas": options.replicas}
    resources = build_config(asked, ResourceConfig, source="the options")
    if machine.region:
        regions_for(resources)
    return JobRequest(
        options.name or job_name(command),
        Entrypoint.from_binary(program, arguments),
        resources=resources,
        environment=create_environment(
            workspace=None if machine.image else workspace,
            docker_image=machine.image,
            pip_packages=options.pip,
            extras=[extra for entry in options.extra for extra in entry.split(",") if extra],
            env_vars=dict(_variable(variable) for variable in options.env),
        ),
        max_retries_failure=options.retries,
        max_retries_preemption=options.preemption_retries,
        outlives_parent=not options.auto_stop,
    )


def job_name(command: tuple[str, ...]) -> str:
    """Returns a job name for a command: its first script's, else its program's."""
    scripts = [argument for argument in command[1:] if argument.endswith((".py", ".sh"))]
    stem = Path(scripts[0] if scripts else command[0]).stem
    return _NOT_IN_NAMES.sub("-", stem).strip("-._")[:60] or "job"


def _address_of(cluster: str) -> str:
    if cluster == LOCAL:
        return local_cluster().address
    region = known_regions().named(cluster)
    if region.backend_url:
        return region.backend_url
    raise BadInput(
        expected=f"ray_address or iris_address of {region.name} in the regions file",
        found="neither",
        remedy=f"{where_to_write(region.name, ADDRESS_LINE)}; or run assay cluster status {region.name} --forward in "
        "another terminal and submit with --backend ray://127.0.0.1:10001",
    )


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if name and given:
        return name, value
    inherited = variable(name) if name else None
    if inherited is None:
        raise BadInput(
            expected="-e KEY=VALUE, or -e KEY with KEY set here",
            found=f"-e {text}" + ("" if given else ", and it is not set"),
            remedy="Give the value, or export the variable before.",
        )
    return name, inherited


def _end_with(details: JobDetails) -> None:
    if is_lost(details):
        raise JobFailed(
            expected=f"job {details.job_id} to run to its end",
            found=ending_of(details),
            remedy="Submit it again; with --preemption-retries it is started again by itself.",
        )
    note(ending_of(details))
    raise SystemExit(0 if details.status is JobStatus.SUCCEEDED else 1)


def _when(seconds: float | None) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds else ""
