"""A line to an actor with a failing network, job or backend; the test plays the actor."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resources.actors.actor_line import ActorLine, Patience
from resources.actors.actor_wire import Frame, Kind, greet_caller, receive, send
from resources.errors import ActorCallLost, ActorDied, ActorRestarted, BackendUnavailable, StorageError
from resources.jobs.jobs import JobDetails, JobStatus
from resources.jobs.logs import LogPart
from resources.jobs.user_key import USER_KEY_VARIABLE, user_key
from resources.settings import settings

IMPATIENT = Patience(unreachable_seconds=0.2, unexplained_seconds=0.5, silent_seconds=0.05)
ANSWER_SECONDS = 20.0


class ScriptedJob:
    job_id = "actor-scripted-1"

    def __init__(self) -> None:
        self.now = JobStatus.RUNNING
        self.attempts, self.preemptions = 1, 0
        self.address: str | None = None
        self.gone: Exception | None = None

    def details(self) -> JobDetails:
        if self.gone is not None:
            raise self.gone
        return JobDetails(
            job_id=self.job_id,
            name="actor-scripted",
            status=self.now,
            reason="so it goes",
            attempts=self.attempts,
            preemptions=self.preemptions,
        )

    def status(self) -> JobStatus:
        return self.details().status

    def announced(self, replica: int = 0) -> str | None:
        return self.address

    def logs(self, max_lines: int = 200, *, replica: int | None = None) -> str:
        return "last line"

    def read_log(self, after: str = "", *, replica: int = 0) -> LogPart:
        return LogPart(b"", after)

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        return self.now

    def result(self, timeout: float | None = None, *, replica: int = 0) -> None:
        return

    def terminate(self) -> None:
        self.now = JobStatus.STOPPED


@pytest.fixture
def job() -> ScriptedJob:
    return ScriptedJob()


@pytest.fixture
def actor(job: ScriptedJob) -> Iterator[Callable[[Callable[[socket.socket, Frame], Any]], None]]:
    """Makes the job announce a listener that handles each call with a function of the test."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(answer: Callable[[socket.socket, Frame], Any]) -> None:
            def work() -> None:
                while True:
                    try:
                        connection, _ = listener.accept()
                    except OSError:
                        return
                    with connection:
                        greet_caller(connection, user_key(), actor=job.job_id)
                        while (frame := receive(connection)) is not None:
                            if answer(connection, frame) is False:
                                break

            threading.Thread(target=work, daemon=True).start()
            job.address = f"127.0.0.1:{listener.getsockname()[1]}"

        yield serve
        listener.shutdown(socket.SHUT_RDWR)


def echo(connection: socket.socket, frame: Frame) -> None:
    send(connection, Frame(frame.call, Kind.RESULT, "", frame.body))


def hang_up(connection: socket.socket, frame: Frame) -> bool:
    return False


def line_to(job: ScriptedJob) -> ActorLine:
    return ActorLine(job, name="scripted", patience=IMPATIENT)


def test_calls_wait_for_the_address_and_keep_their_order(job: ScriptedJob, actor: Any) -> None:
    line = line_to(job)
    futures = [line.call("echo", pickle.dumps(number)) for number in range(50)]
    assert not futures[0].done()
    seen: list[int] = []

    def note(connection: socket.socket, frame: Frame) -> None:
        seen.append(pickle.loads(frame.body))
        echo(connection, frame)

    actor(note)
    assert [pickle.loads(future.result(ANSWER_SECONDS).body) for future in futures] == list(range(50))
    assert seen == list(range(50))


def test_broken_connection_of_a_running_actor_loses_only_that_call(job: ScriptedJob, actor: Any) -> None:
    actor(lambda connection, frame: hang_up(connection, frame) if frame.method == "lost" else echo(connection, frame))
    line = line_to(job)
    with pytest.raises(ActorCallLost, match="still running") as caught:
        line.call("lost", b"").result(ANSWER_SECONDS)
    assert not isinstance(caught.value, ActorRestarted)
    assert line.call("echo", b"again").result(ANSWER_SECONDS).body == b"again"


@pytest.mark.parametrize(
    ("attempts", "preemptions", "address", "status"),
    [(2, 1, None, JobStatus.RUNNING), (1, 0, "127.0.0.1:1", JobStatus.RUNNING), (1, 1, None, JobStatus.PENDING)],
)
def test_broken_connection_of_a_new_attempt_is_a_restart(
    job: ScriptedJob, actor: Any, attempts: int, preemptions: int, address: str | None, status: JobStatus
) -> None:
    def restart(connection: socket.socket, frame: Frame) -> bool:
        job.attempts, job.preemptions, job.address, job.now = attempts, preemptions, address, status
        return False

    actor(restart)
    with pytest.raises(ActorRestarted):
        line_to(job).call("lost", b"").result(ANSWER_SECONDS)


@pytest.mark.parametrize("status", [JobStatus.RUNNING, JobStatus.PENDING], ids=["running", "start not written down"])
def test_broken_connection_of_a_job_that_is_about_to_end_is_a_death(
    job: ScriptedJob, actor: Any, status: JobStatus
) -> None:
    def end(connection: socket.socket, frame: Frame) -> bool:
        job.address, job.now = None, status
        threading.Timer(2 * IMPATIENT.unexplained_seconds, job.terminate).start()  # a slow backend
        return False

    actor(end)
    with pytest.raises(ActorDied, match="stopped"):
        line_to(job).call("lost", b"").result(ANSWER_SECONDS)


def test_host_that_falls_silent_is_noticed_when_its_job_has_ended(job: ScriptedJob, actor: Any) -> None:
    def say_nothing(connection: socket.socket, frame: Frame) -> None:
        job.now = JobStatus.FAILED

    actor(say_nothing)
    line = line_to(job)
    with pytest.raises(ActorDied, match="so it goes\nlast line"):
        line.call("echo", b"").result(ANSWER_SECONDS)
    with pytest.raises(ActorDied):
        line.call("echo", b"").result(0)


def test_address_that_does_not_answer_ends_calls_and_is_tried_again_later(job: ScriptedJob, actor: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        job.address = f"127.0.0.1:{closed.getsockname()[1]}"
    line = line_to(job)
    with pytest.raises(BackendUnavailable, match=job.address):
        line.call("echo", b"").result(ANSWER_SECONDS)
    actor(echo)
    assert line.call("echo", b"now").result(ANSWER_SECONDS).body == b"now"


def test_stranger_at_the_address_is_not_spoken_to(job: ScriptedJob) -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        job.address = f"127.0.0.1:{listener.getsockname()[1]}"

        def pretend() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(bytes(64))
                    while content := connection.recv(1000):
                        heard.append(content)

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(BackendUnavailable, match="ASSAY_ACTOR_KEY"):
            line_to(job).call("echo", b"a secret argument").result(ANSWER_SECONDS)
        listener.shutdown(socket.SHUT_RDWR)
    assert not any(b"secret" in content for content in heard)


def test_backend_that_is_gone_ends_calls_with_its_own_words(job: ScriptedJob) -> None:
    job.gone = BackendUnavailable(expected="the cluster", found="nothing", remedy="Start it.")
    with pytest.raises(BackendUnavailable, match="Start it"):
        line_to(job).call("echo", b"").result(ANSWER_SECONDS)


def test_many_threads_share_a_line(job: ScriptedJob, actor: Any) -> None:
    actor(echo)
    line = line_to(job)
    wrong: list[object] = []

    def work(number: int) -> None:
        for index in range(100):
            body = f"{number}.{index}".encode() * (1 + index * 300)
            if line.call("echo", body).result(ANSWER_SECONDS).body != body:
                wrong.append((number, index))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ANSWER_SECONDS)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_key_is_kept_for_its_owner_and_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(USER_KEY_VARIABLE, raising=False)
    settings.cache_clear()
    key, file = user_key(), tmp_path / "cache" / "actor.key"
    assert len(key) >= 32 and user_key() == key == file.read_bytes()
    for mode in (0o640, 0o644, 0o602):
        file.chmod(mode)
        with pytest.raises(StorageError, match=f"mode {mode:o}"):
            user_key()
    file.chmod(0o600)
    for content in (b"", key[:31]):
        file.write_bytes(content)
        with pytest.raises(StorageError, match=f"{len(content)} bytes"):
            user_key()
