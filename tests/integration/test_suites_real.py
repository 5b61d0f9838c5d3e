"""Suites with real runners: every name is looked up, and every runner runs against a server with model-like answers.

Tiny benchmarks of the same names, in a separate folder, replace the benchmarks of a suite.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakes.cli import invoke
from fakes.command import run_command
from fakes.hub import running_hub
from fakes.models import write_nano_llama
from fakes.suites import endpoint, in_lm_eval, write_benchmark
from fakes.tokenizers import write_byte_tokenizer
from flows import suites as flows
from resources.environments.environments import ensure_environment
from resources.settings import deployment_data, settings
from tasks.errors import UnknownBenchmark
from tasks.evaluators.environments import LM_EVAL
from tasks.evaluators.helm.options import HelmOptions
from tasks.evaluators.lm_eval.evaluator import listing
from tasks.offline.stage import stage_texts, text_source
from tasks.records.record import Record
from tasks.spec.benchmark_sets import benchmark_sets, needs_of
from tasks.spec.evaluation import EvalTaskConfig
from tasks.spec.evaluators import Judge, options_as
from tasks.spec.suites import Suite, SuiteRequest, load_suite

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]

QUESTIONS = 2
FRESH = "fresh_"
FACTS = """
import json, sys
from lm_eval_index import built_in_index

index = built_in_index()

def facts(part):
    # Pairs of output type and own number of examples; a part is a name, or a piece of a group's file.
    if isinstance(part, str):
        entry = index[part]
        if entry.yaml_path is None:
            return set().union(*map(facts, entry.tags))
        part = entry.cfg
    within = part.get("task")
    if isinstance(within, list):
        return set().union(*map(facts, within))
    if "group" in part and part["group"] in index and "output_type" not in part:
        return facts(part["group"])
    if "dataset_path" not in part and "class" not in part and within in index:
        return facts(within)
    # The benchmarks that are classes, not files, all let the model write.
    return {(part.get("output_type", "generate_until"), part.get("num_fewshot"))}

print(json.dumps({name: list(facts(name)) for name in json.load(sys.stdin)}))
"""


@pytest.fixture(scope="session")
def python() -> Path:
    return ensure_environment(LM_EVAL).python


@pytest.fixture(scope="module")
def theirs(python: Path) -> dict[str, list[tuple[str, int | None]]]:
    """Returns output type and default number of examples of every task in the benchmark sets that come with lm-eval."""
    names = {task.name for benchmark_set in benchmark_sets().values() for task in benchmark_set.evals}
    named = sorted(name for name in names if not name.startswith(FRESH))
    assert not set(named) - set(listing(python).benchmarks)
    return json.loads(in_lm_eval(python, FACTS, given=named))


def test_every_benchmark_of_every_set_is_there_and_asks_for_what_the_data_say(theirs: dict[str, list[tuple[str, Any]]]):
    for name, facts in theirs.items():
        kinds = {kind for kind, _ in facts}
        needs = needs_of([EvalTaskConfig(name=name)])
        assert needs.generates is ("generate_until" in kinds), name
        assert needs.prompt_logprobs is bool(kinds - {"generate_until"}), name
    runners = {
        name
        for benchmark_set in benchmark_sets().values()
        for name in (t.name for t in benchmark_set.evals if needs_of([t]).runs_code)
    }
    assert runners == {"humaneval"}


def test_no_set_names_examples_that_lm_eval_would_leave_out(theirs: dict[str, list[tuple[str, int | None]]]):
    left_out = [
        f"{name}: {task.name}"
        for name, benchmark_set in benchmark_sets().items()
        for task in benchmark_set.evals
        if task.num_fewshot and not task.force_fewshot and 0 in {own for _, own in theirs.get(task.name, [])}
    ]
    assert left_out == []


def test_check_searches_an_own_folder_for_every_harness(tmp_path: Path, tiny: Callable[[str], Path]):
    folder = tiny("on_gpu")
    (folder / "copa.yaml").rename(folder / "mine.yaml")
    (folder / "mine.yaml").write_text((folder / "mine.yaml").read_text().replace('"copa"', '"mine"'))
    (folder / "helm").mkdir()
    entry = {"run_entry": "custom_mcqa", "arguments": {"path": "shapes.jsonl"}}
    (folder / "helm" / "shapes.json").write_text(json.dumps(entry))
    (folder / "wishes.json").write_text(json.dumps([{"instruction": "Sing.", "output": "La."}]))
    asked = {"lm_evaluation_harness": "mine", "helm": "shapes", "alpaca_eval": "wishes"}
    evaluations = [{"label": name, "evaluator": evaluator, "evals": [name]} for evaluator, name in asked.items()]
    suite = tmp_path / "own.yaml"
    for missing in (None, *asked.values()):
        changed = [
            {**evaluation, "evals": ["gone"]} if evaluation["label"] == missing else evaluation
            for evaluation in evaluations
        ]
        suite.write_text(json.dumps({"name": "own", "description": "A suite for this test.", "evaluations": changed}))
        done = invoke(["suites", str(suite), "--check", "--benchmarks", str(folder)])
        assert isinstance(done.exception, UnknownBenchmark) is (missing is not None), done.output
        assert missing is None or "gone" in str(done.exception)
    without = invoke(["suites", str(suite), "--check"])
    assert "mine of own" in str(without.exception)


# Runners


@dataclass(frozen=True)
class Served:
    base_url: str
    run: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    for step in (1, 2):
        write_byte_tokenizer(write_nano_llama(folder / "run" / "hf" / f"step-{step}", seed=step))
    with endpoint(folder, "run-1", "run-2") as base_url:
        yield Served(base_url, folder / "run")


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[[str], Path]:
    def write(suite: str) -> Path:
        folder = tmp_path / "benchmarks"
        folder.mkdir()
        answers = {"answer": "yes", "answers": [["yes"]], "gold": [0]}  # as sets that override targets name them
        rows = [json.dumps({"question": f"Is it {number}?", **answers}) for number in range(12)]
        (folder / "questions.jsonl").write_text("\n".join(rows))
        for name in {task.name for evaluation in load_suite(suite).evaluations for task in evaluation.evals}:
            write_benchmark(folder, name)
        return folder

    return write


def request_for(served: Served, folder: Path | None, output: Path, **changes: Any) -> SuiteRequest:
    return SuiteRequest.model_validate(
        {
            "model_path": str(served.run),
            "evaluation_path": str(output),
            "base_url": served.base_url,
            "benchmarks_path": str(folder) if folder else None,
            "max_eval_instances": QUESTIONS,
            **changes,
        }
    )


def run_deployed(runner: str, **parameters: Any) -> list[Record]:
    """Runs a flow with the parameters of its deployment and further parameters."""
    content = yaml.safe_load(deployment_data("prefect.yaml").read_text())["deployments"]
    [deployed] = [
        deployment["parameters"] for deployment in content if deployment["entrypoint"] == f"flows.suites.{runner}"
    ]
    return getattr(flows, runner)(**(deployed | parameters))


def assert_succeeded(records: list[Record], *, cells: int, published: set[str]) -> None:
    assert [record.status for record in records] == ["succeeded"] * cells
    assert {metric.benchmark for record in records for metric in record.metrics} == published


@pytest.mark.usefixtures("prefect_api")
@pytest.mark.parametrize(
    ("runner", "suite", "changes", "cells"),
    [
        ("default_key_evals", "default_key_evals", {"allow_code_execution": ["humaneval"]}, 2),
        ("default_sft_eval", "default_sft_eval", {"only": ["leaderboard_gen"]}, 1),
        ("run_base_model_evals", "base_model", {}, 3),
        ("run_lm_eval_harness", "lm_eval_harness", {"only": ["truthfulness"]}, 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_runner_evaluates_its_suite_and_publishes_every_benchmark(
    tmp_path: Path,
    served: Served,
    tiny: Callable[[str], Path],
    runner: str,
    suite: str,
    changes: dict[str, Any],
    cells: int,
):
    request = request_for(served, tiny(suite), tmp_path / "evaluations", **changes)
    selects = not runner.startswith("default_")
    records = run_deployed(runner, request=request, **({"selection": {"steps": [1]}} if selects else {}))
    assert {record.checkpoint.step for record in records} == {1 if selects else 2}
    evaluations = [
        evaluation
        for evaluation in load_suite(suite).evaluations
        if not request.only or evaluation.label in request.only
    ]
    assert_succeeded(
        records, cells=cells, published={task.metric_key for evaluation in evaluations for task in evaluation.evals}
    )
    assert all(f"suite={suite}" in record.tags for record in records)


@pytest.fixture
def _own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A new machine that has the environments and no data yet.
    environments, cache = settings().environments_dir, tmp_path / "cache"
    cache.mkdir()
    (cache / "environments").symlink_to(environments)
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(cache))
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    settings.cache_clear()


@pytest.mark.usefixtures("prefect_api")
def test_suite_of_helm_asks_every_subject_of_mmlu_and_publishes_their_mean(tmp_path: Path, served: Served):
    whole = load_suite("helm")
    path = options_as(HelmOptions, whole.evaluations[0].evaluator).run_specs_path
    entries = Path(str(path)).read_text().splitlines(keepends=True)
    few = [line for line in entries if "subject=" not in line or re.search("=(anatomy|marketing|virology),", line)]
    (tmp_path / "few.conf").write_text("".join(few))
    subjects = re.findall("subject=([a-z_]+)", "".join(few))
    for split in ("dev", "val", "test"):  # as `assay stage` leaves them
        folder = settings().cache_dir / "helm" / "scenarios" / "mmlu" / "data" / split
        folder.mkdir(parents=True)
        for subject in subjects:
            (folder / f"{subject}_{split}.csv").write_text(
                "".join(f"Is it {n}?,no,yes,never,perhaps,B\n" for n in "12")
            )
    evaluation = whole.evaluations[0].model_dump(mode="json")
    evaluation["evaluator"]["run_specs_path"] = str(tmp_path / "few.conf")
    suite = Suite.model_validate({**whole.model_dump(mode="json"), "evaluations": [evaluation]})
    request = request_for(served, None, tmp_path / "evaluations", max_eval_instances=1)
    [record] = run_deployed("run_helm", suite=suite, request=request, selection={"steps": [1]})
    assert record.status == "succeeded" and record.counts is not None
    assert record.counts.scored == len(subjects) == 3
    values = {m.benchmark: m.value for m in record.metrics if m.name == "exact_match"}
    assert values.keys() == {"mmlu", *(f"mmlu.subject={subject}" for subject in subjects)}
    assert values.pop("mmlu") == pytest.approx(statistics.fmean(values.values()))


@pytest.mark.usefixtures("prefect_api", "_own_machine")
def test_alpaca_runner_compares_with_the_official_outputs_as_the_named_judge_says(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
):
    rows = [{"instruction": f"Say {n}.", "output": f"{n}", "generator": "baseline", "dataset": "a"} for n in range(4)]
    official = {"alpaca_eval_gpt4_baseline.json": json.dumps(rows).encode()}
    judge = Judge(annotator="demo_verdict", constrained=True)
    with running_hub({"datasets/tatsu-lab/alpaca_eval": official}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        request = request_for(served, None, tmp_path / "evaluations", judge=judge)
        [record] = run_deployed("run_alpaca_eval", request=request, selection={"steps": [1]})
    assert record.status == "succeeded" and record.counts is not None
    assert record.counts.scored == QUESTIONS
    assert {(metric.benchmark, metric.name) for metric in record.metrics} >= {("alpaca_eval", "win_rate")}


@pytest.mark.usefixtures("prefect_api")
def test_step_of_a_run_is_evaluated_by_its_number(tmp_path: Path, served: Served):
    request = request_for(served, None, tmp_path / "evaluations")
    evals = (EvalTaskConfig(name="demo_mcqa"),)
    [record] = run_deployed("evaluate_helm_on_step", request=request, evals=evals, step=1)
    assert (record.checkpoint.step, record.evaluator, record.status) == (1, "helm", "succeeded")
    assert {metric.benchmark for metric in record.metrics} == {"demo_mcqa"}


@pytest.mark.usefixtures("prefect_api")
def test_default_eval_evaluates_the_latest_checkpoint_on_a_single_set(
    tmp_path: Path, served: Served, tiny: Callable[[str], Path]
):
    request = request_for(served, tiny("base_model"), tmp_path / "evaluations")
    [latest] = flows.default_eval(request, evals="MMLU_0_SHOT")
    assert (latest.checkpoint.step, latest.status) == (2, "succeeded")


@pytest.mark.usefixtures("prefect_api")
def test_fresh_texts_staged_from_a_folder_give_bits_per_byte_without_a_network(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ASSAY_OFFLINE", "1")
    settings.cache_clear()
    originals = tmp_path / "originals"
    originals.mkdir()
    source = text_source("uncheatable")
    texts = json.dumps([f"Text number {number} was written today." for number in range(3)])
    files = {name: file.model_copy(update={"blob": None}) for name, file in source.files.items()}
    for file in files.values():
        (originals / file.path).write_text(texts)
    changed = source.model_copy(update={"base": str(originals), "files": files})
    stage_texts(changed, tmp_path / "fresh", on_event=lambda line: None)
    request = request_for(served, tmp_path / "fresh", tmp_path / "evaluations")
    [record] = run_deployed("run_uncheatable_evals", request=request, selection={"steps": [1]})
    assert record.status == "succeeded" and record.counts is not None
    assert record.counts.scored == QUESTIONS * len(files)
    assert {m.benchmark for m in record.metrics if m.name == "bits_per_byte"} == {FRESH + name for name in files}


@pytest.mark.usefixtures("prefect_api")
def test_suite_file_on_the_command_line_runs_several_evaluators_on_an_endpoint(tmp_path: Path, served: Served):
    suite = tmp_path / "mine.yaml"
    content = {
        "name": "mine",
        "description": "Two harnesses, tiny data.",
        "evaluations": [
            {"label": "facts", "evals": ["demo_facts"]},
            {"label": "helm", "evaluator": "helm", "evals": ["demo_mcqa"]},
        ],
    }
    suite.write_text(json.dumps(content))
    given = ["--model", served.run, "--base-url", served.base_url, "--output", tmp_path / "out"]
    done = run_command("evaluate", "--suite", suite, "--step", "2", "--json", *given, "--limit", str(QUESTIONS))
    assert done.returncode == 0, done.stderr
    statuses = {record["evaluator"]: record["status"] for record in json.loads(done.stdout)["records"]}
    assert statuses == {"lm_evaluation_harness": "succeeded", "helm": "succeeded"}
