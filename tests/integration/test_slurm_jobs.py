"""Jobs on a real Slurm of this machine: features that only Slurm has, beyond the contract's tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fakes.polling import eventual_pid, eventually, is_alive
from fakes.processes import running_program
from fakes.slurm_cluster import NODES, SlurmCluster, batch_pid, require_slurm, shared_slurm, slurm_id
from faults.scenarios.processes import send
from resources.backends.slurm.client import SlurmClient
from resources.backends.slurm.slurm import Slurm
from resources.config import ResourceConfig
from resources.errors import UnsatisfiableResources
from resources.jobs.jobs import Command, JobRequest, JobStatus, create_environment

pytestmark = [pytest.mark.timeout(120), pytest.mark.slurm]

WHOLE_NODE = ResourceConfig(cpu=32)
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cluster() -> SlurmCluster:
    require_slurm()
    return shared_slurm()


@pytest.fixture
def client(cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmClient]:
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path / "code")
    client = cluster.client(tmp_path / "slurm", grace_seconds=2.0)
    yield client
    client.shutdown()


def shell(script: str, name: str = "job", *, resources: ResourceConfig | None = None, replicas: int = 1) -> JobRequest:
    return JobRequest(name, Command("sh", ("-c", script)), resources=resources or ResourceConfig(), replicas=replicas)


@contextmanager
def lost_node(cluster: SlurmCluster, node: str) -> Iterator[None]:
    """Makes a node and all of its processes unresponsive, and restarts it at the end of the block."""
    on_it = cluster.processes_on(node)
    send(signal.SIGSTOP, on_it)
    try:
        cluster.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=silent")  # as Slurm does
        yield
    finally:
        send(signal.SIGKILL, on_it)
        cluster.programs[node].wait()
        cluster.start_node(node)


def once_then_end(folder: Path) -> str:
    """Returns a script that at its first start runs until SIGTERM, then writes `saved`; its second start succeeds."""
    return (
        f"[ -e {folder}/first ] && exit 0; trap 'echo saved > {folder}/saved; exit 0' TERM; "
        f"echo $$ > {folder}/first; while :; do sleep 0.1; done"
    )


def test_replicas_that_need_a_node_each_run_on_two_nodes_at_once_and_are_named_as_their_job(
    cluster: SlurmCluster, client: SlurmClient, tmp_path: Path
) -> None:
    script = (
        f"touch {tmp_path}/$ASSAY_REPLICA_INDEX; until [ -e {tmp_path}/0 -a -e {tmp_path}/1 ]; do sleep 0.05; done; "
        f"squeue -h -o %j; echo $SLURMD_NODENAME"
    )
    handle = client.submit(shell(script, "gang", resources=WHOLE_NODE, replicas=2))
    assert handle.wait(60) is JobStatus.SUCCEEDED
    assert {handle.logs(replica=index) for index in range(2)} == {"gang\nnode-a", "gang\nnode-b"}


def test_gang_starts_on_all_hosts_or_none_and_a_loss_preempts_all(
    cluster: SlurmCluster, client: SlurmClient, tmp_path: Path
) -> None:
    place = "$ASSAY_REPLICA_INDEX $ASSAY_REPLICA_COUNT $ASSAY_HOST_INDEX $ASSAY_HOST_COUNT"
    mark = f"{tmp_path}/$ASSAY_REPLICA_INDEX"
    script = f"echo {place}; [ -e {mark} ] && exit 0; echo $$ > {mark}; exec sleep 300"
    first = client.submit(shell("sleep 300", "first", resources=WHOLE_NODE))
    eventually(lambda: first.status() is JobStatus.RUNNING)
    gang = client.submit(shell(script, "gang", resources=WHOLE_NODE, replicas=2))
    eventually(lambda: "waits: " in (gang.details().reason or ""))
    assert not (tmp_path / "0").exists() and not (tmp_path / "1").exists()  # though a node is free
    first.terminate()
    pids = [eventual_pid(tmp_path / name) for name in "01"]
    slurms = slurm_id(tmp_path / "slurm", gang.job_id)
    [lost] = {*NODES} - {cluster.command("squeue", "-h", "-o", "%B", "-j", slurms).strip()}
    with lost_node(cluster, lost):
        eventually(lambda: "BeginTime" in (gang.details().reason or ""))
    eventually(lambda: not any(map(is_alive, pids)))
    eventually(lambda: cluster.has_set(slurms, "StartTime=now"))  # instead of two minutes after Slurm's cleanup
    assert gang.wait(60) is JobStatus.SUCCEEDED
    assert (gang.details().attempts, gang.details().failures, gang.details().preemptions) == (2, 0, 1)
    for index in range(2):
        assert gang.logs(replica=index).splitlines() == [f"{index} 2 0 1", "--- attempt 2 ---", f"{index} 2 0 1"]


def test_job_near_its_time_limit_is_asked_to_end_and_begins_again_at_once_as_preempted(
    cluster: SlurmCluster, client: SlurmClient, tmp_path: Path
) -> None:
    handle = client.submit(shell(once_then_end(tmp_path)))
    eventual_pid(tmp_path / "first")
    cluster.command("scancel", "--batch", "--signal=USR1", slurm_id(tmp_path / "slurm", handle.job_id))  # as Slurm does
    assert handle.wait(40) is JobStatus.SUCCEEDED
    assert (tmp_path / "saved").exists()
    details = handle.details()
    assert (details.attempts, details.failures, details.preemptions) == (2, 0, 1)


@pytest.fixture(params=[0, 60], ids=["at once", "after a grace time"])
def preempted_partition(request: pytest.FixtureRequest, cluster: SlurmCluster) -> Iterator[None]:
    """Makes Slurm signal all processes of a preempted job at once, or those of its replicas some time before."""
    cluster.command("scontrol", "update", "PartitionName=main", f"GraceTime={request.param}")
    yield
    cluster.command("scontrol", "update", "PartitionName=main", "GraceTime=0")


@pytest.mark.usefixtures("preempted_partition")
def test_job_that_another_preempts_waits_and_goes_on_when_there_is_room_again(
    cluster: SlurmCluster, client: SlurmClient, tmp_path: Path
) -> None:
    handle = client.submit(shell(once_then_end(tmp_path), resources=WHOLE_NODE, replicas=2))
    eventual_pid(tmp_path / "first")
    urgent = cluster.client(tmp_path / "slurm", partition="urgent", grace_seconds=2.0)
    try:
        other = urgent.submit(shell(f"touch {tmp_path}/other; sleep 300", "other", resources=WHOLE_NODE))
        eventually((tmp_path / "other").exists)
        assert "Slurm's job" in (eventually(lambda: handle.details().reason) or "")
        assert handle.status() is JobStatus.PENDING
        other.terminate()
        assert handle.wait(40) is JobStatus.SUCCEEDED
        assert (handle.details().attempts, handle.details().preemptions) == (2, 1)
    finally:
        urgent.shutdown()


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Returns time of change and content of each file below a folder."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_preempted_job_without_submitter_and_readers_goes_on(
    cluster: SlurmCluster, client: SlurmClient, tmp_path: Path
) -> None:
    request = shell(once_then_end(tmp_path), resources=WHOLE_NODE, replicas=2)
    handle = client.submit(replace(request, outlives_parent=True))
    eventual_pid(tmp_path / "first")
    client.shutdown()
    folder, slurms = tmp_path / "slurm" / "jobs" / handle.job_id, slurm_id(tmp_path / "slurm", handle.job_id)
    urgent = cluster.client(tmp_path / "slurm", partition="urgent", grace_seconds=2.0)
    try:
        other = urgent.submit(shell(f"touch {tmp_path}/other; sleep 300", "other", resources=WHOLE_NODE))
        eventually((tmp_path / "other").exists)
        other.terminate()
    finally:
        urgent.shutdown()
    eventually(lambda: cluster.has_set(slurms, "StartTime=now"))  # in place of two minutes
    eventually(lambda: '"succeeded"' in (folder / "status.json").read_text())
    assert (handle.details().attempts, handle.details().preemptions) == (2, 1)


def test_concurrent_readers_of_a_cut_off_job_change_nothing(
    cluster: SlurmCluster, client: SlurmClient, tmp_path: Path
) -> None:
    handle = client.submit(replace(shell(once_then_end(tmp_path)), outlives_parent=True))
    eventual_pid(tmp_path / "first")
    client.shutdown()
    folder, slurms = tmp_path / "slurm" / "jobs" / handle.job_id, slurm_id(tmp_path / "slurm", handle.job_id)
    os.utime(folder / "lease", (0, 0))  # the submitter is gone for long
    os.kill(batch_pid(handle.job_id), signal.SIGKILL)
    eventually(lambda: "JobState=FAILED" in cluster.command("scontrol", "--oneliner", "show", "job", slurms))
    before = contents(folder)
    readers = [cluster.client(tmp_path / "slurm").attach(handle.job_id) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        statuses = list(pool.map(lambda reader: reader.wait(60, raise_on_failure=False), readers))
    assert statuses == [JobStatus.FAILED] * 2
    assert [reader.details().preemptions for reader in readers] == [1, 1]
    assert contents(folder) == before
    assert "JobState=FAILED" in cluster.command("scontrol", "--oneliner", "show", "job", slurms)


def test_job_on_a_lost_node_is_queued_again_for_later(
    cluster: SlurmCluster, client: SlurmClient, tmp_path: Path
) -> None:
    handle = client.submit(shell(f"echo $SLURMD_NODENAME; {once_then_end(tmp_path)}"))
    eventual_pid(tmp_path / "first")
    node = eventually(handle.logs)
    with lost_node(cluster, node):
        eventually(lambda: "BeginTime" in (handle.details().reason or ""))
        assert handle.status() is JobStatus.PENDING
        handle.terminate()
        assert handle.status() is JobStatus.STOPPED
    eventually(lambda: cluster.command("sinfo", "-h", "-o", "%T").split() == ["idle"])


def test_job_that_no_node_can_start_is_queued_again_and_fails_when_its_budget_is_used_up(
    cluster: SlurmCluster, client: SlurmClient, tmp_path: Path
) -> None:
    spools = [cluster.folder / f"spool-{node}" for node in NODES]
    for spool in spools:
        spool.rename(f"{spool}.away")
        spool.touch()
    try:
        patient = client.submit(shell("true", "patient"))
        impatient = client.submit(replace(shell("true", "impatient"), max_retries_preemption=0))
        eventually(lambda: "BeginTime" in (patient.details().reason or ""))
        assert impatient.wait(40, raise_on_failure=False) is JobStatus.FAILED
        assert "a node could not start" in (impatient.details().reason or "")
    finally:
        for spool in spools:
            spool.unlink()
            Path(f"{spool}.away").rename(spool)
    assert cluster.has_set(slurm_id(tmp_path / "slurm", patient.job_id), "StartTime=now")
    assert patient.wait(40) is JobStatus.SUCCEEDED
    assert (patient.details().attempts, patient.details().failures, patient.details().preemptions) == (1, 0, 1)


def test_job_with_a_killed_batch_program_begins_again_without_leftovers(client: SlurmClient, tmp_path: Path) -> None:
    handle = client.submit(shell(once_then_end(tmp_path)))
    pid = eventual_pid(tmp_path / "first")
    os.kill(batch_pid(handle.job_id), signal.SIGKILL)
    assert handle.wait(40) is JobStatus.SUCCEEDED
    assert handle.details().preemptions == 1
    assert not is_alive(pid)


def test_job_that_its_owner_cancels_with_scancel_is_stopped_and_stays_so(
    cluster: SlurmCluster, client: SlurmClient, tmp_path: Path
) -> None:
    handle = client.submit(shell(once_then_end(tmp_path)))
    pid = eventual_pid(tmp_path / "first")
    cluster.command("scancel", slurm_id(tmp_path / "slurm", handle.job_id))
    assert handle.wait(40, raise_on_failure=False) is JobStatus.STOPPED
    assert "scancel" in (handle.details().reason or "")
    assert not is_alive(pid)


def test_job_with_a_killed_submitter_ends_after_its_lease(cluster: SlurmCluster, tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]
from fakes.slurm_cluster import SlurmCluster
from resources.config import ResourceConfig
from resources.jobs.jobs import Command, JobRequest, create_environment
client = SlurmCluster(Path({str(cluster.folder)!r})).client(Path({str(tmp_path / "slurm")!r}), lease_seconds=2.0)
(Path({str(tmp_path)!r}) / "code").mkdir()
command = Command("sh", ("-c", "echo $$ > {tmp_path}/pid; sleep 300"))
environment = create_environment(workspace={str(tmp_path / "code")!r})
client.submit(JobRequest("job", command, resources=ResourceConfig(), environment=environment))
time.sleep(300)
"""
    with running_program("-c", script):
        pid = eventual_pid(tmp_path / "pid")
    [details] = eventually(lambda: [job for job in cluster.client(tmp_path / "slurm").jobs() if job.status.finished])
    assert (details.status, details.reason) == (JobStatus.STOPPED, "the process that submitted it has ended")
    assert not is_alive(pid)


def test_job_waits_in_the_queue_with_slurms_reason_and_is_taken_from_it(client: SlurmClient, tmp_path: Path) -> None:
    client.submit(shell("sleep 300", "first", resources=WHOLE_NODE, replicas=2))
    second = client.submit(shell(f"touch {tmp_path}/ran", "second"))
    assert second.status() is JobStatus.PENDING
    eventually(lambda: "Resources" in (second.details().reason or "") or "Priority" in (second.details().reason or ""))
    second.terminate()
    assert second.status() is JobStatus.STOPPED
    assert not (tmp_path / "ran").exists()


def test_gpus_come_from_gres_and_more_than_a_node_has_are_refused(client: SlurmClient) -> None:
    handle = client.submit(
        shell("echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES", resources=ResourceConfig.with_gpu("H100", 2))
    )
    assert handle.wait(60) is JobStatus.SUCCEEDED
    assert handle.logs() == "node-a 0,1"
    pair = client.submit(shell("echo $CUDA_VISIBLE_DEVICES", resources=ResourceConfig.with_gpu("auto", 1), replicas=2))
    assert pair.wait(60) is JobStatus.SUCCEEDED
    with pytest.raises(UnsatisfiableResources, match="2 × h100"):
        client.check_resources(ResourceConfig.with_gpu("H100", 3))
    with pytest.raises(UnsatisfiableResources, match="H200"):
        client.check_resources(ResourceConfig.with_gpu("H200", 1))


def test_only_a_partition_that_is_not_preempted_takes_jobs_that_must_not_be(
    cluster: SlurmCluster, client: SlurmClient, tmp_path: Path
) -> None:
    lasting = ResourceConfig(preemptible=False)
    with pytest.raises(UnsatisfiableResources, match="PreemptMode"):
        client.check_resources(lasting)
    cluster.client(tmp_path, partition="urgent").check_resources(lasting)


def test_refusals_by_slurm_itself_are_reported_with_its_message(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    client = SlurmClient(Slurm("main", options={"time": "never"}), folder=tmp_path / "slurm")
    request = JobRequest(
        "job", Command("true"), resources=ResourceConfig(), environment=create_environment(workspace=tmp_path / "code")
    )
    with pytest.raises(UnsatisfiableResources, match=r"(?i)time"):
        client.submit(request)
    assert client.jobs() == []
