"""Staging with a hub and a web server that count requests, and harnesses that run without any network after it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fakes.hub import FakeHub, running_hub
from fakes.suites import endpoint, in_lm_eval, write_benchmark
from fakes.tokenizers import write_byte_tokenizer
from flows.staging import StagingRequest, staged_by
from pools.endpoint import RunningModel
from resources.backends.local.client import LocalClient
from resources.environments.environments import ensure_environment
from resources.settings import process_environment, settings
from tasks.errors import StagingIncomplete
from tasks.evaluators.environments import LM_EVAL
from tasks.evaluators.evaluator import evaluator_of
from tasks.evaluators.harness import run_harness, verify_counts
from tasks.offline.stage import fill_from, share_staged, stage
from tasks.offline.wanted import Wanted
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.suites import SuiteRequest, load_suite

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]

WORKERS = 3
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
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return ensure_environment(LM_EVAL).python


@dataclass(frozen=True)
class Region:
    """A hub that counts requests, and benchmarks with data from it."""

    hub: FakeHub
    benchmarks: Path
    names: tuple[str, ...] = ("both", "plain")

    @property
    def required(self) -> Wanted:
        return Wanted(benchmarks=self.names, tokenizers=("acme/tok",))

    def stage(self, **options: Any) -> dict[str, Any]:
        needs = options.pop("required", self.required)
        return stage(needs, benchmarks_path=str(self.benchmarks), **options)


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
    """Switches to a new machine: an empty cache with the built environments; returns the variables of its workers."""
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


def test_staging_goes_on_where_it_failed_and_serves_offline_workers_here_and_on_a_machine_filled_from_the_copy(
    tmp_path: Path, region: Region, machine: Callable[[str], dict[str, str]], python: Path
):
    workers = machine("here")
    region.hub.limited = 2
    events: list[str] = []
    gone = region.hub.repositories.pop("datasets/acme/plain")
    with pytest.raises(StagingIncomplete, match="plain: "):
        region.stage(prove=False, on_event=events.append)
    assert [event for event in events if "asks to wait" in event]
    before = region.hub.commit("datasets/acme/quiz")

    # Stages only missing data, and no newer revision of data that exists.
    region.hub.repositories["datasets/acme/plain"] = gone
    region.hub.repositories["datasets/acme/quiz"]["a.jsonl"] += b"\n" + questions("c")
    region.hub.requests.clear()
    staged = region.stage()
    assert set(staged["benchmarks"]) == set(region.names)
    assert region.hub.requests and not [
        request for request in region.hub.requests if "acme/quiz" in request or "acme/tok" in request
    ]
    assert staged["datasets"]["acme/quiz"]["revision"] == before != region.hub.commit("datasets/acme/quiz")
    assert staged["datasets"]["acme/plain"]["revision"] == region.hub.commit("datasets/acme/plain")
    assert all(staged["datasets"][path]["bytes"] > 0 for path in ("acme/quiz", "acme/plain"))
    assert staged["tokenizers"]["acme/tok"]["revision"] == region.hub.commit("models/acme/tok")

    region.hub.requests.clear()
    assert region.stage() == staged
    names = json.dumps(["quiz_a", "quiz_b", "plain"])
    in_lm_eval(python, WORK, names, str(region.benchmarks), str(WORKERS), **workers)
    shared = str(tmp_path / "shared")
    assert share_staged(shared) > 0
    assert share_staged(shared) == 0

    elsewhere = machine("elsewhere")
    filled, number = fill_from(shared, region.required)
    assert number > 0 and filled["datasets"] == staged["datasets"]
    in_lm_eval(python, WORK, names, str(region.benchmarks), "1", **elsewhere)
    assert region.hub.requests == []

    # A refresh, and a benchmark with data that is unavailable without a network.
    content = json.loads((region.benchmarks / "plain.yaml").read_text())
    address = f"{region.hub.url}/datasets/acme/plain/resolve/main/test.jsonl"
    data = {"task": "linked", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": address}}}
    (region.benchmarks / "linked.yaml").write_text(json.dumps({**content, **data}))
    with pytest.raises(StagingIncomplete, match=r"linked: .*offline mode"):
        region.stage(required=Wanted(benchmarks=("linked", *region.names)), refresh=True)
    newer = json.loads((settings().cache_dir / "staged.json").read_text())
    assert set(newer["benchmarks"]) == set(region.names)
    assert newer["datasets"]["acme/quiz"]["revision"] == region.hub.commit("datasets/acme/quiz")


# HELM and AlpacaEval

BABI = "http://www.thespermwhale.com/jaseweston/babi/tasks_1-20_v1-2.tar.gz"
"""Address from which HELM fetches bAbI; the fake hub answers in place of the network's proxy."""
REVIEWS = "maritaca-ai/imdb_pt"
HELM_EVALUATIONS = [
    {"label": "reviews", "evaluator": {"name": "helm", "site": False}, "evals": ["imdb_ptbr"]},
    {
        "label": "stories",
        "evaluator": {"name": "helm", "site": False},
        "evals": [{"name": "babi_qa", "num_fewshot": 1, "task_kwargs": {"task": 1}}],
    },
]
ALPACA_EVALUATION = {
    "label": "alpaca",
    "evals": ["alpaca_eval"],
    "apply_chat_template": True,
    "evaluator": {
        "name": "alpaca_eval",
        "judge": {"annotator": "demo_verdict", "constrained": True},
        "generation_params": {"temperature": 0, "max_new_tokens": 8},
    },
}


def stories() -> bytes:
    """Returns the bAbI archive with a single task, and stories about a single person."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for split in ("train", "valid", "test"):
            content = b"1 Mary went to the garden.\n2 Where is Mary?\tgarden\t1\n" * 6
            entry = tarfile.TarInfo(f"tasks_1-20_v1-2/en-valid/qa1_{split}.txt")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def reviews() -> bytes:
    rows = [{"text": f"Filme {number}.", "label": number % 2} for number in range(8)]
    return "\n".join(json.dumps(row) for row in rows).encode()


def length_control(instructions: int) -> bytes:
    """Returns verdicts on a model with longer and a model with shorter outputs, in AlpacaEval's columns."""
    lines = ["index,model,std_delta_len,preference,instruction_difficulty,not_gamed_baseline"]
    for name, sign in (("longer", 1), ("shorter", -1)):
        lines += [f"{index},{name},{sign},{0.5 + sign / 8},{index / 24},False" for index in range(instructions)]
    return ("\n".join(lines) + "\n").encode()


@pytest.fixture
def web(region: Region, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The hub with the data that these harnesses fetch; it is all of the reachable network."""
    rows = [{"instruction": f"Say {n}.", "output": f"{n}", "generator": "baseline", "dataset": "a"} for n in range(24)]
    alpaca = {"alpaca_eval_gpt4_baseline.json": json.dumps(rows).encode(), "df_gamed.csv": length_control(24)}
    region.hub.repositories["datasets/tatsu-lab/alpaca_eval"] = alpaca
    region.hub.repositories[f"datasets/{REVIEWS}"] = {"train.jsonl": reviews(), "test.jsonl": reviews()}
    region.hub.addresses[BABI] = stories()
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, region.hub.url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1,localhost")
    return region.hub


def write_suite(folder: Path, *evaluations: dict[str, Any], **content: Any) -> str:
    given = {"name": "elsewhere", "description": "Data that harnesses fetch themselves.", "evaluations": evaluations}
    (folder / "elsewhere.yaml").write_text(json.dumps({**given, **content}))
    return str(folder / "elsewhere.yaml")


def scored(config: EvaluationConfig, base_url: str, folder: Path, client: LocalClient) -> dict[str, int | None]:
    """Runs the harness itself; returns the number of samples behind each metric."""
    evaluator = evaluator_of(config)
    python = ensure_environment(evaluator.environment(config)).python
    model = RunningModel(
        base_url=base_url,
        model="m",
        tokenizer=str(write_byte_tokenizer(folder / "tokenizer")),
        capacity=8,
        prompt_logprobs=True,
        request_timeout_seconds=60.0,
        max_model_len=2048,
        apply_chat_template=config.asks_in_chat,
        api_key="none",
    )
    output = folder / config.evals[0].name
    parsed = run_harness(evaluator, model, config, output=output, python=python, client=client, poll_seconds=0.1)
    verify_counts(parsed)
    return {metric.name: metric.n for metric in parsed.metrics}


def test_two_processes_stage_once_and_a_machine_filled_from_it_stays_offline(
    tmp_path: Path, web: FakeHub, machine: Callable[[str], dict[str, str]], monkeypatch: pytest.MonkeyPatch
):
    machine("here")
    both_of_helm = {
        **HELM_EVALUATIONS[0],
        "evals": [benchmark for each in HELM_EVALUATIONS for benchmark in each["evals"]],
    }
    suite, shared = write_suite(tmp_path, both_of_helm, ALPACA_EVALUATION), str(tmp_path / "shared")
    command = [str(Path(sys.executable).with_name("assay")), "stage", "--suite", suite, "--target", shared, "--json"]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=process_environment())
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=400) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    staged = json.loads(outputs[0][0])
    assert json.loads(outputs[1][0]) == staged
    assert any("another process is staging" in errors for _, errors in outputs)
    assert not any("cannot be scored" in errors for _, errors in outputs)
    fetched = [
        request for request in web.requests if request.startswith("GET") and ("/resolve/" in request or BABI in request)
    ]
    assert len(fetched) == len(set(fetched)), fetched

    assert staged["files_of_datasets"]["tatsu-lab/alpaca_eval"]["bytes"] > 0
    assert staged["datasets"][REVIEWS]["revision"] == web.commit(f"datasets/{REVIEWS}")
    runs = {run for entry in staged["helm"].values() for run in entry["runs"]}
    assert runs == {"imdb_ptbr", "babi_qa:task=1,max_train_instances=1"}
    assert staged["scenarios"]["babi_qa"]["bytes"] > 0
    assert len(staged["scenarios"]["babi_qa"]["addresses"][BABI]["sha256"]) == 64

    web.requests.clear()
    machine("elsewhere")
    monkeypatch.setenv("ASSAY_OFFLINE", "1")
    settings.cache_clear()
    staged_by(StagingRequest(suites=(suite,), fill_from=shared), on_event=lambda line: None)
    client = LocalClient(tmp_path / "jobs", grace_seconds=2.0)
    try:
        with endpoint(tmp_path, "m") as base_url:
            asked = SuiteRequest(model_path="run", base_url=base_url, max_eval_instances=4)
            scores = [
                scored(config, base_url, tmp_path / "out", client) for config in load_suite(suite).evaluations_of(asked)
            ]
    finally:
        client.shutdown()
    assert scores[0]["exact_match"]
    assert scores[1]["win_rate"] == scores[1]["length_controlled_winrate"] == 4
    assert web.requests == []


def test_helm_data_that_changed_or_are_gone_are_named_and_the_rest_is_staged(
    tmp_path: Path, web: FakeHub, machine: Callable[[str], dict[str, str]]
):
    machine("here")
    made_up = {"label": "made_up", "evaluator": "helm", "evals": ["simple_mcqa"]}
    suite = write_suite(tmp_path, *HELM_EVALUATIONS, made_up, revisions={BABI: "0" * 64})
    del web.repositories[f"datasets/{REVIEWS}"]
    with pytest.raises(StagingIncomplete, match=r"(?s)reviews-.*imdb_ptbr: .*stories-.* not 0000.* as pinned"):
        staged_by(StagingRequest(suites=(suite,), prove=False), on_event=lambda line: None)
    assert not list((settings().cache_dir / "helm" / "scenarios" / "babi_qa" / "data").glob("tasks_*2"))
    staged = json.loads((settings().cache_dir / "staged.json").read_text())
    assert [entry["scenarios"] for entry in staged["helm"].values()] == [["simple_mcqa"]]
