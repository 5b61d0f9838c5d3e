"""Checkpoints of a training, found while it writes them: their notifications, and their cells."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pytest

from fakes.cells import cell_uri, of_cell
from fakes.jobs import FakeClient, FakeJob
from fakes.models import write_checkpoint, write_run
from fakes.records import make_record
from fakes.stores import folder_store
from pools.weights.model_files import digest_model_folder
from resources.config import ResourceConfig
from resources.errors import BackendUnavailable, StorageError
from resources.jobs.jobs import Command, JobRequest, JobStatus
from tasks.checkpoints.discovery import Checkpoint
from tasks.prefect_server.progress import Event, Update, listening
from tasks.records.details import CheckpointReference
from tasks.records.record import now, write_record
from tasks.running.cells import Cell
from tasks.running.claimed_cells import ClaimedCells
from tasks.spec.evaluation import EvaluationConfig
from tasks.training.arrivals import ArrivingCells, ArrivingCheckpoints, step_in

CONFIG = EvaluationConfig.model_validate(
    {"evaluator": "levanter_lm_evaluation_harness", "model_path": "run", "evals": [{"name": "demo_facts"}]}
)
"""Configuration without an endpoint, so no tokenizer is copied."""


def steps(checkpoints: Sequence[Checkpoint]) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def job() -> FakeJob:
    return FakeClient().submit(JobRequest("train_lm", Command("true"), resources=ResourceConfig()))


def test_complete_checkpoint_is_reported_once_and_two_lists_agree(run: Path) -> None:
    exports = ArrivingCheckpoints(str(run / "hf"))
    assert exports.find_new() == [], "there is nothing yet, not even a folder"
    write_run(run, [2, 1])
    assert exports.find_new() == []
    assert steps(exports.find_new()) == [1, 2]
    assert exports.find_new() == []

    write_checkpoint(run / "hf" / "step-3", seed=3)
    weights = run / "hf" / "step-3" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    assert [exports.find_new() for _ in range(3)] == [[]] * 3
    weights.write_bytes(content)
    assert exports.find_new() == []
    assert steps(exports.find_new()) == [3]


def test_checkpoint_that_is_written_again_is_reported_again(run: Path) -> None:
    exports = ArrivingCheckpoints(str(run / "hf"))
    write_run(run, [1])
    assert steps([*exports.find_new(), *exports.find_new()]) == [1]
    shutil.rmtree(run / "hf" / "step-1")
    assert exports.find_new() == []
    write_checkpoint(run / "hf" / "step-1", seed=9)
    assert steps([*exports.find_new(), *exports.find_new()]) == [1]


def test_last_look_takes_what_is_there_at_once_and_says_what_is_incomplete(run: Path) -> None:
    write_run(run, [1, 2])
    (run / "hf" / "step-2" / "config.json").unlink()
    events: list[Update] = []
    with listening(events.append):
        assert steps(ArrivingCheckpoints(str(run / "hf")).find_new(last=True)) == [1]
    assert any(isinstance(event, Event) and "step-2" in event.text for event in events)


def test_every_n_steps_leaves_out_others_but_the_last(run: Path) -> None:
    exports = ArrivingCheckpoints(str(run / "hf"), every_n_steps=4)
    write_run(run, [3, 5, 7, 9, 10])
    assert steps([*exports.find_new(), *exports.find_new()]) == [5, 9], "the first past each multiple"
    write_run(run, [11, 13])
    assert steps([*exports.find_new(), *exports.find_new()]) == [13]
    write_checkpoint(run / "hf" / "step-14", seed=7)
    assert steps(exports.find_new(last=True)) == [14]
    assert exports.find_new(last=True) == []


def cell_of(checkpoint: Checkpoint, done: Callable[[int], bool]) -> Cell:
    assert checkpoint.folder is not None
    digests = digest_model_folder(checkpoint.folder)
    reference = CheckpointReference(
        uri=checkpoint.uri,
        run=checkpoint.run,
        name=checkpoint.name,
        step=checkpoint.step,
        digest=digests.checkpoint,
        weights_digest=digests.weights,
    )

    class Done(Cell):
        @property
        def done(self) -> bool:
            return done(self.reference.step)

    uri = cell_uri(CONFIG.model_copy(update={"evaluation_path": checkpoint.uri}), reference, "hash")
    return Done(CONFIG, checkpoint.folder, digests, reference, "hash", uri, None)


def arriving(
    run: Path,
    job: FakeJob | None,
    *,
    done: Callable[[int], bool] = lambda step: False,
    meanwhile: Sequence[Callable[[], object]] = (),
    claimed: ClaimedCells | None = None,
) -> ArrivingCells:
    """Returns the arriving cells of a run; each wait runs the next function of `meanwhile`."""
    happening = iter(meanwhile)

    def plan(configs: Sequence[EvaluationConfig], checkpoints: Sequence[Checkpoint]) -> list[Cell]:
        return [cell_of(checkpoint, done) for checkpoint in checkpoints]

    def sleep(seconds: float) -> None:
        next(happening, lambda: None)()

    exports = ArrivingCheckpoints(str(run / "hf"))
    claimed = claimed or ClaimedCells([], wait=False, folder=str(run / "claims"))
    return ArrivingCells([CONFIG], exports, job, claimed=claimed, poll_seconds=1.0, plan=plan, sleep=sleep)


def names(cells: Sequence[Cell]) -> list[str]:
    return [cell.reference.name for cell in cells]


def test_cells_come_while_the_training_runs_and_end_with_it(run: Path, job: FakeJob) -> None:
    def end() -> None:
        write_checkpoint(run / "hf" / "step-3", seed=3)
        job.says(JobStatus.SUCCEEDED)

    meanwhile = [lambda: write_run(run, [1]), lambda: None, lambda: write_run(run, [2]), lambda: None, end]
    cells = arriving(run, job, meanwhile=meanwhile)
    assert cells.first() == [] and len(cells.wanted) == 1, "the first checkpoint, although no pool serves it"
    assert names(list(islice(cells.arrive(), 1))) == ["run-1"]
    assert names(list(cells.arrive())) == ["run-1", "run-2", "run-3"]
    assert names(list(cells.planned.values())) == ["run-1", "run-2", "run-3"]


def test_training_that_fails_leaves_what_it_wrote_to_be_evaluated(run: Path, job: FakeJob) -> None:
    write_run(run, [1])
    job.says(JobStatus.FAILED)
    assert names(list(arriving(run, job).arrive())) == ["run-1"]


def test_training_without_exports_ends_without_cells(run: Path, job: FakeJob) -> None:
    cells = arriving(run, job, meanwhile=[lambda: None, lambda: job.says(JobStatus.SUCCEEDED)])
    assert cells.first() == [] and list(cells.arrive()) == [] and cells.planned == {}


def test_cells_that_are_done_are_planned_and_not_wanted(run: Path) -> None:
    write_run(run, [1, 2])
    cells = arriving(run, None, done=lambda step: step == 1)
    assert names(list(cells.arrive())) == ["run-2"] and len(cells.planned) == 2


def test_training_that_resumes_and_writes_the_same_again_leads_to_no_second_cell(run: Path, job: FakeJob) -> None:
    def preempted() -> None:
        job.says(JobStatus.RUNNING, preemptions=1, attempts=2)
        shutil.rmtree(run / "hf" / "step-1")

    meanwhile = [
        lambda: write_run(run, [1]),
        lambda: None,
        preempted,
        lambda: write_run(run, [1]),
        lambda: None,
        lambda: job.says(JobStatus.SUCCEEDED),
    ]
    events: list[Update] = []
    with listening(events.append):
        assert names(list(arriving(run, job, meanwhile=meanwhile).arrive())) == ["run-1"]
    assert any(isinstance(event, Event) and "1 time so far ended from outside" in event.text for event in events)


def test_checkpoint_that_became_another_is_left_to_the_next_run(run: Path, job: FakeJob) -> None:
    def write_another() -> None:
        shutil.rmtree(run / "hf" / "step-1")
        write_checkpoint(run / "hf" / "step-1", seed=99)

    meanwhile = [
        lambda: write_run(run, [1]),
        lambda: None,
        write_another,
        lambda: None,
        lambda: job.says(JobStatus.SUCCEEDED),
    ]
    cells = arriving(run, job, meanwhile=meanwhile)
    [begun] = list(cells.arrive())
    [planned] = cells.planned.values()
    assert planned.reference.digest != begun.reference.digest, "so the flow ends by saying that it lacks a record"


def test_two_followers_of_a_training_evaluate_each_checkpoint_once(run: Path, job: FakeJob) -> None:
    folder = str(run / "claims")
    write_run(run, [1, 2])
    with ClaimedCells([], wait=False, folder=folder) as ours, ClaimedCells([], wait=False, folder=folder) as other:
        reconciler = arriving(run, None, claimed=other)
        assert names(list(islice(reconciler.arrive(), 1))) == ["run-1"], "the first process that looks has both"

        def leave_a_cell_without_outcome() -> None:
            other.release(reconciler.wanted[0])
            write_run(run, [3])

        meanwhile = [
            lambda: None,
            leave_a_cell_without_outcome,
            lambda: None,
            lambda: None,
            lambda: job.says(JobStatus.SUCCEEDED),
        ]
        cells = arriving(run, job, meanwhile=meanwhile, claimed=ours)
        assert names(list(cells.arrive())) == ["run-1", "run-3"], "the cell that was left, and the later cell"
        assert len(cells.planned) == 3
        other.release(*reconciler.wanted)
        assert names(ours.next()) == ["run-2"], "a cell that the other process releases is evaluated in the end"


def test_failure_from_before_a_cell_was_wanted_and_an_interruption_are_no_outcome(run: Path) -> None:
    write_run(run, [1, 2, 3])
    exports = ArrivingCheckpoints(str(run / "hf"))
    first, second, third = [cell_of(checkpoint, lambda step: False) for checkpoint in exports.find_new(last=True)]

    def record(cell: Cell, *, interrupted: bool = False) -> None:
        fields = {**of_cell(cell), "interrupted": interrupted, "created": now()}
        write_record(cell.uri, make_record(status="infra_failed").model_copy(update=fields))

    with ClaimedCells([], wait=False, folder=str(run / "claims")) as claimed:
        record(first)  # the training takes days, and another run tried the cell meanwhile
        claimed.add([first, second, third])
        record(second, interrupted=True)
        record(third)
        assert claimed.take() == [first, second]


def test_cluster_and_store_that_do_not_answer_for_a_while_end_nothing(
    run: Path, job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Flaky(FakeJob):
        # Fails the first two requests.

        asked = 0

        def details(self):
            self.asked += 1
            if self.asked <= 2:
                raise BackendUnavailable(expected="an answer", found="none", remedy="wait")
            return super().details()

    class FlakyExports(ArrivingCheckpoints):
        # Fails the first listing.

        looked = 0

        def find_new(self, *, last: bool = False):
            self.looked += 1
            if self.looked == 1:
                raise StorageError(expected="a list", found="none", remedy="wait")
            return super().find_new(last=last)

    write_run(run, [1])
    flaky = Flaky(job.job_id, job.current)
    flaky.says(JobStatus.SUCCEEDED)
    cells = ArrivingCells(
        [CONFIG],
        FlakyExports(str(run / "hf")),
        flaky,
        claimed=ClaimedCells([], wait=False, folder=str(run / "claims")),
        poll_seconds=1.0,
        plan=lambda configs, checkpoints: [cell_of(checkpoint, lambda step: False) for checkpoint in checkpoints],
        sleep=lambda seconds: None,
    )
    assert names(list(cells.arrive())) == ["run-1"]


def test_cluster_that_never_answers_again_ends_the_wait(run: Path, job: FakeJob) -> None:
    class Gone(FakeJob):
        # Fails every request.

        def details(self):
            raise BackendUnavailable(expected="an answer", found="its head is gone", remedy="start it")

    write_run(run, [1])
    gone = Gone(job.job_id, job.current)
    exports, claimed = ArrivingCheckpoints(str(run / "hf")), ClaimedCells([], wait=False, folder=str(run / "claims"))
    cells = ArrivingCells([CONFIG], exports, gone, claimed=claimed, poll_seconds=1.0, silence_seconds=0.0)
    with pytest.raises(BackendUnavailable, match="its head is gone"):
        list(cells.arrive())


def test_checkpoint_is_reported_although_another_was_unreadable_at_first(run: Path, tmp_path: Path) -> None:
    def fail(file: Path, start: int) -> None:
        if "step-2" in file.parts:
            raise ConnectionResetError("the store is gone")

    write_run(run, [1, 2])
    with folder_store(tmp_path / "reads") as store:
        exports = ArrivingCheckpoints(f"store://{run}/hf")
        exports.find_new()
        store.before_read = staticmethod(fail)
        with pytest.raises(StorageError):
            exports.find_new()
        store.reset(tmp_path / "reads")
        assert steps(exports.find_new()) == [1, 2]


def test_progress_of_a_training_is_read_from_its_log() -> None:
    line = 'I 16:00 json_logger {"tracker": "json_logger", "event": "log", "step": 7, "metrics": {"train/loss": 0.512}}'
    assert step_in(f"starting\n{line}\nsomething else") == "training: step 7, loss 0.51"
    assert step_in("starting\n") is None
    assert step_in('{"tracker": "json_logger" "train/loss" }') is None
