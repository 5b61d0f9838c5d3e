"""Jobs shared by evaluations without an endpoint: given up and resumed. The program is a fake."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

import pytest

from fakes.polling import eventually, is_alive
from pools.endpoint import LocalCheckpoint
from pools.weights.model_files import ModelDigests
from resources.backends.current import set_current_client
from resources.backends.local.client import LocalClient
from resources.jobs.jobs import JobStatus
from tasks.errors import ClaimLost, HarnessFailed
from tasks.evaluators.levanter.evaluator import EVALUATOR
from tasks.evaluators.native import OUTCOME_NAME, NativeEvaluation, NativeProgram, Outcome
from tasks.running.native_jobs import NativeJobs
from tasks.spec.evaluation import EvaluationConfig

PROGRAM = """#!{python} -S
import json, os, sys, time
from pathlib import Path
gates = Path({gates!r})
for line in sys.stdin:
    path = Path(line.strip())
    job = json.loads(path.read_text())
    name, kept = job["checkpoint"]["name"], path.parent / "kept"
    known = sorted(file.name for file in kept.glob("*")) if kept.is_dir() else []
    kept.mkdir(exist_ok=True)
    (kept / f"{{len(known)}}.json").write_text(name)
    print(f"kept {{len(known)}}.json", flush=True)
    (gates / f"{{name}}.begun").write_text(str(os.getpid()))
    while not (gates / name).exists():
        time.sleep(0.01)
    if (gates / name).read_text():
        sys.exit((gates / name).read_text())
    Path(job["output"], "known.json").write_text(json.dumps(known))
    print(f"evaluated {{path}}", flush=True)
"""


class ArrivedJobs(NativeJobs):
    def __init__(self) -> None:
        super().__init__()
        self.arrived: set[int] = set()

    def forget(self, position: int) -> None:
        self.arrived.add(position)
        super().forget(position)


class Cells:
    """Concurrent evaluations with a program that ends each of them when the test allows it."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor, jobs: ArrivedJobs) -> None:
        self.folder = folder
        self._gates = folder / "gates"
        self._gates.mkdir()
        self._threads = threads
        self._jobs = jobs
        self._lost: set[str] = set()
        program = folder / "program"
        program.write_text(PROGRAM.format(python=sys.executable, gates=str(self._gates)))
        program.chmod(0o755)
        self._program = NativeProgram(EVALUATOR, program)

    def start(self, *names: str, attempt: str = "attempt") -> list[Future[Outcome]]:
        """Starts evaluations that share a job in this order."""
        self._jobs.arrived.clear()
        for position in range(len(names)):
            self._jobs.expect(position)
        futures = []
        for position, name in enumerate(names):
            run = copy_context().run
            futures.append(self._threads.submit(run, self._evaluate, name, position, attempt))
            eventually(lambda position=position: position in self._jobs.arrived)
        return futures

    def begun(self, name: str) -> int:
        """Waits until the program works on an evaluation; returns its process."""
        file = self._gates / f"{name}.begun"
        return int(eventually(lambda: file.is_file() and file.read_text()) or 0)

    def let_end(self, name: str, *, failure: str = "") -> None:
        aside = self._gates / "aside"
        aside.write_text(failure)
        aside.rename(self._gates / name)

    def lose(self, *names: str) -> None:
        self._lost.update(names)

    def published(self, name: str, attempt: str = "attempt") -> list[str]:
        """Returns the files in an evaluation's output, without an empty mark."""
        output = self.folder / name / attempt
        return sorted(file.name for file in output.glob("*") if file.is_dir() or file.stat().st_size)

    def _evaluate(self, name: str, position: int, attempt: str) -> Outcome:
        content = {"evaluator": EVALUATOR.name, "model_path": "run", "evals": [{"name": "demo_facts"}]}
        output = self.folder / name

        def check() -> None:
            if name in self._lost:
                raise ClaimLost(expected="the claim", found="another's", remedy="leave it")

        return self._jobs.evaluate(
            NativeEvaluation(
                EvaluationConfig.model_validate(content),
                LocalCheckpoint(name, str(output / "checkpoint"), "levanter"),
                ModelDigests("weights", "tokenizer", "config"),
                str(output / attempt),
                str(output / "journal"),
            ),
            self._program,
            position=position,
            name=f"levanter-{name}-{attempt}",
            on_progress=lambda progress: None,
            check=check,
        )


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LocalClient]:
    client = LocalClient(tmp_path / "jobs", grace_seconds=1.0)
    with set_current_client(client):
        yield client
    client.shutdown()


@pytest.fixture
def cells(tmp_path: Path, client: LocalClient) -> Iterator[Cells]:
    with ArrivedJobs() as jobs, ThreadPoolExecutor(4) as threads:
        cells = Cells(tmp_path, threads, jobs)
        try:
            yield cells
        finally:
            cells.lose("a", "b", "c")  # if a test fails meanwhile


def given_up(future: Future[Outcome]) -> bool:
    return isinstance(eventually(lambda: future.done() and future.exception()), ClaimLost)


def test_cell_given_up_before_its_turn_is_left_out(cells: Cells, client: LocalClient) -> None:
    first, second, third = cells.start("a", "b", "c")
    program = cells.begun("a")
    cells.lose("b")
    assert given_up(second)
    for name in ("a", "c"):
        cells.let_end(name)
    assert first.result().failure is third.result().failure is None
    assert cells.begun("c") == program, "the same program served both"
    assert cells.published("b") == [] and OUTCOME_NAME in cells.published("c")
    assert not (cells.folder / "gates" / "b.begun").exists()
    [job] = client.jobs()
    assert client.attach(job.job_id).wait(30) is JobStatus.SUCCEEDED


def test_cell_given_up_at_work_is_ended_and_the_job_goes_on_with_others(cells: Cells, client: LocalClient) -> None:
    first, second = cells.start("a", "b")
    program = cells.begun("a")
    cells.lose("a")
    assert given_up(first)
    cells.begun("b")
    assert not is_alive(program)
    cells.let_end("b")
    assert second.result().failure is None
    assert cells.published("a") == [] and OUTCOME_NAME in cells.published("b")
    assert len(client.jobs()) == 1


def test_job_ends_once_its_last_cell_is_given_up(cells: Cells, client: LocalClient) -> None:
    futures = cells.start("a", "b", "c")
    program = cells.begun("a")
    cells.let_end("a")
    assert futures[0].result().failure is None
    cells.begun("b")
    cells.lose("b", "c")
    assert all(given_up(future) for future in futures[1:])
    [job] = client.jobs()
    assert job.status is JobStatus.STOPPED and eventually(lambda: not is_alive(program))
    assert cells.published("b") == cells.published("c") == []


def test_program_is_given_what_an_attempt_before_has_kept_and_no_other_evaluation(cells: Cells) -> None:
    cells.let_end("a", failure="broken")
    [failed] = cells.start("a", attempt="attempt-1")
    with pytest.raises(HarnessFailed, match="broken"):
        failed.result().raise_failure()
    cells.let_end("a")
    cells.let_end("b")
    for future in cells.start("a", "b", attempt="attempt-2"):
        future.result().raise_failure()
    known = {name: (cells.folder / name / "attempt-2" / "known.json").read_text() for name in ("a", "b")}
    assert known == {"a": '["0.json"]', "b": "[]"}
    assert not list(cells.folder.glob("*/attempt-*/**/kept")), "kept files are not part of the results"


def test_nothing_looks_after_jobs_any_more_behind_their_block(tmp_path: Path, client: LocalClient) -> None:
    with ArrivedJobs() as jobs, ThreadPoolExecutor(1) as threads:
        cells = Cells(tmp_path, threads, jobs)
        [first] = cells.start("a")
        cells.let_end("a")
        assert first.result().failure is None
        jobs.expect(1)  # and never comes
    assert [job.status for job in client.jobs()] == [JobStatus.SUCCEEDED]
    assert "native-jobs" not in {thread.name for thread in threading.enumerate()}
