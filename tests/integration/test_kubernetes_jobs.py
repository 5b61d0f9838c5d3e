"""Jobs on Kubernetes when the cluster misbehaves: the real client against a fake, with pods as real processes."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.kubernetes_cluster import IMAGE, client_of, cluster_of
from fakes.kubernetes_server import KubernetesServer, Refusal
from fakes.polling import eventual_pid, eventually, is_alive
from resources.backends.current import client_from_url
from resources.backends.kubernetes.client import KubernetesClient
from resources.backends.kubernetes.cluster import Cluster, Resource
from resources.config import ResourceConfig
from resources.errors import BackendUnavailable, BadInput, JobFailed, UnsatisfiableResources
from resources.jobs.announcements import announce
from resources.jobs.jobs import Call, Command, JobHandle, JobRequest, JobStatus, create_environment

pytestmark = pytest.mark.timeout(90)

FOR_EVER = "while :; do sleep 1; done"
SECRET_WORD = "hf_do_not_show"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesServer]:
    nodes = {"plain": {}, "tpu": {f"cloud.google.com/gke-tpu-{key}": value for key, value in TPU_NODE.items()}}
    server = KubernetesServer(tmp_path_factory.mktemp("cluster"), nodes=nodes)
    server.objects["nodes", "tpu"]["status"] = {"allocatable": {"google.com/tpu": "4"}}
    yield server
    server.close()


TPU_NODE = {"accelerator": "tpu-v6e-slice", "topology": "4x4"}


@pytest.fixture
def client(server: KubernetesServer) -> Iterator[KubernetesClient]:
    client = client_of(server)
    yield client
    server.refusals.clear()
    client.shutdown()


@pytest.fixture
def hasty_client(server: KubernetesServer) -> Iterator[KubernetesClient]:
    """A client that gives an attempt half a second to start: too short for jobs that must run."""
    client = client_of(server, stuck_seconds=0.5, gang_seconds=0.5)
    yield client
    server.missing_images.clear()
    server.pod_slots = 1000
    client.shutdown()


def request(script: str, name: str = "job", **options: Any) -> JobRequest:
    return JobRequest(name, Command("sh", ("-c", script)), **{"resources": ResourceConfig(), **options})


def running_pod(server: KubernetesServer, job: JobHandle) -> dict[str, Any]:
    eventually(lambda: job.status() is JobStatus.RUNNING)
    return server.pods(job.job_id)[0]


def before_a_job_is_read(monkeypatch: pytest.MonkeyPatch, started: Path, change: Callable[[str], None]) -> None:
    """Calls `change` with the id of a job once `started` exists, between two requests of its owner."""
    read, changed = Cluster.get, set[str]()

    def change_and_read(cluster: Cluster, resource: Resource, name: str) -> dict[str, Any] | None:
        if resource == "jobs" and not changed and started.exists():
            changed.add(name)
            change(name.removesuffix("-1"))
        return read(cluster, resource, name)

    monkeypatch.setattr(Cluster, "get", change_and_read)


@pytest.mark.parametrize(
    ("harm", "counted", "reason"),
    [
        ("evict", "preemptions", "evicted"),
        ("lose_node_of", "preemptions", "deleted"),
        ("run_out_of_memory", "failures", "resources.ram"),
    ],
)
def test_pod_that_is_lost_counts_in_the_budget_of_its_kind_and_is_tried_again(
    client: KubernetesClient, server: KubernetesServer, tmp_path: Path, harm: str, counted: str, reason: str
) -> None:
    script = f"echo try; if [ -e {tmp_path}/tried ]; then exit 0; fi; touch {tmp_path}/tried; {FOR_EVER}"
    job = client.submit(request(script, max_retries_failure=1, max_retries_preemption=1))
    eventually((tmp_path / "tried").exists)
    getattr(server, harm)(running_pod(server, job))
    eventually(lambda: job.details().attempts == 2 or reason in (job.details().reason or ""))
    assert job.wait(30) is JobStatus.SUCCEEDED
    details = job.details()
    assert {"failures": details.failures, "preemptions": details.preemptions} == {
        "failures": int(counted == "failures"),
        "preemptions": int(counted == "preemptions"),
    }
    assert job.logs().endswith("--- attempt 2 ---\ntry")


def test_pod_evicted_after_pods_were_listed_and_before_its_job_is_read_counts_as_preempted(
    client: KubernetesClient, server: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evict(job_id: str) -> None:
        server.evict(server.pods(job_id)[0])
        eventually(lambda: server.objects["jobs", f"{job_id}-1"]["status"].get("conditions"))

    before_a_job_is_read(monkeypatch, tmp_path / "tried", evict)
    job = client.submit(request(f"touch {tmp_path}/tried; {FOR_EVER}", max_retries_preemption=0))
    with pytest.raises(JobFailed, match="ended from outside once"):
        job.wait(30)


def test_evicted_pod_that_ends_well_on_sigterm_has_not_succeeded(
    client: KubernetesClient, server: KubernetesServer, tmp_path: Path
) -> None:
    script = f"trap 'exit 0' TERM; touch {tmp_path}/ready; {FOR_EVER}"
    job = client.submit(request(script, max_retries_preemption=0))
    eventually((tmp_path / "ready").exists)
    server.evict(running_pod(server, job))
    with pytest.raises(JobFailed, match="ended from outside once"):
        job.wait(30)


def test_job_with_a_deleted_manifest_is_tried_again(
    client: KubernetesClient, server: KubernetesServer, tmp_path: Path
) -> None:
    job = client.submit(request(f"if [ -e {tmp_path}/x ]; then exit 0; fi; touch {tmp_path}/x; {FOR_EVER}"))
    eventually((tmp_path / "x").exists)
    running_pod(server, job)
    cluster_of(server).delete("jobs", f"{job.job_id}-1")
    assert job.wait(30) is JobStatus.SUCCEEDED
    assert job.details().preemptions == 1


def test_gang_that_does_not_start_together_gives_its_places_back(
    hasty_client: KubernetesClient, server: KubernetesServer, tmp_path: Path
) -> None:
    server.pod_slots = len(server.running) + 1
    job = hasty_client.submit(request(f"echo $$ > {tmp_path}/pid; {FOR_EVER}", replicas=2, max_retries_preemption=0))
    pid = eventual_pid(tmp_path / "pid")
    with pytest.raises(JobFailed, match="only 1 of 2 pods could start"):
        job.wait(30)
    assert not is_alive(pid)
    assert not server.pods(job.job_id)


def test_image_that_cannot_be_pulled_is_named_at_once_and_fails_after_its_bound(
    hasty_client: KubernetesClient, server: KubernetesServer
) -> None:
    server.missing_images.add("registry.example/typo:1")
    job = hasty_client.submit(request("true", resources=ResourceConfig(image="registry.example/typo:1")))
    eventually(lambda: "registry.example/typo:1" in (job.details().reason or ""))
    assert job.wait(30, raise_on_failure=False) is JobStatus.FAILED
    assert job.details().failures == 1


def test_job_that_no_node_can_take_waits_with_the_words_of_the_scheduler(client: KubernetesClient) -> None:
    job = client.submit(request("true", resources=ResourceConfig(regions=("mars-north1",))))
    eventually(lambda: "0/2 nodes are available" in (job.details().reason or ""))
    assert job.status() is JobStatus.PENDING


def test_right_that_is_missing_is_named(client: KubernetesClient, server: KubernetesServer) -> None:
    server.refusals.append(Refusal("POST", "jobs", 403))
    with pytest.raises(BackendUnavailable, match="the verb 'create' on 'jobs' in the namespace default") as caught:
        client.submit(request("true"))
    assert "tester" in caught.value.found
    assert client.submit(request("true"), adopt_existing=True).wait(30) is JobStatus.SUCCEEDED


def test_cluster_that_is_busy_or_restarts_is_asked_again(client: KubernetesClient, server: KubernetesServer) -> None:
    server.refusals += [
        Refusal("POST", "jobs", 429, retry_after=1),
        Refusal("POST", "jobs", 409),  # as when many jobs share a quota
        Refusal("GET", "configmaps", 503, times=2),
        Refusal("PATCH", "jobs", 500),
        Refusal("GET", "pods", 503),
    ]
    job = client.submit(request("echo hello"))
    assert job.wait(30) is JobStatus.SUCCEEDED
    assert (job.logs(), job.details().attempts) == ("hello", 1)


def test_credentials_and_arguments_are_in_no_manifest_but_the_secret(
    client: KubernetesClient, server: KubernetesServer
) -> None:
    environment = create_environment(docker_image=IMAGE, env_vars={"HF_TOKEN": SECRET_WORD})
    job = client.submit(request(f"echo {SECRET_WORD} $HF_TOKEN", environment=environment))
    job.wait(30)
    assert job.logs() == f"{SECRET_WORD} {SECRET_WORD}"
    mine = [manifest for manifest in server.manifests if job.job_id in manifest["metadata"]["name"]]
    assert {manifest["kind"] for manifest in mine} == {"ConfigMap", "Job", "Pod", "Secret"}
    assert {manifest["kind"] for manifest in mine if SECRET_WORD in str(manifest)} == set()
    [secret] = [manifest for manifest in mine if manifest["kind"] == "Secret"]
    assert SECRET_WORD.encode() in base64.b64decode(secret["data"]["pod.json"])


def test_terminated_job_leaves_its_last_words_and_nothing_else(
    client: KubernetesClient, server: KubernetesServer
) -> None:
    job = client.submit(request(f"trap 'echo bye $ASSAY_REPLICA_INDEX; exit 0' TERM; echo hi; {FOR_EVER}", replicas=2))
    eventually(lambda: job.logs().count("hi") == 2)
    client.attach(job.job_id).terminate()
    logs = [job.logs(replica=index).splitlines() for index in range(2)]
    assert [(lines[0], lines[-1]) for lines in logs] == [("hi", "bye 0"), ("hi", "bye 1")]
    left = {kind for (kind, name), _ in server.objects.items() if job.job_id in name}
    assert left == {"configmaps"}


def test_slice_of_several_vms_is_a_single_replica_announced_by_its_first(
    client: KubernetesClient, server: KubernetesServer
) -> None:
    script = "echo $ASSAY_REPLICA_INDEX of $ASSAY_REPLICA_COUNT; printf $JOB_COMPLETION_INDEX > $ASSAY_ANNOUNCEMENT; "
    job = client.submit(request(script + FOR_EVER, resources=ResourceConfig.with_tpu("v6e-16")))
    eventually(lambda: job.announced() == "0")
    eventually(lambda: job.logs().count("0 of 1") == 4)
    assert "==> replica 0 worker 3 <==" in job.logs()
    assert "services" in {kind for (kind, name) in server.objects if job.job_id in name}


TWO_SLICES = ResourceConfig.with_tpu("v6e-16", slice_count=2)


def test_several_slices_are_replicas_with_separate_logs_results_and_announcements(
    client: KubernetesClient, server: KubernetesServer, tmp_path: Path
) -> None:
    def place(folder: Path) -> str:
        indices = [
            os.environ[f"ASSAY_{name}"] for name in ("REPLICA_INDEX", "REPLICA_COUNT", "HOST_INDEX", "HOST_COUNT")
        ]
        print("slice", *indices, os.environ["MEGASCALE_SLICE_ID"], "of", os.environ["MEGASCALE_NUM_SLICES"])
        announce("-".join(indices))
        while not (folder / "end").exists():
            time.sleep(0.02)
        return indices[0]

    job = client.submit(JobRequest("slices", Call(place, (tmp_path,)), resources=TWO_SLICES))
    eventually(lambda: [job.announced(index) for index in range(2)] == ["0-2-0-4", "1-2-0-4"])
    assert {kind for (kind, name) in server.objects if name.startswith(f"{job.job_id}-1")} >= {"jobsets", "services"}
    (tmp_path / "end").touch()
    assert job.wait(30) is JobStatus.SUCCEEDED
    assert [job.result(10, replica=index) for index in range(2)] == ["0", "1"]
    assert "==> replica 1 worker 3 <==\nslice 1 2 3 4 1 of 2" in job.logs()


@pytest.mark.parametrize(
    ("harm", "counted"), [("evict", "preemptions"), ("run_out_of_memory", "failures"), ("exit 3", "failures")]
)
def test_slice_that_is_lost_ends_all_and_counts_once_in_the_budget_of_its_kind(
    server: KubernetesServer, tmp_path: Path, harm: str, counted: str
) -> None:
    # `exit 3` ends all pods of a slice at once: JobSet then ends the other slice, which is not a preemption.
    script = (
        f"[ -e {tmp_path}/again ] && exit 0; touch {tmp_path}/$ASSAY_REPLICA_INDEX-$ASSAY_HOST_INDEX; "
        f"while :; do if [ $ASSAY_REPLICA_INDEX = 1 ] && [ -e {tmp_path}/exit ]; then exit 3; fi; sleep 0.1; done"
    )
    client = client_of(server, lease_seconds=60)  # the fake may take ten seconds to kill eight pods
    job = client.submit(request(script, resources=TWO_SLICES, max_retries_failure=1, max_retries_preemption=1))
    eventually(lambda: len(list(tmp_path.iterdir())) == 8)
    eventually(lambda: job.status() is JobStatus.RUNNING)
    (tmp_path / "again").touch()
    if harm == "exit 3":
        (tmp_path / "exit").touch()
    else:
        getattr(server, harm)(server.pods(job.job_id)[5])
    assert job.wait(60) is JobStatus.SUCCEEDED
    details = job.details()
    counts = {"attempts": details.attempts, "failures": details.failures, "preemptions": details.preemptions}
    assert counts == {"attempts": 2, "failures": 0, "preemptions": 0, counted: 1}
    client.shutdown()


def test_terminated_slices_leave_nothing_and_are_refused_where_there_is_no_jobset(
    client: KubernetesClient, server: KubernetesServer
) -> None:
    job = client.submit(request(FOR_EVER, resources=TWO_SLICES))
    eventually(lambda: job.status() is JobStatus.RUNNING)
    client.attach(job.job_id).terminate()
    assert {kind for (kind, name) in server.objects if job.job_id in name} == {"configmaps"}
    server.installed.discard("jobset.x-k8s.io")
    try:
        with pytest.raises(UnsatisfiableResources, match=r"have JobSet's controller installed"):
            client.submit(request("true", resources=TWO_SLICES))
        with pytest.raises(UnsatisfiableResources, match=r"2 slices of 4 VMs each"):
            client.check_resources(TWO_SLICES)
    finally:
        server.installed.add("jobset.x-k8s.io")


@pytest.mark.parametrize("resources", [ResourceConfig(), TWO_SLICES], ids=["job", "jobset"])
def test_job_in_a_queue_waits_until_kueue_admits_it_and_again_when_its_place_is_taken(
    server: KubernetesServer, tmp_path: Path, resources: ResourceConfig
) -> None:
    server.add_queue("team")
    client = client_of(server, queue="team")
    script = f"if [ -e {tmp_path}/taken ]; then exit 0; fi; touch {tmp_path}/started; {FOR_EVER}"
    try:
        job = client.submit(request(script, resources=resources))
        eventually(lambda: "Kueue has not admitted it yet" in (job.details().reason or ""))
        assert (job.status(), server.pods(job.job_id)) == (JobStatus.PENDING, [])
        server.admit(job.job_id)
        eventually(lambda: job.status() is JobStatus.RUNNING and (tmp_path / "started").exists())
        (tmp_path / "taken").touch()
        server.take_back(job.job_id)
        eventually(lambda: job.details().attempts == 2 and "Kueue" in (job.details().reason or ""))
        assert job.details().preemptions == 1
        eventually(lambda: "has not admitted it yet" in (job.details().reason or ""))
        server.admit(job.job_id)
        assert job.wait(30) is JobStatus.SUCCEEDED
    finally:
        client.shutdown()


def test_attempt_that_loses_its_place_in_the_queue_leaves_it_though_its_pods_have_ended(
    server: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add_queue("team")
    client = client_of(server, queue="team")

    def take_back(job_id: str) -> None:
        server.take_back(job_id)
        eventually(lambda: all(pod["status"]["phase"] == "Failed" for pod in server.pods(job_id)))

    def may_go(pod: dict[str, Any], objects: dict[tuple[str, str], dict[str, Any]]) -> bool:
        job = objects.get(("jobs", pod["metadata"]["ownerReferences"][0]["name"]))
        return job is None or "deletionTimestamp" in job["metadata"]

    before_a_job_is_read(monkeypatch, tmp_path / "started", take_back)
    monkeypatch.setattr("fakes.kubernetes_server.can_go", may_go)  # its pods stay in the list
    try:
        job = client.submit(request(f"[ -e {tmp_path}/started ] && exit 0; touch {tmp_path}/started; {FOR_EVER}"))
        eventually(lambda: "has not admitted it yet" in (job.details().reason or ""))
        server.admit(job.job_id)
        eventually(lambda: job.details().attempts == 2 and "not admitted it yet" in (job.details().reason or ""))
        assert [name for kind, name in server.objects if kind == "jobs" and job.job_id in name] == [f"{job.job_id}-2"]
        server.admit(job.job_id)
        assert job.wait(30) is JobStatus.SUCCEEDED
    finally:
        client.shutdown()


def test_missing_queue_is_refused_and_is_part_of_the_address(
    monkeypatch: pytest.MonkeyPatch, server: KubernetesServer
) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(server.kubeconfig))
    client = client_from_url("kubernetes://fake/default?queue=nobodys")
    assert client.url == "kubernetes:///default?queue=nobodys"
    with pytest.raises(BadInput, match="kubectl get localqueues"):
        client.check_resources(ResourceConfig())
    server.refusals.append(Refusal("GET", "localqueues", 403))
    client.check_resources(ResourceConfig())  # missing permission to read queues is no error
    with pytest.raises(BadInput, match="leave it out, or give one of queue a value"):
        client_from_url("kubernetes://fake/default?quue=team")


@pytest.mark.parametrize("pool", ["cloud.google.com/gke-nodepool", "karpenter.sh/nodepool"])
def test_device_that_no_node_has_is_refused_unless_node_pools_could_grow(server: KubernetesServer, pool: str) -> None:
    client = client_of(server)
    client.check_resources(ResourceConfig())
    with pytest.raises(UnsatisfiableResources, match=r"nvidia\.com/gpu"):
        client.check_resources(ResourceConfig.with_gpu("H100"))
    server.objects["nodes", "plain"]["metadata"]["labels"][pool] = "default"
    try:
        client.check_resources(ResourceConfig.with_gpu("H100"))
    finally:
        del server.objects["nodes", "plain"]["metadata"]["labels"][pool]
    server.refusals.append(Refusal("GET", "nodes", 403))
    client.check_resources(ResourceConfig.with_gpu("H100"))


PARENT = """
import sys, time
from pathlib import Path
from fakes.kubernetes_cluster import IMAGE
from fakes.polling import is_alive
from resources.backends.kubernetes.owner import OwnedJob
from resources.backends.kubernetes.client import KubernetesClient
from resources.backends.kubernetes.cluster import Cluster, Resource
from resources.backends.kubernetes.cluster import connect
from resources.config import ResourceConfig
from resources.jobs.jobs import Command, JobRequest, JobStatus

folder, mode = Path(sys.argv[1]), sys.argv[2]
client = KubernetesClient(connect("fake", ""), image=IMAGE, grace_seconds=1, lease_seconds=2, poll_seconds=0.1)
script = f"echo $$ > {folder}/pid; while :; do sleep 1; done"
job = client.submit(JobRequest("orphan", Command("sh", ("-c", script)), resources=ResourceConfig()))
(folder / "job").write_text(job.job_id)
while not (folder / "pid").exists():
    time.sleep(0.02)
if mode == "hang":
    time.sleep(600)
begin = OwnedJob.begin_to_end


def begin_while_its_thread_looks(job):
    begin(job)
    while job.step().status is JobStatus.RUNNING and is_alive(int((folder / "pid").read_text())):
        time.sleep(0.02)
    job.step()


if mode == "leave while its thread looks":
    OwnedJob.begin_to_end = begin_while_its_thread_looks
"""


def test_shutdown_that_may_delete_nothing_says_so_and_the_pods_end_themselves(
    server: KubernetesServer, tmp_path: Path
) -> None:
    client = client_of(server, lease_seconds=1)
    for name in ("first", "second"):
        client.submit(request(f"echo $$ > {tmp_path}/{name}; {FOR_EVER}", name))
    pids = [eventual_pid(tmp_path / name) for name in ("first", "second")]
    server.refusals.append(Refusal("DELETE", "jobs", 403, times=1000))
    try:
        with pytest.raises(BackendUnavailable, match="the verb 'delete' on 'jobs'"):
            client.shutdown()
        eventually(lambda: not any(map(is_alive, pids)))
    finally:
        server.refusals.clear()


@pytest.mark.parametrize("mode", ["hang", "leave", "leave while its thread looks"])
def test_pods_end_with_the_process_that_submitted_them_however_it_ends(
    client: KubernetesClient, server: KubernetesServer, tmp_path: Path, mode: str
) -> None:
    variables = {**os.environ, "KUBECONFIG": str(server.kubeconfig), "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), mode], env=variables)
    try:
        pid = eventual_pid(tmp_path / "pid")
        if mode == "hang":
            parent.send_signal(signal.SIGKILL)
        parent.wait(30)
        eventually(lambda: not is_alive(pid))
        job = client.attach((tmp_path / "job").read_text())
        eventually(lambda: job.status() is JobStatus.STOPPED)
        assert job.details().reason == "the process that submitted it has ended"
        assert job.details().preemptions == 0
        assert job.job_id in {details.job_id for details in client.jobs() if details.status.finished}
    finally:
        parent.kill()
        parent.wait()


def test_keeper_pod_that_is_evicted_goes_on_in_its_next_pod_with_the_counts_it_had(
    client: KubernetesClient, server: KubernetesServer, tmp_path: Path
) -> None:
    def third_time(folder: Path) -> str:
        number = len(list(folder.iterdir()))
        (folder / str(number)).touch()
        if number == 0:
            raise OSError("once")
        while number == 1:
            time.sleep(1)
        return "the third time"

    call = Call(third_time, (tmp_path,))
    job = client.submit(
        JobRequest("job", call, resources=ResourceConfig(), outlives_parent=True, max_retries_failure=2)
    )
    eventually(lambda: job.details().attempts == 2 and job.status() is JobStatus.RUNNING)
    [keeper_pod] = [pod for pod in server.pods(job.job_id) if pod["metadata"]["labels"]["assay-evals/part"] == "keeper"]
    server.evict(keeper_pod)
    [pod] = [pod for pod in server.pods(job.job_id) if pod["metadata"]["labels"].get("assay-evals/attempt") == "2"]
    server.run_out_of_memory(pod)
    assert job.result(40) == "the third time"
    assert (job.details().attempts, job.details().failures) == (3, 2)


def test_keeper_pod_with_an_image_without_our_code_fails_its_job(server: KubernetesServer, tmp_path: Path) -> None:
    client = client_of(server, lease_seconds=0.2)
    environment = create_environment(docker_image=IMAGE, python=tmp_path / "python3")
    job = client.submit(request("true", outlives_parent=True, environment=environment))
    with pytest.raises(JobFailed, match="its keeper pod failed, which needs an image with Assay"):
        job.wait(40)
    job.terminate()
    assert job.status() is JobStatus.STOPPED


def test_job_with_a_keeper_pod_that_never_starts_is_terminated(server: KubernetesServer) -> None:
    client = client_of(server, lease_seconds=300)
    server.missing_images.add("registry.example/typo:1")
    try:
        image = ResourceConfig(image="registry.example/typo:1")
        job = client.submit(request("true", resources=image, outlives_parent=True))
        eventually(lambda: server.pods(job.job_id))
        client.attach(job.job_id).terminate()
    finally:
        server.missing_images.clear()
    assert job.status() is JobStatus.STOPPED
    assert not server.pods(job.job_id)


def test_context_that_the_kubeconfig_lacks_is_named(monkeypatch: pytest.MonkeyPatch, server: KubernetesServer) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(server.kubeconfig))
    with pytest.raises(BackendUnavailable, match="no-such-context"):
        client_from_url("kubernetes://no-such-context/ml")
    assert client_from_url("kubernetes://fake/ml").url == "kubernetes:///ml"


def test_logs_of_long_lines_are_cut_at_their_beginning(client: KubernetesClient) -> None:
    script = "line=$(head -c 8000 /dev/zero | tr '\\0' x); for i in $(seq 400); do echo $i $line; done; echo last"
    job = client.submit(request(script))
    job.wait(30)
    logs = job.logs(1000)
    assert logs.endswith("\nlast")
    assert 400_000 < len(logs) <= 2**20
