"""Native evaluations as sent to their jobs, and as read back, with outputs in a store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from pools.endpoint import LocalCheckpoint
from pools.weights.model_files import ModelDigests
from resources.errors import StorageError
from resources.storage import storage
from tasks.errors import HarnessFailed
from tasks.evaluators.native import (
    OUTCOME_NAME,
    NativeEvaluation,
    Outcome,
    output_here,
    read_outcome,
    with_benchmarks_there,
    write_outcome,
)
from tasks.spec.evaluation import EvaluationConfig

OUTPUT = "memory://native/attempt"


@pytest.fixture(autouse=True)
def _empty_store() -> None:
    fsspec.filesystem("memory").store.clear()


def evaluation(benchmarks: Path) -> NativeEvaluation:
    content = {
        "evaluator": "levanter_lm_evaluation_harness",
        "model_path": "gs://runs/a",
        "evals": [{"name": "mine"}],
        "benchmarks_path": str(benchmarks),
    }
    config = EvaluationConfig.model_validate(content)
    checkpoint = LocalCheckpoint("a", "gs://runs/a")
    return NativeEvaluation(config, checkpoint, ModelDigests("", "", ""), OUTPUT, f"{OUTPUT}/journal")


def test_outcome_in_a_store_is_read_as_it_was_written(tmp_path: Path):
    native_evaluation = evaluation(tmp_path)
    assert read_outcome(native_evaluation) is None
    failure = HarnessFailed(expected="a score", found="none", remedy="ask again")
    write_outcome(native_evaluation, Outcome(failure=failure.as_values(), seconds=2.5))
    outcome = read_outcome(native_evaluation)
    assert outcome is not None and outcome.seconds == 2.5 and outcome.machine.keys() == {"system", "machine"}
    with pytest.raises(HarnessFailed, match="ask again"):
        outcome.raise_failure()
    storage.write_bytes(f"{OUTPUT}/{OUTCOME_NAME}", b"{}")
    with pytest.raises(StorageError):
        read_outcome(native_evaluation)


def test_outcome_names_the_slice_that_the_job_got(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    assert Outcome(seconds=1).machine["tpu"] == "v5litepod-8"
    monkeypatch.setenv("ASSAY_TPU_TYPE", "v6e-8")
    assert Outcome(seconds=1).machine["tpu"] == "v6e-8"


def test_output_in_a_store_is_copied_and_local_output_read_directly(tmp_path: Path):
    storage.write_bytes(f"{OUTPUT}/results/a.json", b"1")
    copy = output_here(evaluation(tmp_path), tmp_path / "copy")
    assert (copy / "results" / "a.json").read_bytes() == b"1"
    local_evaluation = replace(evaluation(tmp_path), output=str(tmp_path))
    assert output_here(local_evaluation, tmp_path / "unused") == tmp_path


def test_benchmarks_of_this_machine_go_along_where_the_output_goes_into_a_store(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("task: mine\n")
    native_evaluation = evaluation(tmp_path)
    sent = with_benchmarks_there(native_evaluation)
    assert sent.config.benchmarks_path is not None and sent.config.benchmarks_path.startswith(OUTPUT)
    assert storage.read_bytes(f"{sent.config.benchmarks_path}/mine.yaml") == b"task: mine\n"
    on_shared_disk = replace(native_evaluation, output=str(tmp_path / "out"))
    assert with_benchmarks_there(on_shared_disk) == on_shared_disk
