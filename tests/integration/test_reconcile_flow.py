"""The flow that carries out policies, on a Prefect server, with lm-eval itself against the deterministic engine."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterTags

from fakes import evaluators
from fakes.alerts import known_alert
from fakes.cli import invoke
from fakes.endpoints import Endpoint, endpoint
from fakes.evaluators import Commanded
from fakes.hub import running_hub, use_hub
from fakes.models import CONFIG, write_checkpoint
from fakes.policies import write_policy, write_suite
from fakes.polling import eventually
from fakes.records import make_metric, make_record
from fakes.tokenizers import write_byte_tokenizer
from flows.reconcile import load_policy, reconcile_policy
from resources.environments.environments import ensure_environment
from resources.errors import CheckpointError
from tasks.errors import EvaluationInterrupted, GateRefused
from tasks.evaluators.environments import LM_EVAL
from tasks.evaluators.evaluator import HarnessCommand, Parsed
from tasks.policies.reconciliation import reconcile
from tasks.policies.snapshot import take_snapshot
from tasks.records.record import Record, read_records
from tasks.spec.evaluation import EvaluationConfig
from tasks.verdicts.alert_files import write_first
from tasks.verdicts.gate import Gate

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600), pytest.mark.usefixtures("prefect_api")]

STEPS = (1, 2, 3)


@pytest.fixture(scope="module", autouse=True)
def _harness_is_built() -> None:
    ensure_environment(LM_EVAL)


@dataclass(frozen=True)
class Watched:
    folder: Path
    engine: Endpoint

    @property
    def policy(self) -> Path:
        return self.folder / "policy.yaml"

    def write_suite(self, name: str, *benchmarks: str) -> str:
        return write_suite(self.folder, name, *benchmarks, max_eval_instances=2)

    def write_policy(self, *suites: str | dict[str, Any], **fields: Any) -> None:
        write_policy(self.folder, *suites, **{"name": "watched", "base_url": self.engine.base_url, **fields})

    def write_checkpoint(self, step: int, *, seed: int | None = None) -> Path:
        folder = self.folder / "run" / "hf" / f"step-{step}"
        shutil.rmtree(folder, ignore_errors=True)
        config = {**CONFIG, "num_attention_heads": 1}
        return write_byte_tokenizer(write_checkpoint(folder, seed=step if seed is None else seed, config=config))

    def reconcile(self, gate: Gate | None = None) -> dict[str, Any]:
        return reconcile_policy(load_policy(str(self.policy)), gate)

    def ask(self, *arguments: str) -> dict[str, Any]:
        done = invoke([*arguments, str(self.policy), "--json"])
        assert done.exit_code == 0, (done.output, done.exception)
        return json.loads(done.stdout)

    def missing(self) -> dict[str, int]:
        policy = load_policy(str(self.policy))
        plan = reconcile(take_snapshot(policy), policy, now=time.time())
        return {state: len(cells) for state, cells in plan.by_state().items()}

    def records(self) -> list[Record]:
        return read_records(str(self.folder / "out"))

    def attempts(self) -> Counter[str]:
        return Counter(str(path.parent) for path in (self.folder / "out").rglob("attempt-*") if path.is_dir())


@contextmanager
def watched(folder: Path, **faults: Any) -> Iterator[Watched]:
    with endpoint(folder, *(f"run-{step}" for step in STEPS), **faults) as engine:
        yield Watched(folder, engine)


def test_merged_checkpoint_is_evaluated_once_whole_and_again_after_a_rewrite(tmp_path: Path):
    with endpoint(tmp_path, "run-1-to-3-mean3") as engine:
        run = Watched(tmp_path, engine)
        run.write_policy(run.write_suite("small", "demo_facts"), checkpoints=[{"steps": [3], "merged": "last 3"}])
        for step in STEPS:
            run.write_checkpoint(step)
        weights = run.folder / "run" / "hf" / "step-2" / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-1])
        assert run.missing() == {"waiting": 1}
        weights.write_bytes(whole)

        assert run.reconcile()["succeeded"] == 1
        [record] = run.records()
        merge = record.checkpoint.merge
        assert merge is not None and [each.step for each in merge.inputs] == list(STEPS)
        assert (record.checkpoint.run, record.checkpoint.name, record.checkpoint.step) == ("run", "run-1-to-3-mean3", 3)
        assert run.missing() == {}

        times = weights.stat()
        os.utime(weights, (times.st_atime, times.st_mtime + 60))  # touched, and still the same weights
        assert run.missing() == {}
        config = run.write_checkpoint(2, seed=20) / "config.json"
        assert run.missing() == {"work": 1}
        config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 5.0}))
        with pytest.raises(CheckpointError, match="rope_theta"):
            run.reconcile()


def test_policy_about_a_run_of_the_hub_is_carried_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = ("series-stage1-1", "series-stage1-2")
    with running_hub({}) as hub, endpoint(tmp_path, *names) as engine:
        use_hub(hub, monkeypatch, home=tmp_path / "hf")
        run = Watched(tmp_path, engine)
        branches = {
            f"stage1-step{step}": {path.name: path.read_bytes() for path in run.write_checkpoint(step).iterdir()}
            for step in (1, 2)
        }
        hub.revisions["models/acme/series"] = {"main": branches["stage1-step2"], **branches}
        run.write_policy(run.write_suite("small", "demo_facts"), runs=["acme/series"])

        assert run.reconcile()["succeeded"] == 2
        assert {record.checkpoint.name: record.checkpoint.uri for record in run.records()} == {
            name: f"hf://acme/series@stage1-step{name[-1]}" for name in names
        }
        assert run.missing() == {}


def test_policy_is_carried_out_once_and_again_only_for_what_is_new(tmp_path: Path):
    with watched(tmp_path) as run:
        run.write_checkpoint(1)
        weights = run.write_checkpoint(2) / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-8])
        facts = run.write_suite("facts", "demo_facts")
        run.write_policy(facts)

        assert run.reconcile()["succeeded"] == 1
        assert run.missing() == {"waiting": 1}
        asked = run.engine.requests
        assert run.reconcile()["open_before"] == {"waiting": 1}
        assert run.engine.requests == asked

        weights.write_bytes(whole)  # complete now
        more = {"suite": run.write_suite("backwards", "demo_backwards"), "priority": 1}
        run.write_policy(facts, more)  # another suite with higher priority
        assert run.reconcile()["succeeded"] == 3
        assert run.missing() == {}
        both = FlowRunFilterTags(all_=["run=run", "suite=facts", "suite=backwards"])
        with get_client(sync_client=True) as client:
            assert client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=both))

        before = {record.attempt for record in run.records()}
        run.write_checkpoint(1, seed=99)
        assert run.missing() == {"work": 2}
        assert run.reconcile()["succeeded"] == 2
        after = {record.attempt for record in run.records()}
        assert before < after and len(after) == 6
        assert set(run.attempts().values()) == {1}

        rule = {"benchmark": "demo_*", "metric": "*"}
        assert run.reconcile(Gate.model_validate({"rules": [rule | {"at_least": 0.0}]}))["succeeded"] == 0
        strict = run.folder / "gate.yaml"
        strict.write_text(yaml.safe_dump({"rules": [rule | {"at_least": 2.0}]}))
        refused = invoke(["reconcile", "--gate", str(strict), str(run.policy), "--json"])
        assert isinstance(refused.exception, GateRefused) and "run-2: demo_" in str(refused.exception), refused.output
        assert [verdict["verdict"] for verdict in json.loads(refused.stdout)["gate"]] == ["NO-GO"]
        with get_client(sync_client=True) as client:
            assert client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["run-gate"])))

        run.write_policy(facts, more, gate={"name": "own", "checkpoints": "every", "rules": [rule | {"at_least": 2.0}]})
        refused = invoke(["reconcile", str(run.policy), "--json"])
        assert isinstance(refused.exception, GateRefused) and refused.exception.exit_code == 1, refused.output
        assert [verdict["verdict"] for verdict in json.loads(refused.stdout)["gate"]] == ["NO-GO"]
        assert run.reconcile()["error"] is None, "NO-GO is said once"
        [grid] = run.ask("status")["runs"]
        assert [row["gate"] for row in grid["checkpoints"]] == ["NO-GO", "NO-GO"]
        with get_client(sync_client=True) as client:
            eventually(lambda: len(verdicts_told(client)) == 2)
            sent = verdicts_told(client)
            assert sorted(event["resource"]["assay.step"] for event in sent) == ["1", "2"]
            assert all(event["payload"]["verdict"] == "NO-GO" for event in sent)
            [judging] = {of["prefect.resource.id"] for e in sent for of in e["related"] if "flow-run." in str(of)}
            assert client.read_flow_run(judging.rpartition(".")[2]).state_name == "Failed"


def verdicts_told(client: SyncPrefectClient) -> list[dict[str, Any]]:
    """Returns the NO-GO events of the policy's gate."""
    named = {"event": {"name": ["gate.no-go"]}, "resource": {"labels": {"assay.gate": ["own"]}}}
    return client.request("POST", "/events/filter", json={"filter": named, "limit": 50}).json()["events"]


def test_policy_decides_early_after_a_whole_checkpoint_and_asks_the_rest_on_an_alert(tmp_path: Path):
    with watched(tmp_path) as run:
        for step in (1, 2):
            run.write_checkpoint(step)
        suite = write_suite(run.folder, "facts", "demo_facts")
        rule = {"benchmark": "demo_facts", "metric": "acc", "not_worse_than": "previous", "by_more_than": 0.2}
        run.write_policy(suite, gate={"decide": "early", "checkpoints": "every", "rules": [rule]})

        outcome = run.reconcile()
        assert (outcome["succeeded"], outcome["decided_early"], outcome["left_to_others"]) == (1, 1, 0)
        [whole] = run.records()
        assert whole.checkpoint.step == 1 and run.missing() == {"decided_early": 1}
        [grid] = run.ask("status")["runs"]
        assert [row["gate"] for row in grid["checkpoints"]] == ["GO", "GO"]
        asked = run.engine.requests
        assert run.reconcile()["succeeded"] == 0 and run.engine.requests == asked

        decided = make_record(step=2, run="run", metrics=(make_metric(value=0.1),))
        assert write_first(str(run.folder / "out" / "run"), known_alert(decided))
        assert run.reconcile()["succeeded"] == 1 and run.missing() == {}
        assert sorted(record.checkpoint.step for record in run.records()) == [1, 2]


def test_cancelled_reconciler_publishes_nothing(tmp_path: Path):
    with watched(tmp_path, delay_seconds=8.0) as run:
        run.write_checkpoint(1)
        run.write_policy(run.write_suite("facts", "demo_facts"), retries={"first_delay_seconds": 0})
        with ThreadPoolExecutor(1) as threads:
            reconciled = threads.submit(copy_context().run, run.reconcile)
            eventually(lambda: run.engine.requests > 1 or reconciled.done())
            assert run.missing() == {"claimed": 1}
            assert run.ask("cancel")["claims_ended"] == 1
            assert reconciled.result()["succeeded"] == 0
        assert run.records() == []
        assert run.missing() == {"stopped": 1}
        run.ask("retry")
        assert run.missing() == {"work": 1}


def _ends_at_once(*_: object) -> HarnessCommand:
    return HarnessCommand(argv=(sys.executable, "-c", "pass"), variables={}, files={})


def _unreadable(output: Path, config: EvaluationConfig) -> tuple[Parsed, Iterator[Any]]:
    raise TypeError


@pytest.fixture
def _evaluators_travel() -> Iterator[None]:
    # Pickles the classes of this file by value: jobs do not have the file.
    for module in (sys.modules[__name__], evaluators):
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in (sys.modules[__name__], evaluators):
        cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.usefixtures("_evaluators_travel")
def test_cell_that_our_own_code_breaks_is_given_up_after_the_retries_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    levanter = "levanter_lm_evaluation_harness"
    given = {"name": levanter, "environments": (LM_EVAL,), "needs_endpoint": False}
    unreadable = Commanded(made=_ends_at_once, read=_unreadable, **given)
    monkeypatch.setattr("tasks.evaluators.levanter.evaluator.EVALUATOR", unreadable)
    with watched(tmp_path) as run:
        run.write_checkpoint(1)
        suite = write_suite(run.folder, "facts", "demo_facts", evaluator=levanter)
        run.write_policy(suite, retries={"infra_failures": 3, "first_delay_seconds": 0})
        for tries in (2, 4):  # Prefect makes a second attempt each time
            with pytest.raises(EvaluationInterrupted, match=r"TypeError at tasks\.evaluators\.harness:"):
                run.reconcile()
            [record] = run.records()
            assert (record.status, record.infra_failures) == ("infra_failed", tries)
        attempts = run.attempts()
        assert run.reconcile()["open_before"] == {"retries_exhausted": 1}
        assert run.attempts() == attempts
