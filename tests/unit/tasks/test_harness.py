"""The shared runner of harnesses, on a fake program run by the real local job client."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fakes.endpoints import KEY, planned_model
from fakes.evaluators import Commanded
from fakes.polling import eventually, is_alive
from pools.endpoint import RunningModel
from resources.backends.local.client import LocalClient
from resources.errors import AssayError, EngineDied, StorageError
from resources.settings import process_environment
from tasks.errors import (
    AnswersCutOff,
    CountsDisagree,
    HarnessFailed,
    HarnessInterrupted,
    HarnessOutputInvalid,
    UnknownBenchmark,
)
from tasks.evaluators.evaluator import EvaluatedModel, HarnessCommand, Parsed, Progress
from tasks.evaluators.harness import refusal_in, run_harness, verify_counts, verify_ends
from tasks.records.details import BenchmarkDetails
from tasks.records.record import Counts
from tasks.records.samples import SAMPLES_NAME, Sample, read_samples
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

PROGRAM = Path(__file__).parents[2] / "fakes" / "harness.py"
MODEL = planned_model()


def fake(behaviour: str, copies: Mapping[str, str] | None = None) -> Commanded:
    """Returns an evaluator with a program that behaves as asked."""

    def made(model: EvaluatedModel, output: Path, python: Path) -> HarnessCommand:
        assert isinstance(model, RunningModel)
        return HarnessCommand(
            argv=(str(python), str(PROGRAM), behaviour, str(output)),
            variables={"OPENAI_API_KEY": model.api_key},
            files={"job.json": "{}"},
            copies=copies or {},
        )

    return Commanded(made=made, read=read)


def read(output: Path, config: EvaluationConfig) -> tuple[Parsed, Iterator[Sample]]:
    try:
        counts = Counts.model_validate_json((output / "results.json").read_bytes())
    except (OSError, ValueError) as error:
        raise HarnessOutputInvalid(expected="results", found=str(error), remedy="run it again") from error
    sample = Sample(benchmark="b", id="0", prompt="?", output="!", target=None, scores={"acc": 1.0})
    samples = (sample.model_copy(update={"id": str(number)}) for number in range(2))
    return Parsed(metrics=(), counts=counts, versions={}), samples


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LocalClient]:
    client = LocalClient(tmp_path / "jobs", grace_seconds=1.0)
    yield client
    client.shutdown()


def make_config(timeout_seconds: float = 60) -> EvaluationConfig:
    return EvaluationConfig(
        model_path="checkpoint",
        base_url=MODEL.base_url,
        evals=(EvalTaskConfig(name="benchmark"),),
        timeout_seconds=timeout_seconds,
    )


def run(behaviour: str, output: Path, client: LocalClient, **options) -> Parsed:
    config = make_config(options.pop("timeout_seconds", 60))
    evaluator = fake(behaviour, options.pop("copies", None))
    return run_harness(
        evaluator, MODEL, config, output=output, python=Path(sys.executable), client=client, poll_seconds=0.1, **options
    )


def test_harness_asks_pools_past_the_proxy_and_endpoints_through_it(
    tmp_path: Path, client: LocalClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "intranet")
    past = {}
    for name, direct in (("ours", True), ("others", False)):
        model = replace(MODEL, base_url="http://10.0.0.7:8000/v1", direct=direct)
        output, python = tmp_path / name, Path(sys.executable)
        run_harness(fake("succeed"), model, make_config(), output=output, python=python, client=client)
        past[name] = (output / "no_proxy.txt").read_text().split(",")
    assert past["others"] == ["intranet", "localhost", "127.0.0.1", "::1"]
    assert past["ours"] == ["intranet", "10.0.0.7", "localhost", "127.0.0.1", "::1"]


def test_harness_that_succeeds_is_parsed_and_keeps_log_and_files(tmp_path: Path, client: LocalClient):
    output, seen = tmp_path / "deep" / "output", []
    parsed = run("succeed", output, client, on_progress=seen.append)
    verify_counts(parsed)
    assert parsed.counts == Counts(requested=2, answered=2, scored=2)
    assert seen[-1] == Progress("asked", 2, 2)
    assert "asked 2/2" in (output / "harness.log").read_text()
    assert (output / "work" / "job.json").read_text() == "{}"
    assert (output / "work" / "here").exists()
    assert [sample.id for sample in read_samples(str(output / SAMPLES_NAME))] == ["0", "1"]
    assert parsed.samples == 2


def test_harness_output_twice_in_the_same_folder_gives_the_same(tmp_path: Path, client: LocalClient):
    with pytest.raises(UnknownBenchmark):
        run("refuse", tmp_path / "output", client)
    assert run("succeed", tmp_path / "output", client) == run("succeed", tmp_path / "output", client)


def test_harness_key_is_in_no_file_it_leaves(tmp_path: Path, client: LocalClient):
    run("succeed", tmp_path / "output", client)
    for path in (path for path in (tmp_path / "output").rglob("*") if path.is_file()):
        assert KEY not in path.read_text(errors="replace"), path
    assert "with key ***" in (tmp_path / "output" / "harness.log").read_text()


def test_harness_inherits_what_harnesses_need_and_no_key_of_its_user(
    tmp_path: Path, client: LocalClient, monkeypatch: pytest.MonkeyPatch
):
    keys = {"WANDB_API_KEY", "PREFECT_API_KEY", "AWS_SECRET_ACCESS_KEY", "ASSAY_ACTOR_KEY", "ASSAY_JUDGE_API_KEY"}
    needed = {"HF_TOKEN", "HF_ENDPOINT", "CUDA_VISIBLE_DEVICES", "https_proxy", "ASSAY_CACHE_DIR", "LC_ALL"}
    for name in keys | needed:
        monkeypatch.setenv(name, str(tmp_path))
    run("look_around", tmp_path / "output", client)
    variables = set(json.loads((tmp_path / "output" / "variables.json").read_text()))
    assert needed | {"PATH", "OPENAI_API_KEY"} <= variables
    assert not keys & variables


def test_harness_remote_folders_are_copied_into_the_working_folder(tmp_path: Path, client: LocalClient):
    import fsspec

    fsspec.filesystem("memory").pipe_file("/harness-copies/benchmarks/one.yaml", b"task: own")
    run("succeed", tmp_path / "output", client, copies={"own": "memory://harness-copies/benchmarks"})
    assert (tmp_path / "output" / "work" / "own" / "one.yaml").read_text() == "task: own"


def test_harness_exiting_nonzero_fails_with_its_last_lines_and_the_command(tmp_path: Path, client: LocalClient):
    with pytest.raises(HarnessFailed) as caught:
        run("fail", tmp_path / "output", client)
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.record_status == "failed"
    assert "the reason it gives" in error.found
    assert str(PROGRAM) in error.remedy and "OPENAI_API_KEY=" in error.remedy
    assert KEY not in str(error)
    assert "the reason it gives" in (tmp_path / "output" / "harness.log").read_text()


def test_harness_that_refuses_raises_what_it_refused_with(tmp_path: Path, client: LocalClient):
    with pytest.raises(UnknownBenchmark) as caught:
        run("refuse", tmp_path / "output", client)
    assert caught.value.remedy == "ask differently"
    assert caught.value.found == "no right to ask with ***"
    assert KEY not in (tmp_path / "output" / "refused.json").read_text()


@pytest.mark.parametrize(("behaviour", "size"), [("refuse_in_latin_1", None), ("refuse_at_length", 1 << 20)])
def test_refusal_that_is_not_utf_8_or_beyond_a_megabyte_counts_as_none(
    tmp_path: Path, client: LocalClient, behaviour: str, size: int | None
):
    with pytest.raises(AssayError):
        run(behaviour, tmp_path / "output", client)
    assert size in (None, (tmp_path / "output" / "refused.json").stat().st_size)


@pytest.mark.parametrize("content", ["[" * 100_000, "null", '{"kind": []}', '{"kind": "BadInput"}'])
def test_refusal_of_another_form_counts_as_none(tmp_path: Path, content: str):
    (tmp_path / "refused.json").write_text(content)
    assert refusal_in(tmp_path) is None


def test_harness_printing_garbage_gives_invalid_output(tmp_path: Path, client: LocalClient):
    with pytest.raises(HarnessOutputInvalid):
        run("print_garbage", tmp_path / "output", client)


def test_harness_past_its_wall_clock_is_ended_with_all_it_started(tmp_path: Path, client: LocalClient):
    output = tmp_path / "output"
    with pytest.raises(HarnessInterrupted) as caught:
        run("hang", output, client, timeout_seconds=3)
    assert caught.value.record_status == "infra_failed"
    assert "timeout_seconds" in caught.value.remedy
    for pid in map(int, (output / "pids").read_text().split()):
        eventually(lambda pid=pid: not is_alive(pid))


def test_harness_killed_from_outside_is_interrupted(tmp_path: Path, client: LocalClient):
    with pytest.raises(HarnessInterrupted) as caught:
        run("die", tmp_path / "output", client)
    assert "from outside" in caught.value.found


@pytest.mark.parametrize(("behaviour", "left"), [("hang", "pids"), ("refuse", "refused.json")])
def test_harness_is_ended_and_not_blamed_when_its_endpoint_is_gone(
    tmp_path: Path, client: LocalClient, behaviour: str, left: str
):
    output = tmp_path / "output"

    def check_endpoint() -> None:
        if (output / left).exists():
            raise EngineDied(expected="a replica", found="none", remedy="start a replica")

    with pytest.raises(EngineDied):
        run(behaviour, output, client, check_endpoint=check_endpoint)
    for pid in map(int, (output / "pids").read_text().split() if left == "pids" else ()):
        eventually(lambda pid=pid: not is_alive(pid))


def test_harness_output_folder_not_writable_is_a_storage_error(tmp_path: Path, client: LocalClient):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        run("succeed", tmp_path / "file" / "output", client)


def test_harness_answering_fewer_than_asked_is_withheld_by_its_counts(tmp_path: Path, client: LocalClient):
    parsed = run("answer_fewer", tmp_path / "output", client)
    with pytest.raises(CountsDisagree) as caught:
        verify_counts(parsed)
    assert caught.value.record_status == "withheld"
    assert {"2", "1"} <= set(re.findall(r"\d+", caught.value.found))


def test_counts_without_any_question_are_withheld():
    with pytest.raises(CountsDisagree):
        verify_counts(Parsed(metrics=(), counts=Counts(requested=0, answered=0, scored=0), versions={}))


@pytest.mark.parametrize("cut", [{"at_limit": 3}, {"at_limit": 1, "unclosed": 3}])
def test_verify_more_answers_cut_than_may_be_are_withheld(cut: dict[str, Any]):
    counts = Counts(requested=10, answered=10, scored=10)
    details = {"words": BenchmarkDetails(questions=10, **cut), "facts": BenchmarkDetails(questions=10)}
    parsed = Parsed(metrics=(), counts=counts, versions={}, details=details)
    verify_ends(parsed, None)
    verify_ends(parsed, 0.3)
    with pytest.raises(AnswersCutOff, match="3 of 10 of words") as caught:
        verify_ends(parsed, 0.29)
    assert caught.value.record_status == "withheld"


def test_answers_cut_during_an_early_decision_count_as_asked():
    details = {"words": BenchmarkDetails(questions=100, at_limit=3)}
    counts = Counts(requested=100, answered=10, scored=10)
    parsed = Parsed(metrics=(), counts=counts, versions={}, details=details, early=cast(Any, ("a verdict",)))
    verify_ends(parsed, 0.31)
    with pytest.raises(AnswersCutOff):
        verify_ends(parsed, 0.29)


def test_harness_command_does_not_show_its_variables():
    command = fake("succeed").command(MODEL, make_config(), Path("out"), python=Path(sys.executable))
    assert KEY not in repr(command)
    assert "PATH" in process_environment() and json.loads(command.files["job.json"]) == {}
