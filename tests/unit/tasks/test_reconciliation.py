"""Remaining work of a policy: decided from listings alone, and read from disk."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import pytest
import yaml
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.objects import State as PrefectState
from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from prefect.states import Cancelled, Cancelling, Crashed, Running

from fakes.cli import invoke
from fakes.models import write_checkpoint, write_run, write_safetensors
from fakes.policies import record_for, seen_checkpoint, wanted_evaluation, write_policy
from fakes.records import cell_of, make_record
from flows import hooks
from flows.hooks import leave_nothing
from flows.reconcile import load_policy, reconcile_once, reconcile_policy
from resources.errors import RecordStatus
from resources.process_marks import ProcessMark
from resources.settings import variable_set
from resources.storage import storage
from tasks.checkpoints.checkpoint import CheckpointRule
from tasks.checkpoints.discovery import find_checkpoints
from tasks.checkpoints.run_snapshot import SeenCheckpoint, snapshot_run
from tasks.errors import OverBudget
from tasks.policies.actions import stop_unfinished
from tasks.policies.gate import judged_of
from tasks.policies.policy import Override, Overrides, Policy, WantedEvaluation, write_override
from tasks.policies.reconciliation import OpenCell, Reconciliation, RunListing, State, reconcile
from tasks.policies.snapshot import Estimates, take_snapshot
from tasks.records.cost import Cost, Spent
from tasks.records.index import Evaluated, RunRecords, indexed_records, note_record
from tasks.records.record import record_uri, write_record
from tasks.records.usage import IndexedRecord, Typical, usage_of
from tasks.running.cells import plan_cells
from tasks.running.claims.files import Claim, Holder, SeenClaim, Subject
from tasks.running.claims.leases import Claims
from tasks.verdicts.gate import Gate

NOW = 1_000_000.0
NOTHING = RunRecords({}, (), {})


def outcome(step: int, name: str, status: RecordStatus, **changes: Any) -> IndexedRecord:
    row = IndexedRecord(
        cell=f"step-{step}/lm_evaluation_harness/{name}",
        checkpoint=f"run-{step}",
        evaluation_hash=f"hash-{name}",
        digest=f"digest-{step}",
        listing=f"listing-{step}",
        status=status,
        created=NOW - 1000,
        seconds=10.0,
        chip_seconds=0.0,
        infra_failures=1 if status == "infra_failed" else 0,
        reason="the reason",
        usage=usage_of(make_record()),
    )
    return row._replace(**changes)


def done(step: int, *names: str, listing: str | None = None) -> dict[str, list[Evaluated]]:
    hashes = frozenset(f"hash-{name}" for name in names)
    return {f"run-{step}": [Evaluated(f"digest-{step}", listing or f"listing-{step}", hashes)]}


def policy(**changes: Any) -> Policy:
    content = {
        "name": "p",
        "runs": ["/runs/run"],
        "suites": ["demo"],
        "evaluation_path": "/out",
        "retries": {"infra_failures": 2, "first_delay_seconds": 600},
    }
    return Policy.model_validate({**content, **changes})


def decide(
    checkpoints: list[SeenCheckpoint],
    evaluations: list[WantedEvaluation],
    records: RunRecords = NOTHING,
    *,
    now: float = NOW,
    of: Policy | None = None,
    **more: Any,
) -> Reconciliation:
    listing = RunListing("/runs/run", "run", evaluations, checkpoints, records, **more)
    return reconcile([listing], of or policy(), now=now)


def states(reconciliation: Reconciliation) -> dict[tuple[int, str], State]:
    return {
        (cell.checkpoint.step, cell.evaluation.suites[0]): cell.state
        for cell in (*reconciliation.work, *reconciliation.others)
    }


def test_work_is_what_is_wanted_less_what_is_recorded_in_order_of_priority_and_step():
    first, second = wanted_evaluation("first", priority=1), wanted_evaluation("second", priority=2)
    reconciliation = decide(
        [seen_checkpoint(2), seen_checkpoint(1)], [first, second], RunRecords(done(1, "second"), (), {})
    )
    assert [(cell.checkpoint.step, cell.evaluation.suites[0]) for cell in reconciliation.work] == [
        (2, "second"),
        (1, "first"),
        (2, "first"),
    ]
    assert reconciliation.done_count == 1


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({}, {}),
        ({"listing": "written again"}, {(1, "a"): "work"}),
        ({"listing": "copied", "digest": "digest-1"}, {}),
        ({"digest": "another"}, {(1, "a"): "work"}),
    ],
)
def test_record_counts_for_the_state_of_the_checkpoint_that_it_is_of(
    seen: dict[str, str], expected: dict[tuple[int, str], State]
):
    reconciliation = decide([seen_checkpoint(1, **seen)], [wanted_evaluation("a")], RunRecords(done(1, "a"), (), {}))
    assert states(reconciliation) == expected


@pytest.mark.parametrize(
    ("rules", "steps"),
    [
        ([CheckpointRule(which="all")], {5, 10, 15, 20}),
        ([CheckpointRule(which="latest")], {20}),
        ([CheckpointRule(which="first")], {5}),
        ([CheckpointRule(which="final")], {15}),
        ([CheckpointRule(every_n_steps=10)], {10, 20}),
        ([CheckpointRule(every_n_steps=6)], {10, 15, 20}),  # 6, 12, 18
        ([CheckpointRule(every_n_steps=9)], {10, 20}),
        ([CheckpointRule(steps=(5, 7))], {5}),
        ([CheckpointRule(every_n_steps=15), CheckpointRule(which="latest")], {15, 20}),
    ],
)
def test_rules_take_checkpoints_and_the_others_are_counted(rules: list[CheckpointRule], steps: set[int]):
    checkpoints = [seen_checkpoint(step) for step in (5, 10, 15, 20)]
    reconciliation = decide(checkpoints, [wanted_evaluation("a", *rules)], of=policy(final_step=15))
    assert {cell.checkpoint.step for cell in reconciliation.work} == steps
    assert reconciliation.left_out == 4 - len(steps)


@pytest.mark.parametrize(("recorded", "steps"), [((), {1300}), ((1000,), set()), ((900,), {1300})])
def test_next_checkpoint_past_a_deleted_recorded_checkpoint_is_left_out(recorded: Sequence[int], steps: set[int]):
    records = RunRecords({name: states for step in recorded for name, states in done(step, "a").items()}, (), {})
    kept = [*map(seen_checkpoint, (1300, 1400, 1500)), seen_checkpoint(1250, problems=("no weights",))]
    reconciliation = decide(kept, [wanted_evaluation("a", CheckpointRule(every_n_steps=1000))], records)
    assert {cell.checkpoint.step for cell in reconciliation.work} == steps
    assert {cell.checkpoint.step for cell in reconciliation.others} == ({1250} if steps else set())


def test_incomplete_checkpoint_waits_with_what_it_lacks_where_it_would_be_wanted():
    half = seen_checkpoint(30, problems=("no weights",))
    evaluations = [
        wanted_evaluation("some", CheckpointRule(every_n_steps=10)),
        wanted_evaluation("few", CheckpointRule(steps=(40,))),
    ]
    [cell] = decide([seen_checkpoint(20), half], [evaluations[0]]).others
    assert (cell.state, cell.reason, cell.checkpoint.step) == ("waiting", "no weights", 30)
    assert states(decide([half], evaluations)) == {(30, "some"): "waiting"}


@pytest.mark.parametrize(
    ("status", "changes", "state"),
    [
        ("failed", {}, "failed"),
        ("withheld", {}, "failed"),
        ("infra_failed", {}, "work"),
        ("infra_failed", {"created": NOW - 599}, "backing_off"),
        ("infra_failed", {"created": NOW - 1199, "infra_failures": 2}, "backing_off"),
        ("infra_failed", {"created": NOW - 1201, "infra_failures": 2}, "work"),
        ("infra_failed", {"infra_failures": 3}, "retries_exhausted"),
        ("infra_failed", {"created": NOW - 1, "infra_failures": 0}, "work"),
        ("infra_failed", {"created": NOW + 300_000}, "work"),  # by a clock that was ahead
        ("infra_failed", {"created": NOW + 300_000, "infra_failures": 3}, "retries_exhausted"),
        ("failed", {"created": NOW + 300_000}, "failed"),
        ("failed", {"listing": "as it was", "digest": "as it was"}, "work"),
    ],
)
def test_failure_of_machines_is_tried_again_within_its_budget_and_no_other(
    status: RecordStatus, changes: dict[str, Any], state: State
):
    records = RunRecords({}, [outcome(1, "a", status, **changes)], {})
    assert states(decide([seen_checkpoint(1)], [wanted_evaluation("a")], records)) == {(1, "a"): state}


def test_pause_says_until_when():
    records = RunRecords({}, [outcome(1, "a", "infra_failed", created=NOW - 100)], {})
    [cell] = decide([seen_checkpoint(1)], [wanted_evaluation("a")], records).others
    assert cell.until == NOW + 500


def claim(*, renewed: float, deaths: int = 0, released: bool = False, listing: str = "listing-1") -> SeenClaim:
    subject = Subject(key="k", checkpoint="run-1", evaluation_hash="hash-a", listing=listing)
    process = ProcessMark(machine="elsewhere", pid=1, started="1")
    made = Claim(subject=subject, number=1, holder="h", deaths=deaths, released=released, at=renewed)
    return SeenClaim(made, "uri", Holder(name="h", user="u", process=process, renewed=renewed, lease_seconds=60))


@pytest.mark.parametrize(
    ("standing", "state"),
    [
        (claim(renewed=NOW - 30), "claimed"),
        (claim(renewed=NOW - 30, listing="another state of it"), "work"),
        (claim(renewed=NOW - 300), "backing_off"),
        (claim(renewed=NOW - 700), "work"),
        (claim(renewed=NOW - 7000, deaths=2), "retries_exhausted"),
        (claim(renewed=NOW - 30, released=True), "work"),
        (replace(claim(renewed=NOW + 300_000), heard=NOW - 30), "claimed"),  # by a clock that was ahead
        (replace(claim(renewed=NOW + 300_000), heard=NOW - 300), "work"),
    ],
)
def test_claim_keeps_a_cell_while_its_holder_lives_and_counts_as_a_failure_when_it_died(
    standing: SeenClaim, state: State
):
    assert states(decide([seen_checkpoint(1)], [wanted_evaluation("a")], claims=[standing])) == {(1, "a"): state}


@pytest.mark.parametrize(
    ("kind", "cells", "of", "state"),
    [
        ("stop", None, "p", "stopped"),
        ("stop", None, "another policy", "failed"),
        ("stop", (("run-1", "hash-a"),), "another policy", "stopped"),
        ("retry", (("run-1", "hash-a"),), "p", "work"),
    ],
)
@pytest.mark.parametrize("failed_at", [NOW - 1000, NOW + 300_000])  # or by a clock that was ahead
def test_mark_of_a_person_stops_a_cell_or_clears_its_way(
    kind: Any, cells: Any, of: str, state: State, failed_at: float
):
    override = Override(kind=kind, policy=of, cells=cells, at=NOW - 1, user="u")
    overrides = Overrides(dict.fromkeys(cells or (), override), {} if cells else {of: override})
    records = RunRecords({}, [outcome(1, "a", "failed", created=failed_at)], {})
    assert states(decide([seen_checkpoint(1)], [wanted_evaluation("a")], records, overrides=overrides)) == {
        (1, "a"): state
    }


def test_native_checkpoint_is_work_for_levanter_and_reported_for_engines():
    native = seen_checkpoint(1, kind="levanter")
    reconciliation = decide([native], [wanted_evaluation("engine"), wanted_evaluation("levanter", native=True)])
    assert states(reconciliation) == {(1, "engine"): "not_served", (1, "levanter"): "work"}


# On disk.


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    """A policy about a run with two complete checkpoints and a checkpoint that is being written."""
    run = write_run(tmp_path / "run", [100, 200])
    weights = write_checkpoint(run / "hf" / "step-300") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    return write_policy(tmp_path)


def asked(command: str, watched: Path, *options: str) -> Any:
    done = invoke([command, str(watched), *options, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def publish(watched: Path, step: int, status: RecordStatus = "succeeded", **fields: Any) -> Path:
    record = record_for(watched, step, status=status, **fields)
    cell = cell_of(watched.parent / "out", record)
    write_record(cell, record)
    return Path(cell)


def test_commands_tell_plan_gaps_and_grid(watched: Path):
    publish(watched, 100)
    plan = asked("status", watched, "--plan")
    assert [cell["checkpoint"] for cell in plan["cells"]] == ["run-200"]
    assert plan["cells"][0]["seconds"] == pytest.approx(34.34, abs=30)
    gaps = asked("status", watched, "--gaps")
    assert (gaps["done"], gaps["missing"]) == (1, {"work": 1, "waiting": 1})
    assert "model.safetensors" in gaps["cells"][1]["reason"]
    [run] = asked("status", watched)["runs"]
    assert [row["suites"] for row in run["checkpoints"]] == [
        {"facts": {"done": 1}},
        {"facts": {"work": 1}},
        {"facts": {"waiting": 1}},
    ]
    for options in (["--plan"], ["--gaps"], []):
        shown = invoke(["status", str(watched), *options], env={"COLUMNS": "200"})
        assert shown.exit_code == 0
        assert "run-200" in shown.stdout


@pytest.fixture
def priced(watched: Path) -> Iterator[Path]:
    """The policy on slices with a price: a success in October used an hour of them, and a failure in November more."""
    content = yaml.safe_load(watched.read_text())
    del content["base_url"]
    content["resource_config"] = {"device": {"kind": "tpu", "variant": "v5litepod-8"}}
    watched.write_text(yaml.safe_dump(content))
    with variable_set("ASSAY_REGION", "us-central1"):
        first = Cost(usd=1.5, replica_seconds=3600.0, earlier=Spent(attempts=1, usd=0.5, chip_seconds=1800.0))
        october, november = datetime(2025, 10, 31, 23, 59, 59, tzinfo=UTC), datetime(2025, 11, 1, tzinfo=UTC)
        ours = {"tags": ("policy=p",), "chip_seconds": 7200.0}
        publish(watched, 100, cost=first, created=october, **ours)
        unknown = Cost(replica_seconds=60.0, why_unknown="it has no price")
        publish(watched, 200, "infra_failed", cost=unknown, created=november, **ours)
        publish(watched, 100, "failed", cost=Cost(usd=99.0), created=november, tags=("policy=other",))
        yield watched


def test_status_tells_what_a_policy_has_cost_by_month_and_what_is_expected_of_what_is_left(priced: Path):
    cost = asked("status", priced)["cost"]
    assert {month: spent["price"] for month, spent in cost["months"].items()} == {
        "2025-10": "2.00 USD",
        "2025-11": "unknown",
    }
    assert (cost["spent"]["attempts"], cost["spent"]["price"]) == (3, "at least 2.00 USD, 1 unknown")
    assert cost["spent"]["chip_seconds"] == 7200.0 + 1800.0 + 7200.0
    assert (cost["expected"]["cells"], cost["expected"]["measured"]) == (2, 2)
    assert cost["expected"]["usd"] == pytest.approx(2 * 8 * 0.48)
    shown = invoke(["status", str(priced)], env={"COLUMNS": "200"}).stdout
    assert "Spent so far: 3 attempts, 4.500 chip-hours, at least 2.00 USD, 1 unknown." in shown
    assert "2025-10: 2 attempts, 2.500 chip-hours, 2.00 USD" in shown
    assert "Expected for what is left: 16.000 chip-hours, 7.68 USD (2 cells)." in shown


def test_plan_tells_the_price_of_each_cell_and_a_policy_that_may_cost_less_begins_nothing(priced: Path):
    plan = asked("status", priced, "--plan")
    [cell] = plan["cells"]
    assert (cell["checkpoint"], cell["how"], cell["money"]) == ("run-200", "measured", pytest.approx(8 * 0.48))
    assert (plan["total"]["money"], plan["total"]["expected"]["price"]) == (pytest.approx(3.84), "3.84 USD")
    priced_policy = load_policy(str(priced))
    with pytest.raises(OverBudget, match=r"3\.84 USD expected for 1 cell"):
        reconcile_once(priced_policy.model_copy(update={"max_usd": 3.8}))
    with variable_set("ASSAY_REGION", "nowhere"), pytest.raises(OverBudget, match="has no region nowhere"):
        reconcile_once(priced_policy.model_copy(update={"max_usd": 100.0}))


def test_failed_cell_waits_until_a_person_asks_for_another_try(watched: Path):
    cell = publish(watched, 100, "failed")
    before = (cell / "record.json").read_bytes()
    assert asked("status", watched, "--gaps")["missing"] == {"failed": 1, "work": 1, "waiting": 1}
    assert asked("retry", watched, "--cell", "run-100:facts")["cells"] == ["run-100 · facts: demo_facts"]
    assert asked("status", watched, "--gaps")["missing"] == {"work": 2, "waiting": 1}
    assert (cell / "record.json").read_bytes() == before


def test_mark_by_a_clock_that_is_ahead_is_of_the_time_at_which_the_store_had_it(watched: Path):
    folder = publish(watched, 100, "failed").parents[2]

    def mark(kind: Literal["retry", "stop"], *, written: float) -> None:
        override = Override(kind=kind, policy="p", cells=None, at=time.time() + 86400, user="u")
        path = folder / "marks" / f"{kind}.json"
        storage.write_bytes(str(path), override.model_dump_json().encode())
        os.utime(path, (written, written))

    mark("retry", written=1e9)
    assert asked("status", watched, "--gaps")["missing"] == {"failed": 1, "work": 1, "waiting": 1}
    mark("stop", written=time.time() - 60)
    assert asked("status", watched, "--gaps")["missing"] == {"stopped": 2, "waiting": 1}
    write_override(str(folder), "retry", None, policy="p")
    assert asked("status", watched, "--gaps")["missing"] == {"work": 2, "waiting": 1}


@pytest.mark.parametrize("at", ["NaN", "1e400", "1e15", None])
def test_mark_that_cannot_be_read_or_has_an_impossible_time_says_nothing(watched: Path, at: str | None):
    folder = watched.parent / "out" / "run" / "marks"
    folder.mkdir(parents=True)
    if at is None:
        os.mkfifo(folder / "1.json")
    else:
        (folder / "1.json").write_text(f'{{"kind": "stop", "policy": "p", "cells": null, "at": {at}, "user": "u"}}')
    assert asked("status", watched, "--gaps")["missing"] == {"work": 2, "waiting": 1}


def subject_of(cell: OpenCell) -> Subject:
    checkpoint, evaluation = cell.checkpoint, cell.evaluation
    return Subject(key=f"step-{checkpoint.step}.c", checkpoint=checkpoint.name, evaluation_hash=evaluation.hash)


def test_cancelled_flow_run_stops_its_cells_and_no_other_runs_cells(watched: Path):
    policy = load_policy(str(watched))
    cells = reconcile(take_snapshot(policy), policy, now=time.time()).work
    with Claims(str(watched.parent / "out" / "run" / "claims"), in_background=False) as claims:
        assert claims.acquire([subject_of(cells[0])]).ours
        assert stop_unfinished(policy, cells, flow_run_id=str(RUN), name="reconcile p") == 1
        assert asked("status", watched, "--gaps")["missing"] == {"claimed": 1, "stopped": 1, "waiting": 1}


RUN = UUID("0a1b2c3d-0000-4000-8000-000000000001")


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sends nothing to a Prefect server; its answers do not affect cells."""
    for says in ("note_ending", "end_task_runs"):
        monkeypatch.setattr(hooks, says, lambda *_: None)
    with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: False}):
        yield


@pytest.mark.usefixtures("untold")
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(
    ("told", "at_server", "missing"),
    [
        (Cancelling(), Cancelling(), {"stopped": 1, "work": 1}),  # by the worker, after its process was killed
        (Cancelled(), Running(), {"stopped": 1, "work": 1}),  # in the process itself
        (Cancelling(), Running(), {"work": 2}),  # by a worker that is shutting down
        (Crashed(), Crashed(), {"work": 2}),
    ],
)
def test_cells_that_a_cancelled_flow_run_had_begun_wait_for_a_person_however_its_process_ended(
    watched: Path, told: PrefectState, at_server: PrefectState, missing: dict[str, int], held: bool
):
    policy = load_policy(str(watched))
    [begun, _] = reconcile(take_snapshot(policy), policy, now=time.time()).work
    run = FlowRun(id=RUN, name="reconcile p", flow_id=RUN, state=at_server, parameters={"policy": str(watched)})
    with ExitStack() as claims:
        mine = Claims(str(watched.parent / "out" / "run" / "claims"), flow_run=str(RUN), in_background=False)
        assert claims.enter_context(mine).acquire([subject_of(begun)]).ours
        if not held:
            claims.close()  # released, and the process was killed before it could report more
        leave_nothing(reconcile_policy, run, told)
    assert asked("status", watched, "--gaps")["missing"] == {**missing, "waiting": 1}

    asked("retry", watched)
    leave_nothing(reconcile_policy, run, told)  # as for a duplicate notification
    assert asked("status", watched, "--gaps")["missing"] == {"work": 2, "waiting": 1}, (
        "the later decision of a person holds"
    )


def test_touched_checkpoint_differs_from_a_changed_checkpoint_by_its_digest(watched: Path):
    publish(watched, 100)
    step = watched.parent / "run" / "hf" / "step-100"
    copied = shutil.copytree(step, watched.parent / "aside", copy_function=shutil.copyfile)
    shutil.rmtree(step)
    copied.rename(step)
    assert asked("status", watched, "--gaps")["done"] == 1
    shutil.rmtree(step)
    write_checkpoint(step, seed=99)
    assert asked("status", watched, "--gaps")["done"] == 0


def test_other_weights_with_size_and_time_restored_are_detected(watched: Path):
    publish(watched, 100)
    weights = watched.parent / "run" / "hf" / "step-100" / "model.safetensors"
    before = weights.stat()
    write_safetensors(weights, seed=99)
    while weights.stat().st_ctime_ns == before.st_ctime_ns:  # a tick of the disk's clock is a few milliseconds
        os.utime(weights)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert asked("status", watched, "--gaps")["done"] == 0
    [listing] = take_snapshot(load_policy(str(watched)))
    assert [checkpoint.without_record for checkpoint in judged_of(Gate(), load_policy(str(watched)), listing)] == [1]


def test_verdict_of_planning_is_that_of_discovery_and_its_cells_are_those_of_evaluation(watched: Path):
    run = watched.parent / "run"
    problems_by_uri = {checkpoint.uri: checkpoint.problems for checkpoint in find_checkpoints(str(run))}
    assert {checkpoint.uri: checkpoint.problems for checkpoint in snapshot_run(str(run))} == problems_by_uri
    assert {
        checkpoint.uri: checkpoint.problems for checkpoint in snapshot_run(str(run))
    } == problems_by_uri  # remembered
    [listing] = take_snapshot(load_policy(str(watched)))
    config = listing.evaluations[0].config
    cells = plan_cells.fn([config], [checkpoint for checkpoint in find_checkpoints(str(run)) if checkpoint.complete])
    assert {cell.evaluation_hash for cell in cells} == {listing.evaluations[0].hash}
    assert [cell.reference.listing for cell in cells] == [
        checkpoint.listing for checkpoint in listing.checkpoints if checkpoint.complete
    ]


def test_index_that_is_believed_hears_news_and_is_compared_when_asked(watched: Path):
    folder = str(watched.parent / "out" / "run")
    publish(watched, 100)
    cell = publish(watched, 200)
    written = (cell / "record.json").read_bytes()
    storage.delete(record_uri(str(cell)))
    clock = iter([1e9, 1e9 + 100.0, 1e9 + 200.0, 1e9 + 200.0])  # it took 100 s, so the index is trusted for a while
    indexed_records(folder, now=lambda: next(clock))
    (cell / "record.json").write_bytes(written)
    assert list(indexed_records(folder, now=lambda: next(clock)).done) == ["run-100"]
    record = make_record(step=200, run="run")
    note_record(folder, str(cell), record)
    heard = indexed_records(folder, now=lambda: next(clock)).done
    assert list(heard) == ["run-100", "run-200"]
    assert [state.newest for state in heard["run-200"]] == [record.created.timestamp()]
    storage.delete(record_uri(str(cell)))
    assert list(indexed_records(folder, use_index=False).done) == ["run-100"]


def test_policy_rule_with_two_selections_or_no_step_is_refused(watched: Path):
    content = yaml.safe_load(watched.read_text())
    for change, words in [
        ({"checkpoints": [{"which": "all", "steps": [1]}]}, "expected one of which, every_n_steps and steps"),
        ({"checkpoints": "final"}, "the rule final needs final_step"),
        ({"suites": [{"suit": "demo"}]}, "did you mean suite?"),
    ]:
        watched.write_text(yaml.safe_dump({**content, **change}))
        refused = invoke(["status", str(watched), "--plan"])
        assert refused.exit_code != 0
        assert words in str(refused.exception)


def test_estimate_is_what_the_same_evaluation_took_at_the_price_of_its_machine(watched: Path):
    content = yaml.safe_load(watched.read_text())
    del content["base_url"]
    content["resource_config"] = {"device": {"kind": "tpu", "variant": "v5litepod-8"}, "replicas": 2}
    watched.write_text(yaml.safe_dump(content))
    [listing] = take_snapshot(load_policy(str(watched)))
    [hash_] = [evaluation.hash for evaluation in listing.evaluations]
    measured = replace(listing, records=RunRecords({}, (), {hash_: Typical(120.0, 8 * 90.0, 90.0)}))
    [cell, _] = reconcile([measured], policy(), now=NOW).work
    assert Estimates([measured]).of(cell)["money"] is None, "this machine is in no region that has prices"
    with variable_set("ASSAY_REGION", "us-central1"):
        estimate = Estimates([measured]).of(cell)
    known = {"seconds": 120.0, "chip_hours": 0.2, "how": "measured", "where": "v5litepod-8 here"}
    assert estimate.items() >= known.items()
    assert estimate["money"] == pytest.approx(8 * 0.48 * 90 / 3600)
    assert Estimates([listing]).of(cell)["seconds"] is None
