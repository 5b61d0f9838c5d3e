"""Jobs on a real Iris controller with its autoscaler and workers, beyond the contract's tests."""

from __future__ import annotations

import os
import signal
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.iris_cluster import IrisCluster, shared_cluster, start_cluster
from fakes.polling import eventual_pid, eventually, is_alive
from fakes.processes import running_program
from resources.backends.iris.client import IrisClient
from resources.backends.iris.connection import IrisController
from resources.backends.programs.iris_records import call_controller
from resources.config import ResourceConfig
from resources.errors import BackendUnavailable, BadInput, JobFailed, JobTimeout, UnsatisfiableResources
from resources.jobs.jobs import Call, Command, Entrypoint, JobRequest, JobStatus, create_environment, wait_all
from resources.tpu import largest_single_vm_slice

FOR_EVER = "while :; do sleep 1; done"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "greeting.txt").write_text("hello")
    return folder


@pytest.fixture
def client() -> Iterator[IrisClient]:
    client = shared_cluster().client()
    yield client
    client.shutdown()


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[IrisCluster]:
    """A cluster for tests that stop and start it; the last of them leaves it stopped."""
    cluster = start_cluster()
    yield cluster
    cluster.end()


def job(script: str, workspace: Path, *, name: str = "job", cpu: int = 1, **options: Any) -> JobRequest:
    command, environment = Command("sh", ("-c", script)), create_environment(workspace=workspace)
    return JobRequest(name, command, resources=ResourceConfig(cpu=cpu), environment=environment, **options)


def test_iris_job_runs_in_a_copy_of_its_workspace(client: IrisClient, workspace: Path) -> None:
    handle = client.submit(job("cat greeting.txt; rm greeting.txt", workspace))
    assert handle.wait(30) is JobStatus.SUCCEEDED
    assert handle.logs() == "hello"
    assert (workspace / "greeting.txt").exists()


def test_iris_job_with_a_killed_submitter_ends_with_all_its_processes(workspace: Path, tmp_path: Path) -> None:
    cluster = shared_cluster()
    script = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from fakes.iris_cluster import IrisCluster
from resources.config import ResourceConfig
from resources.jobs.jobs import Command, JobRequest, create_environment
client = IrisCluster({cluster.address!r}, None, Path()).client(lease_seconds=3.0)
command = Command("sh", ("-c", 'trap "" TERM; echo $$ > {tmp_path}/pid; {FOR_EVER}'))
environment = create_environment(workspace={str(workspace)!r})
handle = client.submit(JobRequest("orphan", command, resources=ResourceConfig(), environment=environment))
Path({str(tmp_path)!r}, "job").write_text(handle.job_id)
handle.wait()
"""
    with running_program("-c", script):
        pid = eventual_pid(tmp_path / "pid")
        eventually((tmp_path / "job").exists)
        handle = cluster.client().attach((tmp_path / "job").read_text())
        with pytest.raises(JobTimeout):
            handle.wait(4)  # longer than the lease: it is renewed
    assert handle.wait(30, raise_on_failure=False) is JobStatus.STOPPED
    assert not is_alive(pid)
    # The reason comes with the log, which the controller may receive after the job's end.
    eventually(lambda: handle.details().reason == "the process that submitted it has ended")


def test_iris_job_that_iris_kills_outright_leaves_no_process(
    client: IrisClient, workspace: Path, tmp_path: Path
) -> None:
    daemon = f'trap "" TERM; echo $$ > {tmp_path}/daemon; {FOR_EVER}'
    handle = client.submit(job(f"(setsid sh -c '{daemon}' &); echo $$ > {tmp_path}/main; {FOR_EVER}", workspace))
    pids = [eventual_pid(tmp_path / name) for name in ("main", "daemon")]
    IrisController(shared_cluster().address).terminate(handle.job_id)
    eventually(lambda: not any(is_alive(pid) for pid in pids))
    assert handle.wait(10, raise_on_failure=False) is JobStatus.STOPPED


def test_iris_job_goes_on_after_a_restart_of_its_cluster_and_counts_it_as_a_preemption(
    own_cluster: IrisCluster, workspace: Path, tmp_path: Path
) -> None:
    client = own_cluster.client()
    script = f"echo $$ >> {tmp_path}/pids; [ $(wc -l < {tmp_path}/pids) = 2 ] && exit 0; {FOR_EVER}"
    handle = client.submit(job(script, workspace, max_retries_preemption=1))
    first = eventual_pid(tmp_path / "pids")
    own_cluster.tell("restart")
    assert handle.wait(60) is JobStatus.SUCCEEDED
    details = handle.details()
    assert (details.attempts, details.failures, details.preemptions) == (2, 0, 1)
    assert not is_alive(first)


def test_iris_controller_is_awaited_for_a_moment_and_reported_if_gone(
    own_cluster: IrisCluster, workspace: Path
) -> None:
    client = own_cluster.client(patience_seconds=2)
    handle = client.submit(job(FOR_EVER, workspace))
    own_cluster.tell("stop")
    with pytest.raises(BackendUnavailable, match=own_cluster.address):
        handle.status()
    own_cluster.tell("start")
    assert handle.status() in {JobStatus.RUNNING, JobStatus.PENDING}
    own_cluster.tell("stop")
    with pytest.raises(BackendUnavailable):
        own_cluster.client(patience_seconds=0.5).submit(job("true", workspace, name="other"))


def test_iris_replicas_start_only_together(client: IrisClient, workspace: Path, tmp_path: Path) -> None:
    # Two machines of 900 cores: the third replica waits, and so do the other two.
    handle = client.submit(job(f"touch {tmp_path}/$ASSAY_REPLICA_INDEX", workspace, cpu=600, replicas=3))
    controller = IrisController(shared_cluster().address)
    eventually(lambda: [task.state for task in controller.tasks(handle.job_id)].count("TASK_STATE_RUNNING") == 2)
    with pytest.raises(JobTimeout):
        handle.wait(2)
    assert not list(tmp_path.glob("[0-9]"))
    handle.terminate()
    assert handle.status() is JobStatus.STOPPED


def test_iris_job_fails_when_one_of_its_replicas_is_lost_for_good(
    client: IrisClient, workspace: Path, tmp_path: Path
) -> None:
    script = f"echo $$ > {tmp_path}/$ASSAY_REPLICA_INDEX; {FOR_EVER}"
    handle = client.submit(job(script, workspace, cpu=600, replicas=2, max_retries_preemption=0))
    first, _ = [eventual_pid(tmp_path / index) for index in "01"]
    answer = call_controller(shared_cluster().address, "GetTaskStatus", taskId=f"{handle.job_id}/1")
    shared_cluster().tell(f"lose {answer['task']['workerId']}")
    assert handle.wait(30, raise_on_failure=False) is JobStatus.FAILED
    assert "replica 1 is lost" in (handle.details().reason or "")
    assert not is_alive(first)


def test_iris_job_that_fails_at_once_costs_no_other_job_its_machine(client: IrisClient, workspace: Path) -> None:
    on_both_machines = client.submit(job(FOR_EVER, workspace, name="full", cpu=600, replicas=2))
    eventually(lambda: on_both_machines.status() is JobStatus.RUNNING)
    for name in ("fails", "fails-too"):  # the second is placed after the controller has dealt with the first
        failing = client.submit(job("exit 1", workspace, name=name))
        assert failing.wait(30, raise_on_failure=False) is JobStatus.FAILED
    details = on_both_machines.details()
    assert (details.status, details.preemptions) == (JobStatus.RUNNING, 0)


def test_iris_job_that_waits_for_room_says_so(client: IrisClient, workspace: Path) -> None:
    full = client.submit(job(FOR_EVER, workspace, name="full", cpu=600, replicas=2))
    waiting = client.submit(job("true", workspace, name="waiting", cpu=600))
    eventually(lambda: "cpu" in (waiting.details().reason or "").lower())
    assert waiting.status() is JobStatus.PENDING
    full.terminate()
    assert waiting.wait(30) is JobStatus.SUCCEEDED


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        (ResourceConfig(cpu=1000), "cpu 1000"),
        (ResourceConfig(ram="2t"), "ram 2t"),
        (ResourceConfig.with_gpu("H100"), "H100"),
    ],
)
def test_iris_resources_that_no_group_has_are_refused_with_what_there_is(
    client: IrisClient, resources: ResourceConfig, reason: str
) -> None:
    with pytest.raises(UnsatisfiableResources, match=f"(?s){reason}.*local-cpu"):
        client.check_resources(resources)


def test_iris_job_ended_from_outside_too_often_fails_despite_allowed_failures(
    client: IrisClient, workspace: Path, tmp_path: Path
) -> None:
    handle = client.submit(
        job(f"echo x >> {tmp_path}/tries; kill -KILL $$", workspace, max_retries_failure=2, max_retries_preemption=1)
    )
    with pytest.raises(JobFailed, match="ended from outside 2 times"):
        handle.wait(60)
    assert (tmp_path / "tries").read_text() == "x\n" * 2


def test_iris_job_with_packages_has_them_in_an_environment_of_its_own(
    client: IrisClient, workspace: Path, tmp_path: Path
) -> None:
    wheel = tmp_path / "greeter-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("greeter.py", "print('greetings from', __name__)")
        archive.writestr("greeter-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n")
        archive.writestr(
            "greeter-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("greeter-1.0.dist-info/RECORD", "")
    request = JobRequest(
        "packages",
        Entrypoint.from_binary("python", ["-c", "import greeter"]),
        resources=ResourceConfig(),
        environment=create_environment(workspace=workspace, pip_packages=[str(wheel)]),
    )
    handle = client.submit(request)
    assert handle.wait(60) is JobStatus.SUCCEEDED
    assert handle.logs().splitlines()[-1] == "greetings from greeter"


def test_iris_workspace_that_is_too_large_is_refused_before_it_is_sent(client: IrisClient, workspace: Path) -> None:
    (workspace / "noise.bin").write_bytes(os.urandom(26 * 2**20))
    with pytest.raises(BadInput, match="25 MiB"):
        client.submit(job("true", workspace))


def test_iris_jobs_and_actors_are_found_beyond_the_first_page(client: IrisClient, workspace: Path) -> None:
    ids = [client.submit(job(FOR_EVER, workspace, name=f"listed-{index}")).job_id for index in range(5)]
    by_twos = IrisClient(IrisController(shared_cluster().address, page=2))
    listed = [details.job_id for details in by_twos.jobs()]
    assert [job_id for job_id in listed if job_id in ids] == ids[::-1]
    assert len(listed) == len(set(listed))


def test_iris_call_brings_our_code_to_workers_that_lack_it(client: IrisClient, workspace: Path) -> None:
    command = client.submit(job('python -c "import resources.tpu"', workspace))
    environment = create_environment(workspace=workspace)
    call = JobRequest(
        "call", Call(largest_single_vm_slice, ("v6e-16",)), resources=ResourceConfig(), environment=environment
    )
    assert client.submit(call).result(60) == "v6e-8"
    assert command.wait(60, raise_on_failure=False) is JobStatus.FAILED
    assert "No module named 'resources.tpu'" in command.logs()


def on_slices(*types: str, slice_count: int = 1) -> ResourceConfig:
    return ResourceConfig.with_tpu(types, slice_count, cpu=1, ram="1g", disk="1g")


def slices_of(job_id: str) -> set[str]:
    """Returns the simulated slices of a job's tasks; a worker's name is its slice and its index in the slice."""
    address = shared_cluster().address
    tasks = call_controller(address, "ListTasks", jobId=job_id)["tasks"]
    return {task["workerId"].rsplit("-", 2)[0] for task in tasks}


def test_iris_job_on_a_slice_runs_on_each_vm_and_receives_its_type(client: IrisClient, workspace: Path) -> None:
    words = "host $ASSAY_HOST_INDEX of $ASSAY_HOST_COUNT on $ASSAY_TPU_TYPE, $JAX_PLATFORMS, $LIBTPU_INIT_ARGS"
    request = job(f'echo "{words}"', workspace)
    handle = client.submit(replace(request, resources=on_slices("v6e-16", "v5e-16")))  # no v6e-16 slice exists
    assert handle.wait(60) is JobStatus.SUCCEEDED
    expected = [f"host {index} of 4 on v5litepod-16, tpu,cpu, " for index in range(4)]
    assert handle.logs().splitlines() == expected
    assert handle.details().replicas == len(slices_of(handle.job_id)) == 1


def test_iris_job_on_two_slices_of_several_vms_is_refused_and_two_jobs_run_at_once(
    client: IrisClient, workspace: Path, tmp_path: Path
) -> None:
    two = on_slices("v5e-16", slice_count=2)
    with pytest.raises(UnsatisfiableResources, match=r"(?s)2 slices v5litepod-16 of 4 VMs each.*a job for each slice"):
        client.submit(replace(job("true", workspace), resources=two))
    (met := tmp_path / "met").mkdir()
    marker = f"{met}/$(basename $ASSAY_JOB_ID)-$ASSAY_HOST_INDEX"
    script = (
        "echo host $ASSAY_HOST_INDEX > $ASSAY_ANNOUNCEMENT.new; "
        "mv $ASSAY_ANNOUNCEMENT.new $ASSAY_ANNOUNCEMENT; "
        f"touch {marker}; until [ -e {tmp_path}/go ]; do sleep 0.1; done"
    )
    requests = [replace(job(script, workspace, name=name), resources=on_slices("v5e-16")) for name in ("one", "two")]
    handles = [client.submit(request) for request in requests]
    eventually(lambda: len(list(met.iterdir())) == 8)
    eventually(lambda: [handle.announced() for handle in handles] == ["host 0\n"] * 2)  # host 0 announces for its slice
    (tmp_path / "go").touch()
    assert wait_all(handles, 60) == [JobStatus.SUCCEEDED] * 2
    first, second = (slices_of(handle.job_id) for handle in handles)
    assert len(first) == len(second) == 1 and first != second


def test_iris_job_inside_a_job_is_named_below_it(client: IrisClient, workspace: Path, tmp_path: Path) -> None:
    script = (
        "from resources.backends.current import *; from resources.config import *; from resources.jobs.jobs import *; "
        "print(current_client().submit(JobRequest('child', Entrypoint.from_binary('true'), "
        "resources=ResourceConfig())).job_id)"
    )
    request = JobRequest(
        "parent",
        Entrypoint.from_binary("python", ["-c", script]),
        resources=ResourceConfig(),
        environment=create_environment(workspace=workspace, python=Path(sys.executable)),
    )
    handle = client.submit(request)
    assert handle.wait(60) is JobStatus.SUCCEEDED
    assert handle.logs().startswith(f"{handle.job_id}/child-")


def test_iris_attempt_that_loses_its_supervisor_is_tried_again(
    client: IrisClient, workspace: Path, tmp_path: Path
) -> None:
    script = f"if [ -e {tmp_path}/pid ]; then exit 0; fi; echo $PPID > {tmp_path}/pid; {FOR_EVER}"
    handle = client.submit(job(script, workspace, max_retries_preemption=1))
    os.kill(eventual_pid(tmp_path / "pid"), signal.SIGKILL)
    assert handle.wait(60) is JobStatus.SUCCEEDED
