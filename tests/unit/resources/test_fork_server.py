"""The fork server with programs of these tests: a run in a fork equals a separate run, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.polling import eventual_pid, eventually, is_alive
from fakes.processes import WITHOUT_MAIN_THREAD
from faults.scenarios.processes import state_of
from resources.backends.local.client import LocalClient
from resources.config import ResourceConfig
from resources.errors import JobFailed
from resources.jobs.jobs import Command, JobHandle, JobRequest, JobStatus, create_environment
from resources.settings import process_environment
from resources.warm.fork_server import WarmProgram, fork_server

PROGRAM = """
import json, os, random, signal, subprocess, sys, time
from pathlib import Path

READ_AT_IMPORT = ("PRELOADED_",)
PRELOADED_IN = None

def preload(arguments):
    global PRELOADED_IN
    PRELOADED_IN = os.getpid()
    if arguments == ["slowly"]:
        open("/dev/stderr", "w").write("importing\\n")
        while not Path(sys.argv[1]).with_name("go").exists():
            time.sleep(0.01)
    if arguments == ["--never"]:
        raise RuntimeError("cannot be imported")
    if arguments == ["threads"]:
        import threading
        threading.Thread(target=time.sleep, args=(600,), daemon=True, name="sleeper").start()

def main(arguments):
    what, *rest = arguments
    if what == "describe":
        described = {
            "warm": PRELOADED_IN is not None and PRELOADED_IN != os.getpid(), "argv": sys.argv[1:],
            "cwd": os.getcwd(), "env": dict(os.environ), "random": random.random(), "umask": os.umask(0),
            "group": os.getpgid(0) == os.getpid(), "stdin": sys.stdin.read(),
            "ignored": [int(n) for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN],
            "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "open": sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else [],
        }
        print(json.dumps(described))
    if what == "exit":
        sys.exit(int(rest[0]) if rest[0].isdigit() else rest[0])
    if what == "return":
        return int(rest[0])
    if what == "raise":
        raise ValueError("broken")
    if what == "die":
        os.kill(os.getpid(), int(rest[0]))
        time.sleep(600)
    if what == "leave":
        subprocess.Popen([sys.executable, *rest], start_new_session=True)
        sys.stdin.read()
    if what == "wait":
        assert PRELOADED_IN not in (None, os.getpid()), "the subreaper that tests kill is another process"
        escaped = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(rest[0]).write_text(f"{os.getpid()} {escaped.pid} {os.getppid()}")
        if rest[1:] == ["politely"]:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        time.sleep(600)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LocalClient]:
    client = LocalClient(tmp_path / "jobs", grace_seconds=2.0)
    yield client
    client.shutdown()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "warm_program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def server(program: Path, client: LocalClient) -> Iterator[WarmProgram]:
    with fork_server(program, python=Path(sys.executable), client=client) as server:
        yield server


def run(command: Command, *, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [command.command, *command.args],
        cwd=cwd,
        env=process_environment(variables),
        input="asked\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def describe(server: WarmProgram, *, cwd: Path | None = None, **variables: str) -> dict[str, Any]:
    done = run(server.command("describe", "two words", ""), cwd=cwd, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def submit(client: LocalClient, command: Command, name: str = "run", *, cwd: Path) -> JobHandle:
    return client.submit(
        JobRequest(
            name,
            command,
            resources=ResourceConfig(),
            environment=create_environment(workspace=cwd, env_vars={"COLOUR": "green"}),
            max_retries_preemption=0,
        )
    )


def pids(path: Path) -> list[int]:
    """Returns the pids of the child, of a process that it started in its own session, and of the child's keeper."""
    eventually(lambda: path.is_file() and len(path.read_text().split()) == 3)
    return [int(pid) for pid in path.read_text().split()]


def test_run_gets_its_own_arguments_streams_folder_and_environment(
    server: WarmProgram, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ONLY_BEFORE", "yes")
    seen = describe(server, cwd=tmp_path, COLOUR="blue")
    assert seen["warm"]
    assert seen["argv"] == ["describe", "two words", ""]
    assert (seen["cwd"], seen["stdin"], seen["env"]["COLOUR"]) == (str(tmp_path), "asked\n", "blue")
    assert "ASSAY_JOB_ID" not in seen["env"]
    assert seen["group"]
    alone = json.loads(run(Command(sys.executable, (str(program), "describe"))).stdout)
    for same in ("ignored", "blocked", "umask", "open"):
        assert seen[same] == alone[same]
    monkeypatch.delenv("ONLY_BEFORE")
    again = describe(server, cwd=tmp_path)
    assert "ONLY_BEFORE" not in again["env"]
    assert again["random"] != seen["random"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("return", "0"), 0),
        (("return", "3"), 3),
        (("exit", "4"), 4),
        (("exit", "why"), 1),
        (("raise",), 1),
        (("die", "9"), -signal.SIGKILL),
        (("die", "15"), -signal.SIGTERM),
        (("die", "2"), -signal.SIGINT),
    ],
)
def test_run_ends_as_the_program_alone_would(server: WarmProgram, program: Path, arguments: tuple[str, ...], code: int):
    warm = run(server.command(*arguments))
    alone = run(Command(sys.executable, (str(program), *arguments)))
    assert (warm.returncode, alone.returncode) == (code, code)
    assert [line for line in warm.stderr.splitlines() if not line.startswith((" ", "Trace"))] == [
        line for line in alone.stderr.splitlines() if not line.startswith((" ", "Trace"))
    ]


def test_job_holds_the_log_and_the_variables_of_its_run(server: WarmProgram, client: LocalClient, tmp_path: Path):
    job = submit(client, server.command("describe"), cwd=tmp_path)
    assert job.wait(60) is JobStatus.SUCCEEDED
    seen = json.loads(job.logs())
    assert (seen["env"]["COLOUR"], seen["cwd"]) == ("green", str(tmp_path))
    assert seen["env"]["ASSAY_JOB_ID"] == job.job_id


def test_terminated_job_passes_its_signal_on_and_leaves_nothing(
    server: WarmProgram, client: LocalClient, tmp_path: Path
):
    job = submit(client, server.command("wait", str(tmp_path / "pids"), "politely"), cwd=tmp_path)
    processes = pids(tmp_path / "pids")
    job.terminate()
    assert job.process_details()["replicas"][0]["exit_code"] == 7  # type: ignore[attr-defined]
    assert not [pid for pid in processes if is_alive(pid)]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere such a process is no zombie")
def test_process_with_an_ended_main_thread_ends_with_its_run(server: WarmProgram, tmp_path: Path):
    (tmp_path / "program.py").write_text(WITHOUT_MAIN_THREAD)
    command = server.command("leave", str(tmp_path / "program.py"), str(tmp_path / "pid"))
    arguments = [command.command, *command.args]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, env=process_environment()) as stub:
        pid = eventual_pid(tmp_path / "pid")
        eventually(lambda: state_of(pid) == "Z")
    assert (stub.returncode, is_alive(pid)) == (0, False)


def test_killed_stub_takes_the_run_and_all_it_started_with_it(server: WarmProgram, tmp_path: Path):
    command = server.command("wait", str(tmp_path / "pids"))
    with subprocess.Popen([command.command, *command.args], env=process_environment()) as stub:
        processes = pids(tmp_path / "pids")
        stub.kill()
    eventually(lambda: not [pid for pid in processes if is_alive(pid)])


def test_killed_subreaper_takes_the_run_and_all_it_started_with_it(
    server: WarmProgram, client: LocalClient, tmp_path: Path
):
    job = submit(client, server.command("wait", str(tmp_path / "pids")), cwd=tmp_path)
    processes = pids(tmp_path / "pids")
    os.kill(processes[-1], signal.SIGKILL)
    with pytest.raises(JobFailed, match="from outside"):
        job.wait(60)
    assert "the fork server has ended" in job.logs()
    eventually(lambda: not [pid for pid in processes if is_alive(pid)])
    assert describe(server)["warm"]


def test_killed_server_ends_its_runs_and_the_next_starts_cold(
    server: WarmProgram, client: LocalClient, program: Path, tmp_path: Path
):
    job = submit(client, server.command("wait", str(tmp_path / "pids")), cwd=tmp_path)
    processes = pids(tmp_path / "pids")
    client.attach(server.job_id).terminate()
    with pytest.raises(JobFailed, match="from outside"):
        job.wait(60)
    assert not [pid for pid in processes if is_alive(pid)]
    done = run(server.command("describe"))
    assert "no warm start: the fork server does not answer" in done.stderr
    assert not json.loads(done.stdout)["warm"]


def test_server_that_was_killed_is_started_again(program: Path, client: LocalClient, tmp_path: Path):
    with fork_server(program, python=Path(sys.executable), client=client) as server:
        command = server.command("wait", str(tmp_path / "pids"))
        with subprocess.Popen([command.command, *command.args], env=process_environment()) as stub:
            processes = pids(tmp_path / "pids")
            parent = int(Path(f"/proc/{processes[-1]}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(parent, signal.SIGKILL)
            assert stub.wait(60) in {-signal.SIGTERM, -signal.SIGKILL}
        eventually(lambda: not [pid for pid in processes if is_alive(pid)])
        assert eventually(lambda: json.loads(run(server.command("describe")).stdout)["warm"])


def test_run_that_comes_while_the_program_is_imported_waits_for_it(program: Path, client: LocalClient):
    with fork_server(program, python=Path(sys.executable), client=client, preload_arguments=["slowly"]) as server:
        eventually(lambda: "importing" in client.attach(server.job_id).logs())
        impatient = server.command("describe")
        at_once = run(Command(impatient.command, (*impatient.args[:4], "--wait", "0.1", *impatient.args[4:])))
        assert "not ready within 0.1 s" in at_once.stderr and not json.loads(at_once.stdout)["warm"]
        command = server.command("describe")
        with subprocess.Popen(
            [command.command, *command.args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        ) as stub:
            Path(command.args[4]).with_name("go").touch()
            assert stub.stdout is not None
            assert json.loads(stub.stdout.read())["warm"]


def test_program_that_cannot_be_imported_is_run_cold(program: Path, client: LocalClient):
    with fork_server(program, python=Path(sys.executable), client=client, preload_arguments=["--never"]) as server:
        done = run(server.command("describe"))
        assert not json.loads(done.stdout)["warm"]
        assert eventually(lambda: "cannot be imported" in client.attach(server.job_id).logs())


def test_run_with_other_variables_than_were_read_at_import_starts_cold(program: Path, client: LocalClient):
    variables = {"PRELOADED_AS": "one"}
    with fork_server(program, python=Path(sys.executable), client=client, variables=variables) as server:
        assert describe(server, PRELOADED_AS="one")["warm"]
        for other in ({"PRELOADED_AS": "secret"}, {}, {"PRELOADED_AS": "one", "PRELOADED_ELSE": "x"}):
            done = run(server.command("describe"), cwd=None, **other)
            assert not json.loads(done.stdout)["warm"]
            assert "other values of PRELOADED_" in done.stderr and "secret" not in done.stderr


def test_import_that_starts_a_thread_is_reported(program: Path, client: LocalClient):
    with fork_server(program, python=Path(sys.executable), client=client, preload_arguments=["threads"]) as server:
        job = client.attach(server.job_id)
        assert eventually(lambda: "2 threads run after preloading (in Python: MainThread, sleeper)" in job.logs())


def test_twenty_runs_at_once_are_apart_and_leave_no_process(server: WarmProgram, client: LocalClient, tmp_path: Path):
    waiting = [server.command("wait", str(tmp_path / f"pids-{number}")) for number in range(20)]
    stubs = [subprocess.Popen([stub.command, *stub.args], env=process_environment()) for stub in waiting]
    processes = [pids(tmp_path / f"pids-{number}") for number in range(20)]
    assert len({pid for three in processes for pid in three}) == 60
    for stub in stubs[:10]:
        stub.terminate()
    assert [stub.wait(60) for stub in stubs[:10]] == [-signal.SIGTERM] * 10
    assert all(is_alive(child) for child, _, _ in processes[10:])
    client.attach(server.job_id).terminate()
    assert {stub.wait(60) for stub in stubs[10:]} <= {-signal.SIGTERM, -signal.SIGKILL}
    assert not [pid for three in processes for pid in three if is_alive(pid)]


@pytest.mark.parametrize("closed", [True, False])
def test_socket_is_private_and_goes_with_the_server(program: Path, client: LocalClient, closed: bool):
    with fork_server(program, python=Path(sys.executable), client=client) as server:
        describe(server)
        assert server.socket.stat().st_mode & 0o077 == 0
        assert server.socket.parent.stat().st_mode & 0o077 == 0
        if not closed:
            client.shutdown()  # as at the end of the owner's process
            assert not server.socket.parent.exists()
    assert not server.socket.parent.exists()
