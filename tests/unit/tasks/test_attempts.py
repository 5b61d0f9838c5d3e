"""One attempt at a cell that nobody serves, on a stand-in harness."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import pytest

from fakes.models import write_run
from fakes.polling import eventually, is_alive
from pools.endpoint import RunningModel
from pools.weights.model_files import digest_model_folder
from resources.backends.current import current_client
from resources.errors import EvaluationInterrupted
from tasks.checkpoints.discovery import find_checkpoints
from tasks.evaluators.evaluator import EvaluatedModel, HarnessCommand, Parsed, Progress
from tasks.records.record import CheckpointReference, read_record
from tasks.records.samples import Sample
from tasks.running.attempt import Harness, Turn, evaluate_cell
from tasks.running.cells import Cell
from tasks.running.serving import Interruption
from tasks.spec.evaluation import EvaluationConfig

PROGRAM = Path(__file__).parents[2] / "fakes" / "harness.py"


@dataclass(frozen=True)
class Hanging:
    """A harness that loads the checkpoint itself, and never ends."""

    name: str = "hanging"
    needs_endpoint: bool = False
    program: Path | None = None

    @property
    def import_variables(self) -> Mapping[str, str]:
        return {}

    def environment(self, config: EvaluationConfig) -> str:
        return "hanging"

    def preload_arguments(self, config: EvaluationConfig) -> tuple[str, ...]:
        return ()

    def command(
        self,
        model: EvaluatedModel,
        config: EvaluationConfig,
        output: Path,
        *,
        python: Path,
        judge: RunningModel | None = None,
    ) -> HarnessCommand:
        return HarnessCommand(argv=(str(python), str(PROGRAM), "hang", str(output)), variables={}, files={})

    def parse(self, output: Path, config: EvaluationConfig) -> Parsed:
        raise AssertionError("it never ends")

    def samples(self, output: Path, config: EvaluationConfig) -> Iterator[Sample]:
        raise AssertionError("it never ends")

    def progress(self, log: str) -> Progress | None:
        return None

    def check(self, config: EvaluationConfig, *, python: Path) -> None:
        return None


def make_cell(folder: Path) -> Cell:
    run = write_run(folder / "run-a", [100])
    config = EvaluationConfig.model_validate(
        {
            "evaluator": "levanter_lm_evaluation_harness",
            "model_path": str(run),
            "evaluation_path": str(folder / "out"),
            "evals": [{"name": "demo_facts"}],
        }
    )
    [checkpoint] = find_checkpoints(str(run))
    assert checkpoint.folder is not None
    digests = digest_model_folder(checkpoint.folder)
    reference = CheckpointReference(
        uri=checkpoint.uri,
        run="run-a",
        name="run-a-100",
        step=100,
        digest=digests.checkpoint,
        weights_digest=digests.weights,
    )
    return Cell(config, checkpoint.folder, digests, reference, "hash", str(folder / "out" / "cell"), None)


@pytest.mark.timeout(60)
def test_attempt_that_nobody_serves_ends_with_all_it_started_when_the_run_is_told_to(tmp_path: Path):
    cell, interruption = make_cell(tmp_path), Interruption()
    harness = Harness(Hanging(), Path(sys.executable), None)
    turn = Turn(1, 1, lambda _: harness, Lock(), interruption=interruption)

    def pids() -> list[int]:
        return [int(pid) for path in Path(cell.uri).glob("attempt-*/pids") for pid in path.read_text().split()]

    with ThreadPoolExecutor(1) as threads:
        attempt = threads.submit(evaluate_cell.fn, cell, None, turn)
        try:
            eventually(lambda: len(pids()) == 2)
            started = pids()
            [job] = [one for one in current_client().jobs() if not one.status.finished]
            assert job.name.startswith("hanging-run-a-100-demo_facts-"), "a list of jobs says what it is"
        finally:
            interruption.interrupt()
        with pytest.raises(EvaluationInterrupted):
            attempt.result()
    assert not any(map(is_alive, started))
    record = read_record(cell.uri)
    assert record is not None
    assert (record.status, record.interrupted, record.infra_failures) == ("infra_failed", True, 0)
    with pytest.raises(EvaluationInterrupted):
        evaluate_cell.fn(cell, None, turn)
    assert pids() == started
