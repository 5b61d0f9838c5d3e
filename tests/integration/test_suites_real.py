"""Suites and staging with lm-eval itself: every name looked up, every runner run, and a hub that counts requests.

The benchmarks of a suite are replaced by tiny ones of the same names, in a folder of one's own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow

from fakes import engine as engine_program
from fakes.hub import FakeHub, running_hub
from fakes.models import CONFIG, write_checkpoint
from fakes.polling import eventually
from fakes.tokenizers import write_byte_tokenizer
from flows import suites as flows
from resources.environments import ENVIRONMENTS, ensure_environment
from resources.errors import StagingIncomplete
from resources.settings import process_environment, settings
from tasks.benchmark_sets import benchmark_sets, needs_of
from tasks.config import EvalTaskConfig
from tasks.evaluators.lm_eval_index import listed_benchmarks
from tasks.records import Record
from tasks.staged_texts import stage_texts, text_source
from tasks.staging import Wanted, fill_from, share_staged, stage
from tasks.suites import SuiteRequest, load_suite

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]

PROGRAMS = Path(flows.__file__).parents[1] / "tasks" / "programs"
QUESTIONS = 2
WORKERS = 100
FRESH = "fresh_"
KINDS = """
import json, sys
from lm_eval_index import built_in_index

index = built_in_index()

def kinds(part):
    # A part is a name, or a piece of a group's file.
    if isinstance(part, str):
        entry = index[part]
        if entry.yaml_path is None:
            return set().union(*map(kinds, entry.tags))
        part = entry.cfg
    within = part.get("task")
    if isinstance(within, list):
        return set().union(*map(kinds, within))
    if "group" in part and part["group"] in index and "output_type" not in part:
        return kinds(part["group"])
    if "dataset_path" not in part and "class" not in part and within in index:
        return kinds(within)
    # The benchmarks that are classes, not files, all let the model write.
    return {part.get("output_type", "generate_until")}

print(json.dumps({name: sorted(kinds(name)) for name in json.load(sys.stdin)}))
"""
WORK = """
import json, os, sys
from contextlib import chdir
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer
from lm_eval_index import use_remembered_index

names, folder, workers = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
use_remembered_index()
children = []
for _ in range(workers):
    if (child := os.fork()) == 0:
        manager = TaskManager(include_defaults=False, include_path=folder)
        loaded = manager.load(names)
        questions = [len(task.eval_docs) for task in loaded["tasks"].values()]
        AutoTokenizer.from_pretrained("acme/tok")
        os._exit(0 if questions and all(questions) else 1)
    children.append(child)
    if len(children) == 4:
        assert os.waitpid(children.pop(0), 0)[1] == 0
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""


@pytest.fixture(scope="session")
def python() -> Path:
    return ensure_environment(ENVIRONMENTS["lm-eval"]).python


def in_lm_eval(python: Path, code: str, *arguments: str, given: Any = None, **variables: str) -> str:
    """What a piece of code prints that runs in lm-eval's environment, beside our programs."""
    code = f"import sys; sys.path.append({str(PROGRAMS)!r})\n{code}"
    done = subprocess.run(
        [str(python), "-I", "-c", code, *arguments],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        env=process_environment(variables),
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_benchmark_of_every_set_is_there_and_asks_for_what_the_data_say(python: Path):
    tasks = {task.name: task for one in benchmark_sets().values() for task in one.evals}
    theirs = {name: task for name, task in tasks.items() if not name.startswith(FRESH)}
    missing = set(theirs) - set(listed_benchmarks(python))
    assert not missing
    kinds: dict[str, list[str]] = json.loads(in_lm_eval(python, KINDS, given=sorted(theirs)))
    for name, found in kinds.items():
        needs = needs_of([theirs[name]])
        assert needs.generates is ("generate_until" in found), name
        if name != "squadv2":  # a class that both writes and compares
            assert needs.prompt_logprobs is bool(set(found) - {"generate_until"}), name
    runners = {
        name for one in benchmark_sets().values() for name in (t.name for t in one.evals if needs_of([t]).runs_code)
    }
    assert runners == {"humaneval"}


# Runners


@dataclass(frozen=True)
class Served:
    """The deterministic engine in a process of its own, and a run with one checkpoint that it serves."""

    base_url: str
    run: Path


@contextmanager
def endpoint(folder: Path, *models: str) -> Iterator[str]:
    address = folder / "engine.json"
    command = [sys.executable, str(engine_program.__file__), "--address-file", str(address), "--faults", "{}"]
    process = subprocess.Popen(command + [part for name in models for part in ("--model", name)])
    try:
        eventually(address.is_file)
        yield f"{json.loads(address.read_text())['url']}/v1"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    for step in (1, 2):
        config = {**CONFIG, "num_attention_heads": 1}
        write_byte_tokenizer(write_checkpoint(folder / "run" / "hf" / f"step-{step}", seed=step, config=config))
    with endpoint(folder, "run-1", "run-2") as base_url:
        yield Served(base_url, folder / "run")


def write_benchmark(folder: Path, name: str) -> None:
    """A tiny benchmark of that name, which asks for what the real one asks for."""
    writes = needs_of([EvalTaskConfig(name=name)]).generates
    way = (
        {
            "output_type": "generate_until",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
        }
        if writes
        else {"output_type": "multiple_choice", "doc_to_target": 0, "doc_to_choice": ["yes", "no"]}
    )
    content = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}},
        "test_split": "test",
        "fewshot_split": "test",
        "doc_to_text": "{{question}}",
        **way,
        "metric_list": [{"metric": "exact_match" if writes else "acc"}],
        "metadata": {"version": 1},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(content))


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a folder with tiny benchmarks in place of those of a suite."""

    def write(suite: str) -> Path:
        folder = tmp_path / "benchmarks"
        folder.mkdir()
        rows = [json.dumps({"question": f"Is it {number}?", "answer": "yes"}) for number in range(12)]
        (folder / "questions.jsonl").write_text("\n".join(rows))
        for name in {task.name for one in load_suite(suite).evaluations for task in one.evals}:
            write_benchmark(folder, name)
        return folder

    return write


def request_for(served: Served, folder: Path, output: Path, **changes: Any) -> SuiteRequest:
    return SuiteRequest.model_validate(
        {
            "model_path": str(served.run),
            "evaluation_path": str(output),
            "base_url": served.base_url,
            "benchmarks_path": str(folder),
            "max_eval_instances": QUESTIONS,
            **changes,
        }
    )


def assert_succeeded(records: list[Record], *, cells: int, published: set[str]) -> None:
    assert [record.status for record in records] == ["succeeded"] * cells
    assert {metric.benchmark for record in records for metric in record.metrics} == published


@pytest.mark.usefixtures("prefect_api")
@pytest.mark.parametrize(
    ("runner", "suite", "changes", "cells"),
    [
        (flows.run_key_evals, "key_evals", {"allow_code_execution": ["humaneval"]}, 2),
        (flows.run_base_model_evals, "base_model", {}, 3),
        (flows.run_sft_model_evals, "sft_model", {"only": ["mmlu_5shot", "leaderboard_gen"]}, 2),
        (flows.run_on_gpu, "on_gpu", {"only": ["mmlu_0shot"]}, 1),
        (flows.run_lm_eval_harness, "lm_eval_harness", {"only": ["truthfulness"]}, 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_runner_evaluates_its_suite_and_publishes_every_benchmark(
    tmp_path: Path,
    served: Served,
    tiny: Callable[[str], Path],
    runner: Flow[Any, list[Record]],
    suite: str,
    changes: dict[str, Any],
    cells: int,
):
    request = request_for(served, tiny(suite), tmp_path / "evaluations", **changes)
    records = runner(request, flows.CheckpointSelection(steps=(1,)))
    wanted = [one for one in load_suite(suite).evaluations if not request.only or one.label in request.only]
    assert_succeeded(records, cells=cells, published={task.metric_key for one in wanted for task in one.evals})
    assert all(f"suite={suite}" in record.tags for record in records)


@pytest.mark.usefixtures("prefect_api")
def test_default_eval_and_a_step_named_by_number_evaluate_one_checkpoint(
    tmp_path: Path, served: Served, tiny: Callable[[str], Path]
):
    request = request_for(served, tiny("base_model"), tmp_path / "evaluations")
    [latest] = flows.default_eval(request, evals="MMLU_0_SHOT")
    assert (latest.checkpoint.step, latest.status) == (2, "succeeded")
    evals = (EvalTaskConfig(name="copa"),)
    [first] = flows.evaluate_lm_evaluation_harness_on_step(request, evals, step=1)
    assert (first.checkpoint.step, {metric.benchmark for metric in first.metrics}) == (1, {"copa"})


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
    [record] = flows.run_uncheatable_evals(request, flows.CheckpointSelection(steps=(1,)))
    assert record.status == "succeeded" and record.counts is not None
    assert record.counts.scored == QUESTIONS * len(files)
    assert {m.benchmark for m in record.metrics if m.name == "bits_per_byte"} == {FRESH + name for name in files}


@pytest.mark.usefixtures("prefect_api")
def test_suite_file_on_the_command_line_runs_several_evaluators_on_one_endpoint(
    tmp_path: Path, served: Served, prefect_api: str
):
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
    command = [str(Path(sys.executable).with_name("assay")), "evaluate", "--suite", str(suite), "--step", "2", "--json"]
    command += ["--model", str(served.run), "--base-url", served.base_url, "--output", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--limit", str(QUESTIONS)],
        capture_output=True,
        text=True,
        env=process_environment({"PREFECT_API_URL": prefect_api}),
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = {record["evaluator"]: record["status"] for record in json.loads(done.stdout)["records"]}
    assert found == {"lm_evaluation_harness": "succeeded", "helm": "succeeded"}


# Staging


@dataclass(frozen=True)
class Region:
    """A hub that counts, and benchmarks whose data lie there."""

    hub: FakeHub
    benchmarks: Path
    names: tuple[str, ...] = ("both", "plain")

    @property
    def wanted(self) -> Wanted:
        return Wanted(benchmarks=self.names, tokenizers=("acme/tok",))

    def stage(self, **options: Any) -> dict[str, Any]:
        wanted = options.pop("wanted", self.wanted)
        return stage(wanted, benchmarks_path=str(self.benchmarks), **options)


def questions(kind: str) -> bytes:
    rows = [{"question": f"{kind} {number}?", "answer": "yes"} for number in range(5)]
    return "\n".join(json.dumps(row) for row in rows).encode()


def card(*parts: str) -> bytes:
    entries = "".join(f"- config_name: {p}\n  data_files:\n  - split: test\n    path: {p}.jsonl\n" for p in parts)
    return f"---\nconfigs:\n{entries}---\n".encode()


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    folder = tmp_path / "own"
    folder.mkdir()
    datasets = {"quiz_a": ("acme/quiz", "a"), "quiz_b": ("acme/quiz", "b"), "plain": ("acme/plain", None)}
    for name, (path, part) in datasets.items():
        write_benchmark(folder, name)
        content = json.loads((folder / f"{name}.yaml").read_text())
        data = {"dataset_path": path, "dataset_name": part, "dataset_kwargs": {}}
        (folder / f"{name}.yaml").write_text(json.dumps({**content, **data}))
    (folder / "both.yaml").write_text(json.dumps({"group": "both", "task": ["quiz_a", "quiz_b"]}))
    tokenizer = write_byte_tokenizer(tmp_path / "tok")
    repositories = {
        "datasets/acme/quiz": {"README.md": card("a", "b"), "a.jsonl": questions("a"), "b.jsonl": questions("b")},
        "datasets/acme/plain": {"test.jsonl": questions("p")},
        "models/acme/tok": {file.name: file.read_bytes() for file in tokenizer.iterdir()},
    }
    with running_hub(repositories) as hub:
        yield Region(hub, folder)


@pytest.fixture
def machine(tmp_path: Path, region: Region, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, str]]:
    """Goes to another machine: an empty cache, with the environments that are built; the variables of its workers."""
    environments = settings().environments_dir
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def go(name: str) -> dict[str, str]:
        cache = tmp_path / name
        cache.mkdir()
        (cache / "environments").symlink_to(environments)
        monkeypatch.setenv("ASSAY_CACHE_DIR", str(cache))
        monkeypatch.setenv("HF_ENDPOINT", region.hub.url)
        settings.cache_clear()
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        return {"HF_HOME": str(cache / "hub"), "HF_ENDPOINT": region.hub.url, **offline}

    return go


def test_staged_data_serve_a_hundred_offline_workers_and_another_machine_without_one_request(
    tmp_path: Path, region: Region, machine: Callable[[str], dict[str, str]], python: Path
):
    workers = machine("here")
    region.hub.limited = 2
    events: list[str] = []
    staged = region.stage(on_event=events.append)
    assert [event for event in events if "asks to wait" in event]
    for path in ("acme/quiz", "acme/plain"):
        assert staged["datasets"][path]["revision"] == region.hub.commit(f"datasets/{path}")
        assert staged["datasets"][path]["bytes"] > 0
    assert staged["tokenizers"]["acme/tok"]["revision"] == region.hub.commit("models/acme/tok")

    region.hub.requests.clear()
    assert region.stage() == staged
    names = json.dumps(["quiz_a", "quiz_b", "plain"])
    in_lm_eval(python, WORK, names, str(region.benchmarks), str(WORKERS), **workers)
    shared = str(tmp_path / "shared")
    assert share_staged(shared) > 0
    assert share_staged(shared) == 0

    elsewhere = machine("elsewhere")
    found, number = fill_from(shared, region.wanted)
    assert number > 0 and found["datasets"] == staged["datasets"]
    in_lm_eval(python, WORK, names, str(region.benchmarks), "1", **elsewhere)
    assert region.hub.requests == []


def test_staging_goes_on_with_what_is_missing_and_keeps_revisions_until_a_refresh(
    region: Region, machine: Callable[[str], dict[str, str]]
):
    machine("here")
    gone = region.hub.repositories.pop("datasets/acme/plain")
    with pytest.raises(StagingIncomplete, match="plain: "):
        region.stage(prove=False)
    region.hub.repositories["datasets/acme/plain"] = gone
    region.hub.repositories["datasets/acme/quiz"]["a.jsonl"] += b"\n" + questions("c")
    region.hub.requests.clear()
    staged = region.stage(prove=False)
    assert set(staged["benchmarks"]) == set(region.names)
    assert region.hub.requests and not [one for one in region.hub.requests if "acme/quiz" in one or "acme/tok" in one]
    assert staged["datasets"]["acme/quiz"]["revision"] != region.hub.commit("datasets/acme/quiz")
    newer = region.stage(prove=False, refresh=True)
    assert newer["datasets"]["acme/quiz"]["revision"] == region.hub.commit("datasets/acme/quiz")


def test_benchmark_whose_data_cannot_be_had_without_a_network_is_named(
    region: Region, machine: Callable[[str], dict[str, str]]
):
    machine("here")
    content = json.loads((region.benchmarks / "plain.yaml").read_text())
    address = f"{region.hub.url}/datasets/acme/plain/resolve/main/test.jsonl"
    data = {"task": "linked", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": address}}}
    (region.benchmarks / "linked.yaml").write_text(json.dumps({**content, **data}))
    with pytest.raises(StagingIncomplete, match=r"linked: .*offline mode"):
        region.stage(wanted=Wanted(benchmarks=("linked", "plain")))
    assert set(json.loads((settings().cache_dir / "staged.json").read_text())["benchmarks"]) == {"plain"}
