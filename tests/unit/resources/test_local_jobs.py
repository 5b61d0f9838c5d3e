"""Details of local jobs: their supervisor, their folder, their parent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import resources
from fakes.polling import eventual_pid, eventually, is_alive
from fakes.processes import WITHOUT_MAIN_THREAD
from faults.scenarios.processes import command_line, state_of
from resources.backends.local.client import LocalClient, LocalJob
from resources.backends.processes import device_variables
from resources.config import CpuConfig, Device, GpuConfig, ResourceConfig, TpuConfig
from resources.errors import BadInput, UnsatisfiableResources
from resources.jobs import inheritance
from resources.jobs.jobs import (
    Call,
    Command,
    Entrypoint,
    EnvironmentConfig,
    JobRequest,
    JobStatus,
    create_environment,
    wait_all,
)
from resources.settings import settings

pytestmark = pytest.mark.timeout(60)

ON_CPU = ResourceConfig.with_cpu()
FOR_EVER = "while :; do sleep 1; done"
PACKAGES = Path(resources.__file__).parent


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LocalClient]:
    client = LocalClient(tmp_path / "jobs", grace_seconds=0.5)
    yield client
    client.shutdown()


def job_request(entrypoint: Command | Call | str, name: str = "job", **options: Any) -> JobRequest:
    """Returns a request for a job on CPUs; a text is a script of the shell."""
    command = Command("sh", ("-c", entrypoint)) if isinstance(entrypoint, str) else entrypoint
    return JobRequest(name, command, **{"resources": ON_CPU, **options})


def parent_that_submits(jobs_dir: Path, script: str, *, outlives_parent: bool) -> subprocess.Popen[str]:
    """Starts a process that submits a job, prints its id, forks a child that keeps all descriptors open, and waits."""
    program = f"""
        import os, sys, time
        from pathlib import Path
        from resources.backends.local.client import LocalClient
        from resources.config import ResourceConfig
        from resources.jobs.jobs import Entrypoint, JobRequest
        client = LocalClient(Path({str(jobs_dir)!r}), grace_seconds=0.5)
        entrypoint = Entrypoint.from_binary("sh", ["-c", {script!r}])
        job = JobRequest("job", entrypoint, resources=ResourceConfig(), outlives_parent={outlives_parent})
        print(client.submit(job).job_id, flush=True)
        if os.fork() == 0:
            os.setsid()
            print(os.getpid(), flush=True)
        time.sleep(60)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=PACKAGES.parent, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    "options",
    [
        *({"name": name} for name in ("two words", "a/b", "..", "", "-flag", "x" * 101, "new\nline")),
        *({"replicas": 0}, {"max_retries_failure": -1}, {"max_retries_preemption": -1}),
    ],
)
def test_request_with_a_bad_name_or_count_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="job name" if "name" in options else "retries of at least 0"):
        job_request("true", **options)


def test_environment_wants_a_workspace_or_an_image_and_not_both(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="neither"):
        EnvironmentConfig()
    with pytest.raises(BadInput, match="both"):
        EnvironmentConfig(workspace=tmp_path, docker_image="image")
    with pytest.raises(BadInput, match="numpy"):
        EnvironmentConfig(workspace=tmp_path, python=Path(sys.executable), pip_packages=("numpy",))


def test_create_environment_passes_credentials_on_and_the_caller_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hub-secret")
    monkeypatch.setenv("WANDB_API_KEY", "wandb-secret")
    environment = create_environment(env_vars={"WANDB_API_KEY": None, "TOKENIZERS_PARALLELISM": "true"})
    assert environment.env_vars == {"HF_TOKEN": "hub-secret", "TOKENIZERS_PARALLELISM": "true"}
    assert environment.workspace == Path.cwd()
    assert "hub-secret" not in repr(environment)
    assert create_environment(docker_image="image").workspace is None


@pytest.mark.parametrize("outlives_parent", [False, True])
def test_job_of_a_killed_parent_ends_or_outlives_it(tmp_path: Path, outlives_parent: bool) -> None:
    script = f"echo alive; trap '' TERM; echo $$ > {tmp_path}/pid; {FOR_EVER}"
    with parent_that_submits(tmp_path / "jobs", script, outlives_parent=outlives_parent) as parent:
        assert parent.stdout is not None
        job_id, forked_pid = parent.stdout.readline().strip(), int(parent.stdout.readline())
        pid = eventual_pid(tmp_path / "pid")
        parent.kill()
        parent.wait()
        job = LocalClient(tmp_path / "jobs").attach(job_id)
        if not outlives_parent:
            job.wait(20, raise_on_failure=False)
            assert "submitted it has ended" in (job.details().reason or "")
        os.kill(forked_pid, signal.SIGKILL)
    if outlives_parent:
        assert (job.status(), job.logs()) == (JobStatus.RUNNING, "alive")
        job.terminate()
    assert job.status() is JobStatus.STOPPED
    assert not is_alive(pid)


def test_job_outlives_the_shutdown_of_its_client_on_request(client: LocalClient) -> None:
    job = client.submit(job_request(FOR_EVER, outlives_parent=True))
    client.shutdown()
    assert job.status() is JobStatus.RUNNING
    job.terminate()


def test_supervisor_ignores_signals_that_its_replicas_do_not_inherit(client: LocalClient, tmp_path: Path) -> None:
    program = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)"
    waits = f"until [ -e {tmp_path}/go ]; do sleep 0.02; done; [ -e {tmp_path}/again ] || {{ touch {tmp_path}/again; "
    job = client.submit(job_request(f"python -c '{program}'; {waits} kill -KILL $$; }}"))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGINT):
        os.kill(job.process_details()["supervisor_pid"], number)
    assert job.status() is JobStatus.RUNNING
    (tmp_path / "go").touch()
    assert job.wait(30) is JobStatus.SUCCEEDED
    assert job.logs() == "True\n--- attempt 2 ---\nTrue"
    assert [replica["exit_code"] for replica in job.process_details()["replicas"]] == [0]


def test_killed_supervisor_is_reported_and_leaves_nothing_behind(client: LocalClient, tmp_path: Path) -> None:
    script = f"(setsid sh -c 'echo $$ > {tmp_path}/daemon; {FOR_EVER}' &); echo $$ > {tmp_path}/main; {FOR_EVER}"
    job = client.submit(job_request(script))
    pids = [eventual_pid(tmp_path / name) for name in ("main", "daemon")]
    os.kill(job.process_details()["supervisor_pid"], signal.SIGKILL)
    assert job.wait(20, raise_on_failure=False) is JobStatus.FAILED
    assert "supervisor was killed" in (job.details().reason or "")
    assert job.details().preemptions == 1
    eventually(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere such a process is no zombie")
def test_process_with_an_ended_main_thread_ends_with_its_job(client: LocalClient, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WITHOUT_MAIN_THREAD)
    program = f"{sys.executable} {tmp_path}/program.py {tmp_path}"
    job = client.submit(job_request(f"setsid {program}/daemon & exec {program}/main"))
    pids = [eventual_pid(tmp_path / name) for name in ("main", "daemon")]
    eventually(lambda: [state_of(pid) for pid in pids] == ["Z", "Z"])
    job.terminate()
    assert job.process_details()["replicas"][0]["exit_code"] == -signal.SIGTERM
    assert not [pid for pid in pids if is_alive(pid)]


def test_terminate_while_waiting_for_the_next_attempt_stops_the_job(client: LocalClient) -> None:
    job = client.submit(job_request("exit 1", max_retries_failure=1000))
    eventually(lambda: job.details().failures >= 3)
    job.terminate()
    assert job.status() is JobStatus.STOPPED


def test_terminate_returns_once_the_supervisor_that_told_the_end_is_gone_too(
    client: LocalClient, tmp_path: Path
) -> None:
    job = client.submit(job_request("true"))
    job.wait(30)
    folder = tmp_path / "jobs" / job.job_id
    ending = f"import time; time.sleep(0.5); open('{tmp_path}/gone', 'w')"
    slow = subprocess.Popen([sys.executable, "-c", ending, str(folder)])
    eventually(lambda: str(folder) in command_line(slow.pid))
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "supervisor_pid": slow.pid}))
    LocalJob(folder).terminate()
    assert (tmp_path / "gone").exists()
    slow.wait(30)


def test_variables_of_a_job_are_not_written_to_its_folder(client: LocalClient, tmp_path: Path) -> None:
    environment = create_environment(env_vars={"HF_TOKEN": "a-secret-token"})
    job = client.submit(job_request("test ${#HF_TOKEN} = 14", environment=environment))
    job.wait(30)
    written = b"".join(path.read_bytes() for path in (tmp_path / "jobs" / job.job_id).iterdir())
    assert b"a-secret-token" not in written
    assert (tmp_path / "jobs" / job.job_id).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("kind", ["ENGINE", "HARNESS", "NATIVE_HARNESS", "SERVICE", "SENDER"])
def test_job_of_a_kind_inherits_what_its_kind_may_and_what_the_user_names(
    kind: str, tmp_path: Path, client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"WANDB_API_KEY", "PREFECT_API_KEY", "OPENAI_API_KEY", "ASSAY_ACTOR_KEY", "ASSAY_POOL_ADMIN_KEY"}
    secrets |= {"VLLM_ATTENTION_BACKEND", "VLLM_MODEL_REDIRECT_PATH", "VLLM_API_KEY"}
    some_kinds = {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "VLLM_CPU_KVCACHE_SPACE", "RAY_ADDRESS"}
    named = {"MY_MIRROR", "CORP_REGION", "ASSAY_INHERIT"}
    for name in secrets | some_kinds | named:
        monkeypatch.setenv(name, "something")
    monkeypatch.setenv("ASSAY_INHERIT", "MY_MIRROR, CORP_*")
    settings.cache_clear()
    environment = create_environment(workspace=tmp_path, inherited=getattr(inheritance, kind))
    request = job_request("env -0 > found", environment=environment)
    client.submit(request).wait(30)
    settings.cache_clear()
    inherited = {line.partition("=")[0] for line in (tmp_path / "found").read_text().split("\0")}
    given = {
        "ENGINE": {"VLLM_CPU_KVCACHE_SPACE"},
        "HARNESS": {"HF_TOKEN"},
        "NATIVE_HARNESS": {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY"},
        "SERVICE": some_kinds,
        "SENDER": {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY"},
    }[kind]
    assert named | {"PATH", "HOME"} <= inherited
    assert inherited & some_kinds == given
    assert not inherited & secrets


def test_devices_of_this_machine_bound_the_resources_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "dev" / "vfio").mkdir(parents=True)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "vfio/0", "vfio/1", "vfio/2", "vfio/3", "vfio/vfio"):
        (tmp_path / "dev" / name).touch()
    client = LocalClient(tmp_path / "jobs", device_root=tmp_path)
    for enough in (ResourceConfig.with_gpu("H100", count=2), ResourceConfig.with_tpu("v6e-4")):
        client.check_resources(enough)
    with pytest.raises(UnsatisfiableResources, match="2 on this machine"):
        client.submit(job_request("true", resources=ResourceConfig.with_gpu("H100", count=3)))
    for variant in ("v6e-8", "v6e-16"):
        with pytest.raises(UnsatisfiableResources, match="4 TPU chips on this machine"):
            client.check_resources(ResourceConfig.with_tpu(variant))
    with pytest.raises(UnsatisfiableResources, match="pip_packages"):
        client.submit(job_request("true", environment=create_environment(docker_image="image")))


def test_folders_and_interpreters_that_do_not_exist_are_refused(client: LocalClient, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    for options in (
        {"working_directory": nowhere},
        {"environment": create_environment(workspace=nowhere)},
        {"environment": create_environment(python=nowhere)},
        {"environment": create_environment(workspace=tmp_path, extras=["gpu"])},
    ):
        with pytest.raises(BadInput):
            client.submit(job_request("true", **options))  # pyright: ignore[reportArgumentType]


def test_interpreter_without_cloudpickle_says_what_it_lacks(client: LocalClient, tmp_path: Path) -> None:
    def by_value() -> None: ...

    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S "$@"\n')
    python.chmod(0o755)
    environment = create_environment(python=python)
    job = client.submit(job_request(Entrypoint.from_callable(by_value), environment=environment))
    assert job.wait(30, raise_on_failure=False) is JobStatus.FAILED
    assert "lacks cloudpickle" in job.logs()


def test_client_after_many_jobs_holds_nothing_of_ended_jobs(client: LocalClient) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    running = [client.submit(job_request("true", f"job-{number}")) for number in range(5)]
    assert wait_all(running, 30) == [JobStatus.SUCCEEDED] * 5
    assert descriptors() == before


@pytest.mark.parametrize(
    ("device", "variables"),
    [
        (CpuConfig(), {"JAX_PLATFORMS": "cpu"}),
        (GpuConfig(), {"JAX_PLATFORMS": "cuda,cpu"}),
        (TpuConfig(variant="v4-8"), {"JAX_PLATFORMS": "tpu,cpu"}),
        (
            TpuConfig(variant="v6e-8"),
            {"JAX_PLATFORMS": "tpu,cpu", "LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=98304"},
        ),
        (TpuConfig(variant="v6e-8", alternatives=("v5e-8",)), {"JAX_PLATFORMS": "tpu,cpu"}),
    ],
)
def test_programs_compute_on_the_device_of_their_job_or_not_at_all(device: Device, variables: dict[str, str]) -> None:
    assert device_variables(device) == variables


def test_variables_of_a_job_win_over_those_of_its_device(client: LocalClient) -> None:
    environment = create_environment(env_vars={"JAX_PLATFORMS": "cpu,own"})
    job = client.submit(job_request("echo $JAX_PLATFORMS", environment=environment))
    assert job.wait(30) is JobStatus.SUCCEEDED
    assert job.logs() == "cpu,own"


def test_job_that_another_process_is_just_submitting_can_be_terminated(client: LocalClient, tmp_path: Path) -> None:
    submitted: list[LocalJob] = []
    request = job_request(f"echo $$ > {tmp_path}/pid; {FOR_EVER}")
    thread = threading.Thread(target=lambda: submitted.append(client.submit(request)))
    thread.start()
    (job_id,) = eventually(lambda: [details.job_id for details in client.jobs()])
    client.attach(job_id).terminate()
    thread.join(30)
    assert submitted[0].status() is JobStatus.STOPPED
    assert not (tmp_path / "pid").exists() or not is_alive(eventual_pid(tmp_path / "pid"))


def test_folder_of_another_submitter_that_died_is_reported_and_a_foreign_folder_left_out(
    client: LocalClient, tmp_path: Path
) -> None:
    job = client.submit(job_request("true"))
    job.wait(30)
    pending = {"status": "pending", "supervisor_pid": None}
    changes = {"specification.json": {"submitted_at": 0.0}, "status.json": pending}
    for name, changed in changes.items():
        file = tmp_path / "jobs" / job.job_id / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
        (foreign := tmp_path / "jobs" / "of-an-earlier-version").mkdir(exist_ok=True)
        (foreign / name).write_text("{}")
    [details] = client.jobs()
    assert (details.job_id, details.status) == (job.job_id, JobStatus.FAILED)
    assert details.reason == "its supervisor never started"


def test_folders_of_the_oldest_finished_jobs_are_removed(tmp_path: Path) -> None:
    for number in range(205):
        folder = tmp_path / f"old-{number:03}"
        folder.mkdir()
        (folder / "specification.json").write_text("{}")
        (folder / "status.json").write_text(json.dumps({"status": "succeeded"}))
        os.utime(folder / "status.json", (number, number))
    client = LocalClient(tmp_path)
    client.submit(job_request("true", "new")).wait(30)
    left = sorted(folder.name for folder in tmp_path.iterdir())
    assert len(left) == 201
    assert left[:2] == [left[0], "old-005"] and left[0].startswith("new-")


def test_shutdown_after_the_jobs_folder_was_removed_ends_the_processes(client: LocalClient, tmp_path: Path) -> None:
    job = client.submit(job_request(f"echo $$ > {tmp_path}/pid; {FOR_EVER}"))
    pid = eventual_pid(tmp_path / "pid")
    eventually(lambda: job.status() is JobStatus.RUNNING)
    shutil.rmtree(tmp_path / "jobs")
    client.shutdown()
    eventually(lambda: not is_alive(pid))  # killed; its parent may still have to reap it
    assert job.details().status is JobStatus.FAILED and "was removed" in (job.details().reason or "")
