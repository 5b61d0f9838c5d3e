"""Jobs on real Rays of several nodes: lost nodes, drivers and heads, other machines, other ways to connect."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.runtime_env.working_dir import upload_working_dir_if_needed
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.cluster_utils import Cluster
from ray.dashboard.modules.job.job_manager import JobManager

from fakes.polling import eventual_pid, eventually, is_alive
from fakes.processes import free_port
from fakes.ray_cluster import add_node, client_of, connected, ray_cluster
from faults.scenarios.processes import command_line, descendants, send
from resources.backends.current import client_from_url
from resources.backends.ray.client import RayClient, RayJob
from resources.config import ResourceConfig
from resources.errors import BackendUnavailable, JobFailed, UnsatisfiableResources
from resources.jobs.jobs import Entrypoint, JobAlreadyExists, JobRequest, JobStatus, create_environment, wait_all

pytestmark = pytest.mark.timeout(120)

FOR_EVER = "while :; do sleep 1; done"
HERE = {"ray.io/availability-region": "here"}
THERE = {"ray.io/availability-region": "there"}
ROOT = Path(__file__).parents[2]
LARGE_BYTES = 34 << 20
"""More than 32 MiB: glibc returns freed blocks of this size to the system at once, so a process's memory is in use."""


@pytest.fixture(scope="module")
def client_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def head(client_port: int) -> Iterator[Cluster]:
    with ray_cluster(num_cpus=4, labels=HERE, runtime_environments=True, ray_client_server_port=client_port) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(head: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The head, and a node that appears to be another machine."""
    add_other_machine(head, tmp_path_factory.mktemp("machine"))
    return head


def add_other_machine(cluster: Cluster, folder: Path) -> Any:
    """Adds a node with its own `/tmp` and cache, so that it appears to be another machine."""
    (folder / "tmp").mkdir()
    return add_node(
        cluster,
        num_cpus=4,
        node_ip_address="127.0.0.2",
        labels=THERE,
        runtime_environments=True,
        env_vars={"TMPDIR": str(folder / "tmp"), "ASSAY_CACHE_DIR": str(folder / "cache")},
    )


@pytest.fixture
def client(cluster: Cluster) -> Iterator[RayClient]:
    client = client_of(str(cluster.address))
    yield client
    client.shutdown()


def shell(script: str, name: str = "job", **options: Any) -> JobRequest:
    return JobRequest(name, Entrypoint.from_binary("sh", ["-c", script]), **{"resources": on(), **options})


def on(*regions: str, **options: Any) -> ResourceConfig:
    return ResourceConfig.with_cpu(regions=regions or None, **options)


def test_job_inside_a_job_works_where_the_driver_is_a_job_of_ray_with_a_working_directory(
    head: Cluster, tmp_path: Path
) -> None:
    # Runs first: two nodes on the same machine remove each other's files that Ray has unpacked.
    (tmp_path / "words.py").write_text("GREETING = 'hello from the working directory'")
    (tmp_path / "main.py").write_text(
        textwrap.dedent("""
            from resources.backends.current import current_client
            from resources.config import ResourceConfig
            from resources.jobs.jobs import Entrypoint, JobRequest

            def submit(function):
                request = JobRequest(function.__name__, Entrypoint.from_callable(function), resources=ResourceConfig())
                handle = current_client().submit(request)
                handle.wait(60)
                print(handle.logs(), flush=True)

            def child():
                print("child", flush=True)

            def parent():
                import words

                print(words.GREETING, flush=True)
                submit(child)

            submit(parent)
        """)
    )
    variables = {"ASSAY_JOBS": "ray://auto"}

    async def run(environment: dict[str, Any]) -> tuple[str, str]:
        service = JobManager(GcsClient(address=str(head.address)), str(tmp_path))  # Ray's own, without a server
        job_id = await service.submit_job(entrypoint=f"{sys.executable} main.py", runtime_env=environment)
        log = "".join([lines async for lines in service.tail_job_logs(job_id)])  # to its end
        return str(await service.get_job_status(job_id)), log

    with connected(str(head.address)):
        sent = upload_working_dir_if_needed({"working_dir": str(tmp_path), "env_vars": variables}, True)
        status, log = asyncio.run(run(sent))
    assert status == "SUCCEEDED", log
    assert log.splitlines()[-2:] == ["hello from the working directory", "child"]


def test_other_machine_gets_the_workspace_without_what_git_ignores(client: RayClient, tmp_path: Path) -> None:
    workspace = tmp_path / "project"
    (workspace / "inner").mkdir(parents=True)
    (workspace / ".gitignore").write_text("secret\n")
    (workspace / "secret").write_text("s")
    (workspace / "words.py").write_text("GREETING = 'hello from the workspace'")
    subprocess.run(["git", "init", "-q", workspace], check=True)
    request = shell(
        "pwd; python -c 'import sys; sys.path.insert(0, \"..\"); import words; print(words.GREETING)'; ls -a ..",
        resources=on("there"),
        environment=create_environment(workspace=workspace),
        working_directory=workspace / "inner",
    )
    (workspace / "inner" / "kept").touch()
    first, second = client.submit(request), None
    first.wait(60)
    where, greeting, *listed = first.logs().splitlines()
    assert not Path(where).is_relative_to(workspace)
    assert greeting == "hello from the workspace"
    assert "words.py" in listed and "secret" not in listed
    second = client.submit(request)
    second.wait(60)
    assert second.logs().splitlines()[0] == where


def test_callable_finds_the_modules_of_its_workspace_and_assay_on_another_machine(
    client: RayClient, tmp_path: Path
) -> None:
    (tmp_path / "lengths.py").write_text("def length(text):\n    return len(text)\n")

    def measure(text: str) -> None:
        import lengths  # pyright: ignore[reportMissingImports]

        import resources.jobs.announcements

        print(lengths.length(text), resources.jobs.announcements.__file__)

    request = JobRequest(
        "measure",
        Entrypoint.from_callable(measure, ["four"]),
        resources=on("there"),
        environment=create_environment(workspace=tmp_path),
    )
    handle = client.submit(request)
    handle.wait(60)
    assert handle.logs().startswith("4 ")


def test_interpreter_that_a_node_lacks_fails_the_job_and_is_not_tried_again(client: RayClient, tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    environment = create_environment(workspace=tmp_path / "workspace", python=Path("/no/such/python"))
    handle = client.submit(shell("true", resources=on("there"), environment=environment, max_retries_failure=3))
    with pytest.raises(JobFailed, match="/no/such/python does not exist"):
        handle.wait(60)
    assert handle.details().attempts == 1


def test_lost_node_costs_a_preemption_and_keeps_the_log(
    client: RayClient, cluster: Cluster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    doomed = add_node(
        cluster,
        num_cpus=4,
        node_ip_address="127.0.0.3",
        labels={"ray.io/availability-region": "doomed"},
        runtime_environments=True,
    )
    mine = f"{tmp_path}/pid-$ASSAY_REPLICA_INDEX"
    script = f"echo attempt; [ -e {mine} ] && exit 0; echo $$ > {mine}; exec sleep 600"  # a shell might log its end
    handle = client.submit(shell(script, resources=on("doomed", "here"), replicas=2))
    pids = [eventual_pid(tmp_path / f"pid-{index}") for index in range(2)]
    eventually(lambda: handle.logs(replica=1) == "attempt")
    cluster.remove_node(doomed, allow_graceful=False)
    assert handle.wait(60) is JobStatus.SUCCEEDED
    details = handle.details()
    assert (details.attempts, details.failures, details.preemptions) == (2, 0, 1)
    assert handle.logs(replica=1).splitlines() == ["attempt", "--- attempt 2 ---", "attempt"]
    eventually(lambda: not any(is_alive(pid) for pid in pids))


def test_replicas_that_do_not_fit_together_wait_together_and_can_be_ended(client: RayClient, tmp_path: Path) -> None:
    first = client.submit(shell(FOR_EVER, "first", resources=on("here", cpu=3)))
    eventually(lambda: first.status() is JobStatus.RUNNING)
    second = client.submit(shell(f"touch {tmp_path}/started", "second", resources=on("here", cpu=2, replicas=2)))
    eventually(lambda: "waits for" in (second.details().reason or ""))
    assert second.status() is JobStatus.PENDING
    second.terminate()
    assert second.status() is JobStatus.STOPPED
    assert not (tmp_path / "started").exists()
    third = client.submit(shell("true", "third", resources=on("here", cpu=4)))
    first.terminate()
    assert third.wait(30) is JobStatus.SUCCEEDED


def test_job_that_outlives_its_driver_is_waited_for_by_another_and_the_driver_s_own_jobs_end(
    client: RayClient, cluster: Cluster, tmp_path: Path
) -> None:
    driver = start_driver(
        str(cluster.address),
        f"""
        submit("own", "echo $$ > {tmp_path}/own; {FOR_EVER}")
        kept = submit("kept", "until [ -e {tmp_path}/go ]; do sleep 0.1; done; echo kept", outlives_parent=True)
        write({str(tmp_path / "id")!r}, kept.job_id)
        time.sleep(100)
        """,
    )
    job_id = eventually(lambda: (tmp_path / "id").read_text() if (tmp_path / "id").exists() else "")
    own = eventual_pid(tmp_path / "own")
    orphan = next(details for details in client.jobs() if details.name == "own")
    attached = client.attach(orphan.job_id)
    driver.kill()
    driver.wait()
    eventually(lambda: not is_alive(own))
    eventually(lambda: attached.status() is JobStatus.STOPPED)
    with pytest.raises(JobAlreadyExists, match=job_id):
        client.submit(shell("true", "kept"))
    adopted = client.submit(shell("true", "kept", outlives_parent=True), adopt_existing=True)
    assert adopted.job_id == job_id
    (tmp_path / "go").touch()
    assert adopted.wait(30) is JobStatus.SUCCEEDED
    assert client.attach(job_id).logs() == "kept"


def test_job_goes_on_when_its_process_reaches_the_same_cluster_by_another_name(client: RayClient) -> None:
    job_id = client.submit(shell(FOR_EVER)).job_id
    eventually(lambda: client.attach(job_id).status() is JobStatus.RUNNING)
    other = RayClient("auto", grace_seconds=0.5)
    for name in ("first", "second"):
        gc.collect()  # a controller without a local reference would end, and its jobs with it
        assert other.submit(shell("true", name)).wait(60) is JobStatus.SUCCEEDED
    assert client.attach(job_id).status() is JobStatus.RUNNING


def test_many_jobs_at_once_all_succeed_with_few_workers(client: RayClient) -> None:
    jobs = [client.submit(shell("true", f"one-{index}", resources=on("here", cpu=2))) for index in range(20)]
    assert set(wait_all(jobs, 110)) == {JobStatus.SUCCEEDED}
    workers = subprocess.run(["pgrep", "-fc", "ray::assay"], capture_output=True, text=True, check=False)
    assert int(workers.stdout) < 15


def test_large_callables_lie_in_the_object_store_once_and_not_in_the_controller(
    client: RayClient, tmp_path: Path
) -> None:
    def own_memory() -> int:
        # Bytes of the controllers' private memory, without memory shared with the object store
        total = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # a process that has ended meanwhile
                if b"ray::ControllerShell" in (folder / "cmdline").read_bytes():
                    lines = (folder / "status").read_text().splitlines()
                    total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
        return total

    def measure(content: bytes, go: Path) -> int:
        while not go.exists():
            time.sleep(0.05)
        return len(content)

    def submit(index: int) -> RayJob:
        call = Entrypoint.from_callable(measure, [bytes([index]) * LARGE_BYTES, tmp_path / "go"])
        handle = client.submit(JobRequest(f"large-{index}", call, resources=ResourceConfig()))
        eventually(lambda: handle.status() is JobStatus.RUNNING)
        return handle

    jobs = [submit(0)]
    before = own_memory()
    assert before > 0
    jobs += [submit(index) for index in (1, 2)]
    assert own_memory() - before < LARGE_BYTES
    (tmp_path / "go").touch()
    assert [handle.result(60) for handle in jobs] == [LARGE_BYTES] * 3
    assert own_memory() - before < LARGE_BYTES


def test_client_protocol_of_ray_is_enough(cluster: Cluster, client_port: int, tmp_path: Path) -> None:
    driver = start_driver(
        f"ray://127.0.0.1:{client_port}",
        f"""
        with open({str(tmp_path / "result")!r}, "w") as result:
            print(submit("remote", "echo hello $ASSAY_JOBS").wait(60), file=result)
            print(jobs.attach(jobs.jobs()[0].job_id).logs(), file=result)
        """,
    )
    assert driver.wait(90) == 0
    assert (tmp_path / "result").read_text().split() == ["succeeded", "hello", "ray://auto"]


def test_connecting_leaves_the_handler_of_sigterm_as_it_is(cluster: Cluster) -> None:
    ray.shutdown()
    signal.signal(signal.SIGTERM, before := lambda *_: None)
    try:
        client_of(str(cluster.address)).jobs()
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_initialized_ray_is_used_as_it_is(cluster: Cluster) -> None:
    client_of(str(cluster.address)).jobs()
    job_id = ray.get_runtime_context().get_job_id()
    assert client_from_url("ray://auto").url == "ray://auto"
    assert ray.get_runtime_context().get_job_id() == job_id


def test_nothing_at_the_address_is_said() -> None:
    ray.shutdown()
    with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1:9"):
        RayClient("127.0.0.1:9").submit(shell("true"))
    with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1:9"):
        client_from_url("ray://127.0.0.1:9")


def test_image_and_what_no_node_has_are_refused(client: RayClient) -> None:
    with pytest.raises(UnsatisfiableResources, match="run no containers"):
        client.submit(shell("true", environment=create_environment(docker_image="python")))
    with pytest.raises(UnsatisfiableResources):
        client.submit(shell("true", resources=ResourceConfig.with_cpu(cpu=5)))


def start_driver(address: str, script: str) -> subprocess.Popen[bytes]:
    """Starts a separate driver process; its script can use `jobs`, a client, and `submit(name, script)`."""
    code = f"""
import os, sys, time
from pathlib import Path
from resources.backends.ray.client import RayClient
from resources.config import ResourceConfig
from resources.errors import AssayError
from resources.jobs.jobs import Entrypoint, JobRequest

jobs = RayClient({address!r}, grace_seconds=0.5)

def submit(name, script, **options):
    entrypoint = Entrypoint.from_binary("sh", ["-c", script])
    return jobs.submit(JobRequest(name, entrypoint, resources=ResourceConfig.with_cpu(), **options))

def write(path, text):
    Path(path + ".new").write_text(text)
    Path(path + ".new").rename(path)

{textwrap.dedent(script)}
"""
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "RAY_ADDRESS": ""})


def test_lost_head_is_reported_and_the_driver_goes_on_with_the_next(cluster: Cluster, tmp_path: Path) -> None:
    # Runs last: it ends the cluster.
    ray.shutdown()
    port = int(str(cluster.address).rpartition(":")[2])
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node, allow_graceful=False)
    driver = start_driver(
        str(cluster.address),
        f"""
        from concurrent.futures import ThreadPoolExecutor
        from resources.jobs.jobs import JobRequest
        job = submit("job", "echo $$ > {tmp_path}/pid; {FOR_EVER}")
        write({str(tmp_path / "ready")!r}, "")
        while not Path({str(tmp_path / "go")!r}).exists():
            time.sleep(0.1)

        def error_of(ask):
            try:
                ask()
            except AssayError as error:
                return type(error).__name__

        ended = error_of(lambda: job.wait(60))
        asked = (job.details, lambda: submit("other", "true"), jobs.jobs, job.terminate)
        with ThreadPoolExecutor() as threads:  # each takes Ray 2 s
            write({str(tmp_path / "result")!r}, " ".join(map(str, (ended, *threads.map(error_of, asked)))))
        while not Path({str(tmp_path / "again")!r}).exists():
            time.sleep(0.1)
        lost = job.status()
        again = submit("again", "true").wait(60)
        names = [known.name for known in jobs.jobs()]
        write({str(tmp_path / "then")!r}, repr((str(lost), str(again), names)))
        """,
    )
    try:
        eventually((tmp_path / "ready").exists)
        pid = eventual_pid(tmp_path / "pid")
        assert cluster.head_node is not None
        raylet = cluster.head_node.all_processes["raylet"][0].process.pid
        agents = [pid for pid in descendants(raylet) if "agent" in " ".join(command_line(pid)).lower()]
        cluster.remove_node(cluster.head_node, allow_graceful=False)
        send(signal.SIGKILL, agents)  # they would look for the head for half a minute
        (tmp_path / "go").touch()
        eventually((tmp_path / "result").exists)
        assert (tmp_path / "result").read_text().split() == ["BackendUnavailable"] * 5
        eventually(lambda: not is_alive(pid))
        with ray_cluster(num_cpus=4, runtime_environments=True, gcs_server_port=port):
            (tmp_path / "again").touch()
            assert driver.wait(90) == 0
    finally:
        driver.kill()
    assert (tmp_path / "then").read_text() == repr(("failed", "succeeded", ["again"]))
