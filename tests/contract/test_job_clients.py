"""Behaviour of every job client, for all backends. To add a backend, add an entry in `fakes.clients.CLIENTS`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.clients import CLIENTS, kill_for_want_of_memory
from fakes.polling import eventual_pid, eventually, is_alive
from resources.actors.actors import actor_variables
from resources.backends.current import current_client, set_current_client
from resources.config import ResourceConfig
from resources.errors import BadInput, JobFailed, JobTimeout, UnsatisfiableResources
from resources.jobs.announcements import announce
from resources.jobs.jobs import (
    Call,
    Client,
    Command,
    Entrypoint,
    JobAlreadyExists,
    JobRequest,
    JobStatus,
    create_environment,
    wait_all,
)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("small_workspace")]

ON_CPU = ResourceConfig.with_cpu()
FOR_EVER = "while :; do sleep 1; done"


@pytest.fixture(scope="module", params=sorted(CLIENTS))
def backend(request: pytest.FixtureRequest) -> str:
    """Groups the tests by backend, so that only one of them runs at a time."""
    return request.param


@pytest.fixture
def client(backend: str, tmp_path: Path) -> Iterator[Client]:
    client = CLIENTS[backend](tmp_path)
    yield client
    client.shutdown()


def shell(script: str) -> Command:
    return Entrypoint.from_binary("sh", ["-c", script])


def job(entrypoint: Command | Call, name: str = "job", **options: Any) -> JobRequest:
    return JobRequest(name, entrypoint, **{"resources": ON_CPU, **options})


def test_command_gets_its_variables_and_working_directory_and_keeps_its_output(client: Client, tmp_path: Path) -> None:
    actor_variables()  # creates the key of actors, which other jobs must not get
    (tmp_path / "elsewhere").mkdir()
    environment = create_environment(workspace=tmp_path, env_vars={"GREETING": "hello"})
    request = job(
        shell(
            'echo "$GREETING $(basename "$PWD")"; echo err >&2; printf "caf\\303\\251 \\377\\n"; '
            'echo "host $ASSAY_HOST_INDEX of $ASSAY_HOST_COUNT, JAX on $JAX_PLATFORMS"; env | sed "s/=.*//"'
        ),
        environment=environment,
        working_directory=tmp_path / "elsewhere",
    )
    handle = client.submit(request)
    assert handle.wait(30) is JobStatus.SUCCEEDED
    lines = handle.logs().splitlines()
    assert {"hello elsewhere", "err", "café \ufffd", "host 0 of 1, JAX on cpu", "ASSAY_JOBS"} <= set(lines)
    assert "ASSAY_ACTOR_KEY" not in lines


def test_callable_that_raises_fails_with_its_traceback_in_the_error(client: Client) -> None:
    def divide() -> None:
        raise ArithmeticError("cannot divide the indivisible")

    handle = client.submit(job(Entrypoint.from_callable(divide)))
    with pytest.raises(JobFailed, match="cannot divide the indivisible") as failed:
        handle.wait(30)
    assert isinstance(failed.value.__cause__, ArithmeticError)
    with pytest.raises(ArithmeticError, match="cannot divide the indivisible") as caught:
        client.attach(handle.job_id).result(0)
    assert "in divide" in str(caught.value.__cause__)
    assert handle.wait(30, raise_on_failure=False) is JobStatus.FAILED


def test_result_is_what_each_replica_returned_in_the_last_attempt_for_every_handle(
    client: Client, tmp_path: Path
) -> None:
    def again(folder: Path, *, size: int) -> object:
        replica = int(os.environ["ASSAY_REPLICA_INDEX"])
        announce("here")
        print("said by", replica)
        if (folder / "second").exists():
            return {"replica": replica, "large": b"x" * size, "pid": os.getpid()}
        if replica == 0:
            return "of the first attempt"
        (folder / "second").touch()
        raise OSError("once")

    call = Entrypoint.from_callable(again, [tmp_path], {"size": 500_000})
    handle = client.submit(job(call, replicas=2, max_retries_failure=1))
    first, second = handle.result(45), client.attach(handle.job_id).result(replica=1)
    assert [(result["replica"], len(result["large"])) for result in (first, second)] == [(0, 500_000), (1, 500_000)]
    assert len({first["pid"], second["pid"], os.getpid()}) == 3
    assert handle.logs(1, replica=1) == "said by 1"
    with pytest.raises(BadInput, match="from 0 to 1"):
        handle.result(replica=2)


def test_result_that_cannot_be_sent_fails_no_job_and_is_an_error_that_names_it(client: Client) -> None:
    def unsendable() -> object:
        return b"x" * 600_000 if os.environ["ASSAY_REPLICA_INDEX"] == "0" else threading.Lock()

    handle = client.submit(job(Entrypoint.from_callable(unsendable), replicas=2))
    assert handle.wait(30) is JobStatus.SUCCEEDED
    with pytest.raises(BadInput, match=f"(?s){handle.job_id} .*512 KiB.*600,"):
        handle.result()
    with pytest.raises(BadInput, match=f"(?s){handle.job_id} .*type lock"):
        handle.result(replica=1)


def test_callable_that_cannot_be_pickled_is_refused_before_anything_runs(client: Client) -> None:
    lock = threading.Lock()
    with pytest.raises(BadInput, match="inside the callable"):
        client.submit(job(Entrypoint.from_callable(lambda: lock.acquire())))


def test_command_is_found_in_the_environment_given_by_its_interpreter(client: Client) -> None:
    environment = create_environment(python=Path(sys.executable))
    handle = client.submit(
        job(Entrypoint.from_binary("python", ["-c", "import sys; print(sys.prefix)"]), environment=environment)
    )
    handle.wait(30)
    assert handle.logs() == sys.prefix


def test_command_that_does_not_exist_fails_and_says_so(client: Client) -> None:
    with pytest.raises(JobFailed, match="no-such-program"):
        client.submit(job(Entrypoint.from_binary("no-such-program"))).wait(30)


def test_wait_for_a_running_job_times_out_and_attached_clients_control_it(client: Client) -> None:
    handle = client.submit(job(shell(f"seq 1 5000; {FOR_EVER}")))
    with pytest.raises(JobTimeout):
        handle.wait(0.1)
    eventually(lambda: handle.status() is JobStatus.RUNNING)
    attached = client.attach(handle.job_id)
    eventually(lambda: attached.logs(1) == "5000")
    assert handle.logs(3) == "4998\n4999\n5000"
    assert len(handle.logs().splitlines()) <= 200
    assert attached.details().name == "job"
    with pytest.raises(BadInput, match="runs a command"):
        attached.result()
    attached.terminate()
    assert handle.status() is JobStatus.STOPPED
    assert client.attach(handle.job_id).status() is JobStatus.STOPPED


def test_terminate_lets_a_process_clean_up_and_ends_the_whole_tree_however_it_hides(
    client: Client, tmp_path: Path
) -> None:
    polite = f"trap 'echo bye; exit 0' TERM; echo $$ > {tmp_path}/main; {FOR_EVER}"
    stubborn = f'trap "" TERM; echo $$ > {tmp_path}/stubborn; {FOR_EVER}'
    daemon = f'trap "" TERM; echo $$ > {tmp_path}/daemon; {FOR_EVER}'
    handle = client.submit(job(shell(f"sh -c '{stubborn}' & (setsid sh -c '{daemon}' &) ; {polite}")))
    pids = [eventual_pid(tmp_path / name) for name in ("main", "stubborn", "daemon")]
    handle.terminate()
    assert handle.status() is JobStatus.STOPPED
    assert [is_alive(pid) for pid in pids] == [False, False, False]
    with pytest.raises(JobFailed, match="stopped"):
        handle.wait(1)
    handle.terminate()
    assert "bye" in handle.logs().splitlines()  # a shell may add that its children were killed
    assert handle.status() is JobStatus.STOPPED


def test_finished_job_leaves_no_daemon_behind(client: Client, tmp_path: Path) -> None:
    handle = client.submit(
        job(
            shell(
                f"(setsid sh -c 'echo $$ > {tmp_path}/daemon; {FOR_EVER}' &); "
                f"until [ -s {tmp_path}/daemon ]; do sleep 0.02; done"
            )
        )
    )
    assert handle.wait(30) is JobStatus.SUCCEEDED
    assert not is_alive(eventual_pid(tmp_path / "daemon"))


def test_failed_attempts_are_retried_within_their_budget(client: Client, tmp_path: Path) -> None:
    script = f"echo x >> {tmp_path}/attempts; [ $(wc -l < {tmp_path}/attempts) -ge 3 ]"
    handle = client.submit(job(shell(script), max_retries_failure=2))
    assert handle.wait(30) is JobStatus.SUCCEEDED
    assert (tmp_path / "attempts").read_text() == "x\n" * 3


def test_preempted_attempts_have_a_budget_of_their_own(client: Client, tmp_path: Path) -> None:
    once = f"[ -e {tmp_path}/once ] || {{ touch {tmp_path}/once; kill -KILL $$; }}"
    handle = client.submit(job(shell(once), max_retries_failure=0))
    assert handle.wait(30) is JobStatus.SUCCEEDED
    assert (handle.details().attempts, handle.details().preemptions) == (2, 1)

    script = f"if [ -e {tmp_path}/first ]; then own=second; else own=first; fi; echo $$ > {tmp_path}/$own; {FOR_EVER}"
    handle = client.submit(job(shell(script), max_retries_failure=0, max_retries_preemption=1))
    os.kill(eventual_pid(tmp_path / "first"), signal.SIGKILL)
    os.kill(eventual_pid(tmp_path / "second"), signal.SIGTERM)
    assert handle.wait(30, raise_on_failure=False) is JobStatus.FAILED


def test_crash_by_a_signal_of_its_own_doing_counts_as_a_failure(client: Client) -> None:
    handle = client.submit(job(shell("kill -SEGV $$"), max_retries_failure=0, max_retries_preemption=5))
    assert handle.wait(30, raise_on_failure=False) is JobStatus.FAILED
    assert handle.details().attempts == 1


def test_job_killed_for_want_of_memory_fails_and_says_what_to_do(client: Client, tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 4\n")
    environment = create_environment(env_vars={"ASSAY_OOM_COUNTER": str(counter)})
    script = f"echo $$ > {tmp_path}/pid; {FOR_EVER}"
    handle = client.submit(job(shell(script), environment=environment, max_retries_preemption=5))
    kill_for_want_of_memory(client, handle, pid=eventual_pid(tmp_path / "pid"), counter=counter)
    assert handle.wait(30, raise_on_failure=False) is JobStatus.FAILED
    details = handle.details()
    assert (details.attempts, details.failures, details.preemptions) == (1, 1, 0)
    assert "out of memory" in (details.reason or "")
    assert "resources.ram" in (details.reason or "")


def test_replica_that_fails_takes_the_others_with_it_and_counts_once(client: Client, tmp_path: Path) -> None:
    script = (
        f"echo $$ > {tmp_path}/pid-$ASSAY_REPLICA_INDEX; [ $ASSAY_REPLICA_INDEX = 0 ] || {{ {FOR_EVER}; }}; "
        f"until [ -s {tmp_path}/pid-1 ]; do sleep 0.02; done; echo x >> {tmp_path}/attempts; exit 3"
    )
    handle = client.submit(job(shell(script), replicas=2, max_retries_failure=1, max_retries_preemption=0))
    assert handle.wait(30, raise_on_failure=False) is JobStatus.FAILED
    assert (tmp_path / "attempts").read_text() == "x\n" * 2
    assert not is_alive(eventual_pid(tmp_path / "pid-1"))


def test_wait_all_fails_with_the_first_job_or_times_out_or_returns_statuses_in_the_order_given(client: Client) -> None:
    endless = client.submit(job(shell(FOR_EVER), "endless"))
    good, bad = client.submit(job(shell("true"), "good")), client.submit(job(shell("exit 1"), "bad"))
    with pytest.raises(JobFailed, match="bad"):
        wait_all([endless, bad], 30)
    assert wait_all([bad, good], 30, raise_on_failure=False) == [JobStatus.FAILED, JobStatus.SUCCEEDED]
    with pytest.raises(JobTimeout, match="endless"):
        wait_all([good, endless], 0.1)
    eventually(lambda: endless.status() is JobStatus.RUNNING)


def test_name_of_a_running_job_is_refused_or_adopted_and_free_again_afterwards(client: Client) -> None:
    first = client.submit(job(shell(FOR_EVER)))
    with pytest.raises(JobAlreadyExists) as taken:
        client.submit(job(shell("true")))
    assert taken.value.job is not None and taken.value.job.job_id == first.job_id
    assert client.submit(job(shell("true")), adopt_existing=True).job_id == first.job_id
    first.terminate()
    second = client.submit(job(shell(FOR_EVER)), adopt_existing=True)
    assert second.job_id != first.job_id
    listed = [details for details in client.jobs() if details.job_id in {first.job_id, second.job_id}]
    assert [(details.job_id, details.name) for details in listed] == [(second.job_id, "job"), (first.job_id, "job")]
    assert [details.status.finished for details in listed] == [False, True]  # the newest first


def test_resources_that_no_machine_here_has_are_refused_at_submission(client: Client) -> None:
    with pytest.raises(UnsatisfiableResources, match="v5litepod-8"):
        client.check_resources(ResourceConfig.with_tpu("v5litepod-8"))
    client.check_resources(ResourceConfig())
    with pytest.raises(UnsatisfiableResources, match="v5litepod-8"):
        client.submit(job(shell("true"), resources=ResourceConfig.with_tpu("v5litepod-8")))


def test_shutdown_ends_running_jobs(client: Client, tmp_path: Path) -> None:
    handle = client.submit(job(shell(f"echo $$ > {tmp_path}/pid; {FOR_EVER}")))
    pid = eventual_pid(tmp_path / "pid")
    client.shutdown()
    assert handle.status() is JobStatus.STOPPED
    assert not is_alive(pid)


def test_current_client_is_the_client_set_for_the_context(client: Client) -> None:
    default = current_client()
    with set_current_client(client):
        assert current_client() is client
    assert current_client() is default


def test_details_count_attempts_failures_and_preemptions_apart_and_say_why_it_ended(
    client: Client, tmp_path: Path
) -> None:
    script = f"echo x >> {tmp_path}/tries; case $(wc -l < {tmp_path}/tries) in 1) kill -KILL $$;; *) exit 5;; esac"
    before = time.time()
    handle = client.submit(job(shell(script), max_retries_failure=1))
    handle.wait(30, raise_on_failure=False)
    details = handle.details()
    assert (details.job_id, details.name, details.status) == (handle.job_id, "job", JobStatus.FAILED)
    assert (details.attempts, details.failures, details.preemptions) == (3, 2, 1)
    assert details.reason
    assert before - 2 <= (details.submitted_at or 0) <= time.time() + 2


@pytest.mark.parametrize("job_id", ["unknown-1", "../jobs", ""])
def test_attaching_to_no_job_is_refused(client: Client, job_id: str) -> None:
    with pytest.raises(BadInput, match="id of a job"):
        client.attach(job_id)


def test_replicas_of_the_request_win_over_those_of_the_resources_and_each_knows_its_place_and_announces(
    client: Client, tmp_path: Path
) -> None:
    def say(folder: Path) -> None:
        print(os.environ["ASSAY_REPLICA_INDEX"], "of", os.environ["ASSAY_REPLICA_COUNT"])
        announce(f"first of {os.environ['ASSAY_REPLICA_INDEX']}")
        while not (folder / "go").exists():
            time.sleep(0.02)
        announce("second")
        while not (folder / "end").exists():
            time.sleep(0.02)

    call = Entrypoint.from_callable(say, [tmp_path])
    handle = client.submit(job(call, replicas=2, resources=ResourceConfig(replicas=3)))
    eventually(lambda: [handle.announced(index) for index in range(2)] == ["first of 0", "first of 1"])
    (tmp_path / "go").touch()
    eventually(lambda: client.attach(handle.job_id).announced(1) == "second")
    (tmp_path / "end").touch()
    assert handle.wait(30) is JobStatus.SUCCEEDED
    assert [handle.logs(replica=index) for index in range(2)] == ["0 of 2", "1 of 2"]
    assert "1 of 2" in handle.logs()
    with pytest.raises(BadInput):
        handle.logs(replica=2)


def test_announcement_of_an_earlier_attempt_is_forgotten(client: Client, tmp_path: Path) -> None:
    script = (
        f"if [ -e {tmp_path}/second ]; then touch {tmp_path}/silent; {FOR_EVER}; fi; "
        f"printf first > $ASSAY_ANNOUNCEMENT; until [ -e {tmp_path}/second ]; do sleep 0.02; done; exit 1"
    )
    handle = client.submit(job(shell(script), max_retries_failure=1))
    eventually(lambda: handle.announced() == "first")
    (tmp_path / "second").touch()
    eventually((tmp_path / "silent").exists)
    eventually(lambda: handle.announced() is None)


def test_job_terminated_while_it_starts_is_stopped_and_leaves_nothing(client: Client, tmp_path: Path) -> None:
    handle = client.submit(job(shell(f"echo $$ > {tmp_path}/pid; {FOR_EVER}")))
    handle.terminate()
    assert handle.status() is JobStatus.STOPPED
    written = (tmp_path / "pid").read_text().strip() if (tmp_path / "pid").exists() else ""
    assert not written or not is_alive(int(written))  # it may have ended between opening the file and writing


def test_job_sees_and_ends_others_and_its_children_end_with_it_unless_they_outlive_it(
    client: Client, tmp_path: Path
) -> None:
    def parent(folder: Path, job_id: str) -> None:
        jobs = current_client()
        seen = [details.job_id for details in jobs.jobs()]
        other = jobs.attach(job_id)
        deadline = time.monotonic() + 20
        while not (other.announced() and other.logs()) and time.monotonic() < deadline:  # they appear separately
            time.sleep(0.02)
        (folder / "seen").write_text(json.dumps([job_id in seen, other.announced(), other.logs()]))
        other.terminate()
        for name in ("mortal", "lasting"):
            script = f"echo $$ > {folder}/{name}-pid; while :; do sleep 1; done"
            request = JobRequest(
                name,
                Entrypoint.from_binary("sh", ["-c", script]),
                resources=ResourceConfig.with_cpu(),
                outlives_parent=name == "lasting",
            )
            (folder / "unfinished").write_text(jobs.submit(request).job_id)
            (folder / "unfinished").rename(folder / name)
        time.sleep(300)

    other = client.submit(job(shell(f"echo hello; printf here > $ASSAY_ANNOUNCEMENT; {FOR_EVER}"), "other"))
    handle = client.submit(job(Entrypoint.from_callable(parent, [tmp_path, other.job_id]), "parent"))
    assert other.wait(60, raise_on_failure=False) is JobStatus.STOPPED
    assert json.loads((tmp_path / "seen").read_text()) == [True, "here", "hello"]
    eventually((tmp_path / "lasting").exists)
    mortal, lasting = (client.attach((tmp_path / name).read_text()) for name in ("mortal", "lasting"))
    try:
        pids = [eventual_pid(tmp_path / f"{name}-pid") for name in ("mortal", "lasting")]
        eventually(lambda: [child.status() for child in (mortal, lasting)] == [JobStatus.RUNNING] * 2)
        with pytest.raises(JobTimeout):
            handle.result(0.1)
        handle.terminate()
        with pytest.raises(JobFailed, match="stopped"):
            handle.result()
        eventually(lambda: mortal.status().finished)
        eventually(lambda: not is_alive(pids[0]))
        assert lasting.status() is JobStatus.RUNNING
        assert is_alive(pids[1])
    finally:
        lasting.terminate()
    assert not is_alive(pids[1])


WRITTEN_LINES = {"local": 200_000, "ray": 100_000, "slurm": 100_000, "iris": 100_000, "kubernetes": 10_000}


def test_log_that_is_read_part_by_part_has_every_line_once_over_bursts_attempts_and_a_line_completed_later(
    client: Client, backend: str, tmp_path: Path
) -> None:
    count = WRITTEN_LINES[backend]
    script = (
        f"printf Loading; touch {tmp_path}/loading; until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo ' done'; "
        "printf '10%%\\r20%%\\n'; "
        f"for burst in 1 2 3 4; do seq $(((burst - 1) * {count // 4} + 1)) $((burst * {count // 4})); sleep 0.1; done; "
        f"[ -e {tmp_path}/again ] || {{ touch {tmp_path}/again; exit 1; }}; printf unfinished"
    )
    handle = client.submit(job(shell(script), max_retries_failure=1))
    eventually((tmp_path / "loading").exists)
    first = handle.read_log()
    assert first.output in {b"", b"Loading"}  # some show whole lines only
    (tmp_path / "go").touch()
    output, position = first.output, first.end
    while True:
        finished = handle.status().finished
        part = handle.read_log(position)
        assert not part.follows_dropped
        output, position = output + part.output, part.end
        if finished and not part.output:
            break
    attempt = ["Loading done", "10%\r20%", *map(str, range(1, count + 1))]
    lines = [line for line in output.decode().split("\n") if line and not line.startswith("--- ")]
    assert lines == [*attempt, *attempt, "unfinished"]
    with pytest.raises(BadInput, match="replica"):
        handle.read_log(replica=1)
