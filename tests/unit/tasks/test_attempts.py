"""An attempt at a cell without an endpoint, on a fake harness."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cloudpickle
import pytest

from fakes import evaluators
from fakes.cells import cell_uri, of_cell
from fakes.endpoints import endpoint
from fakes.evaluators import Commanded
from fakes.models import write_run, write_safetensors
from fakes.polling import eventually, is_alive
from fakes.proxy import JOIN_TOKEN, running_proxy, session_of
from fakes.records import make_record, publish
from pools.engine.launch import Servable
from pools.weights.model_files import digest_model_folder
from resources.backends.current import current_client, set_current_client
from resources.backends.local.client import LocalClient
from resources.config import ResourceConfig
from resources.environments.environments import EnvironmentSpec
from resources.errors import AssayError, BadInput, CheckpointChanged, EndpointUnusable, RecordStatus, UnexpectedError
from resources.regions.regions import known_regions, price_per_hour
from resources.settings import settings
from tasks.checkpoints.discovery import find_checkpoints
from tasks.errors import BenchmarksChanged, EvaluationInterrupted, RecordUnwritten
from tasks.evaluators.evaluator import HarnessCommand, Parsed
from tasks.prefect_server.progress import Notice, Update, listening
from tasks.records.cost import Cost
from tasks.records.details import BenchmarkDetails, CheckpointReference
from tasks.records.index import note_record
from tasks.records.provenance import hardware
from tasks.records.record import SCOPE_NAME, Counts, FoundRecord, Record, now, read_record, write_record
from tasks.records.samples import Sample
from tasks.running.attempt import Interruption, RunResources
from tasks.running.cells import Cell, standing_record
from tasks.running.conclude import announce
from tasks.running.pricing import cost_of
from tasks.running.run_cell import run_cell
from tasks.running.serving import EndpointServing, PoolServing, SharedSeconds
from tasks.running.warm import Harness
from tasks.spec.benchmarks import evaluation_hash
from tasks.spec.evaluation import EvaluationConfig

PROGRAM = Path(__file__).parents[2] / "fakes" / "harness.py"


@pytest.fixture(scope="module", autouse=True)
def _harnesses_travel() -> Iterator[None]:
    # Pickles the classes of this file by value: jobs do not have the file.
    for module in (sys.modules[__name__], evaluators):
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in (sys.modules[__name__], evaluators):
        cloudpickle.unregister_pickle_by_value(module)


def hanging(folder: Path) -> Commanded:
    """Returns a harness that loads the checkpoint itself and never ends; it writes its pids to a folder."""

    def made(_: object, output: Path, python: Path) -> HarnessCommand:
        return HarnessCommand(argv=(str(python), str(PROGRAM), "hang", str(folder)), variables={}, files={})

    environment = EnvironmentSpec(name="hanging", requirements=Path("hanging.txt"), smoke_import=None)
    return Commanded(made=made, name="hanging", environments=(environment,), needs_endpoint=False)


def ending(results: Callable[[], Parsed], *, code: str = "pass", needs_endpoint: bool = False) -> Commanded:
    """Returns a harness that runs Python code and ends well; `results` are read then."""

    def made(*_: object) -> HarnessCommand:
        return HarnessCommand(argv=(sys.executable, "-c", code), variables={}, files={})

    def read(output: Path, config: EvaluationConfig) -> tuple[Parsed, Iterable[Sample]]:
        return results(), ()

    return Commanded(made=made, name="ending", needs_endpoint=needs_endpoint, read=read)


def crashing(error: BaseException | None = None, *, needs_endpoint: bool = False) -> Commanded:
    """Returns a harness that ends well, with results that make Assay's code fail."""

    def results() -> Parsed:
        raise error or TypeError("the whole answer of the model")

    return ending(results, needs_endpoint=needs_endpoint)


def sound(change: Callable[[], object] = lambda: None) -> Parsed:
    """Returns sound results, after a change."""
    change()
    return Parsed(metrics=(), counts=Counts(requested=1, answered=1, scored=1), versions={})


def make_cell(folder: Path, **changes: Any) -> Cell:
    run = write_run(folder / "run-a", [100])
    config = EvaluationConfig.model_validate(
        {
            "evaluator": "levanter_lm_evaluation_harness",
            "model_path": str(run),
            "evaluation_path": str(folder / "out"),
            "evals": [{"name": "demo_facts"}],
            **changes,
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
    uri = cell_uri(config, reference)
    return Cell(config, checkpoint.folder, digests, reference, evaluation_hash(config), uri, None)


@pytest.mark.timeout(60)
def test_interrupted_attempt_without_a_pool_ends_all_its_processes(tmp_path: Path):
    cell, interruption = make_cell(tmp_path), Interruption()
    harness = Harness(hanging(tmp_path), Path(sys.executable), None)
    context = RunResources(lambda _: harness, interruption=interruption)

    def pids() -> list[int]:
        noted = tmp_path / "pids"
        return [int(pid) for pid in noted.read_text().split()] if noted.exists() else []

    with ThreadPoolExecutor(1) as threads:
        attempt = threads.submit(run_cell.fn, cell, context)
        try:
            eventually(lambda: len(pids()) == 2)
            started = pids()
            running = [job.name for job in current_client().jobs() if not job.status.finished]
            assert any(name.startswith("hanging-run-a-100-demo_facts-") for name in running), "jobs say what they are"
        finally:
            interruption.set()
        with pytest.raises(EvaluationInterrupted):
            attempt.result()
    assert not any(map(is_alive, started))
    record = read_record(cell.uri)
    assert record is not None
    assert (record.status, record.interrupted, record.infra_failures) == ("infra_failed", True, 0)
    with pytest.raises(EvaluationInterrupted):
        run_cell.fn(cell, context)
    assert pids() == started


@pytest.mark.parametrize("changed", ["benchmarks", "weights"])
@pytest.mark.parametrize("meanwhile", [False, True])
def test_attempt_at_what_was_changed_since_it_was_planned_does_not_succeed(
    tmp_path: Path, *, changed: str, meanwhile: bool
):
    benchmarks = tmp_path / "benchmarks"
    benchmarks.mkdir()
    (benchmarks / "mine.yaml").write_text("task: mine\n")
    (benchmarks / "questions.jsonl").write_text('{"answer": 1}\n')
    cell = make_cell(tmp_path, evals=[{"name": "mine"}], benchmarks_path=str(benchmarks))

    def change() -> None:
        if changed == "benchmarks":
            (benchmarks / "questions.jsonl").write_text('{"answer": 2}\n')
        else:
            write_safetensors(Path(cell.reference.uri) / "model.safetensors", seed=7)

    def context(harness: Commanded) -> RunResources:
        return RunResources(lambda _: Harness(harness, Path(sys.executable), None))

    run_cell.fn(cell, context(ending(sound)))
    if not meanwhile:
        change()
    again = cell.uri.replace("/out/", "/again/")
    kind: type[AssayError] = BenchmarksChanged if changed == "benchmarks" else CheckpointChanged
    with pytest.raises(kind, match="planned"):
        run_cell.fn(replace(cell, uri=again), context(ending(lambda: sound(change))))
    record = read_record(again)
    assert record is not None and (record.status, record.metrics) == (kind.record_status, ())


SLICES = {"device": {"kind": "tpu", "variant": "v5litepod-8"}, "replicas": 3}
GANGS = {"device": {"kind": "gpu", "variant": "H100", "count": 2}, "hosts": 2, "replicas": 2, "preemptible": False}


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places this machine in a region of the price list."""
    monkeypatch.setenv("ASSAY_REGION", "us-central1")
    settings.cache_clear()


@pytest.fixture
def chips(tmp_path: Path) -> Iterator[None]:
    """Gives the jobs of this machine the chips of a slice, which no program uses."""
    (tmp_path / "machine" / "dev").mkdir(parents=True)
    for number in range(8):
        (tmp_path / "machine" / "dev" / f"accel{number}").touch()
    with set_current_client(LocalClient(device_root=tmp_path / "machine")):
        yield


def recorded(cell: Cell, run: RunResources) -> Record:
    """Runs an attempt that has nothing to decide early; returns its record."""
    record = run_cell.fn(cell, run)
    assert record is not None
    return record


@pytest.mark.usefixtures("priced")
def test_cell_costs_the_chips_seconds_and_regional_price_of_its_replica(tmp_path: Path):
    first = make_cell(tmp_path, evaluator="lm_evaluation_harness", pool_config={"model": {"name": "run-a"}})
    checkpoint = Servable.from_uri(first.reference.name, first.reference.uri)
    harness = Harness(ending(sound, needs_endpoint=True), Path(sys.executable), None)
    prices = known_regions().prices
    several = {"device": {"kind": "tpu", "variant": "v5litepod-16"}}
    with running_proxy(tmp_path) as proxy, session_of(proxy, checkpoint) as session:
        serving = PoolServing(session)

        def run(name: str, resources: dict[str, Any]) -> Record:
            content = first.config.model_dump(exclude={"pool_config"})
            pool = {"model": {"name": "run-a"}, "resource_config": resources}
            config = EvaluationConfig.model_validate({**content, "pool_config": pool})
            uri = cell_uri(config, first.reference).replace("/out/", f"/out-{name}/")
            cell = replace(first, config=config, evaluation_hash=evaluation_hash(config), uri=uri)
            return recorded(cell, RunResources(lambda _: harness, serving))

        for number, (resources, count) in enumerate([(SLICES, 8), (several, 16), (GANGS, 4), ({"cpu": 2}, 0)]):
            record = run(str(number), resources)
            seconds, cost = record.served["replica_seconds"], record.cost
            assert seconds > 0 and record.chip_seconds == pytest.approx(count * seconds, abs=1e-3)
            replica = ResourceConfig.model_validate({**resources, "replicas": 1})
            hourly = price_per_hour(known_regions().named("us-central1"), replica)
            assert hourly and cost is not None and cost.usd is not None and cost.usd > 0
            assert cost.usd == pytest.approx(float(hourly) * seconds / 3600, rel=1e-3, abs=1e-8)
            assert (cost.region, cost.as_of, cost.source) == ("us-central1", prices.as_of, prices.source)
            assert cost.preemptible is resources.get("preemptible", True)
        before = session.replica_seconds(checkpoint.name)
        with ThreadPoolExecutor(2) as threads:
            both = list(threads.map(run, ("b", "c"), (SLICES, SLICES)))
        whole = session.replica_seconds(checkpoint.name) - before
    assert sum(each.served["replica_seconds"] for each in both) <= whole + 0.01, "none of its seconds is paid twice"


def test_cells_that_read_seconds_at_once_share_them():
    shares, begun, used = SharedSeconds(), threading.Barrier(2), iter((1.0, 2.0, 5.0, 9.0))

    def read_slowly() -> float:
        seconds = next(used)
        if seconds == 5.0:
            begun.wait(10)  # the other cell reads, too: 9.0
        return seconds

    def leave_later() -> float:
        begun.wait(10)
        return shares.leave("run-a", "second", read_slowly)

    shares.join("run-a", "first", read_slowly)
    shares.join("run-a", "second", read_slowly)
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(leave_later)
        assert shares.leave("run-a", "first", read_slowly) == 1.0 + 1.5
        assert second.result() == 1.5 + 4.0


def planning(go: Path, plan: str) -> Commanded:
    """Returns a harness that plans its tokens, and sends no request before a file allows it."""

    def made(_: object, output: Path, python: Path) -> HarnessCommand:
        wait = f"while not Path({str(go)!r}).exists(): time.sleep(0.02)"
        write = f"Path({str(output / 'plan.json')!r}).write_text({plan!r})"
        code = f"import time\nfrom pathlib import Path\n{write}\n{wait}"
        return HarnessCommand(argv=(sys.executable, "-c", code), variables={}, files={})

    return Commanded(made=made)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("priced")
@pytest.mark.parametrize("rated", [True, False])
def test_cell_of_a_benchmark_that_was_never_asked_says_what_its_plan_lets_expect_before_it_asks(
    tmp_path: Path, *, rated: bool
):
    cell = make_cell(
        tmp_path, evaluator="lm_evaluation_harness", pool_config={"model": {"name": "run-a"}, "resource_config": SLICES}
    )
    if rated:
        before = make_record(
            run="run-a",
            hardware=hardware(cell.config),
            cost=Cost(replica_seconds=10.0),
            evaluation={"evals": [{"name": "arc"}]},
            details={"arc": BenchmarkDetails(questions=10)},
            requests={"answered": 10, "prompt_tokens": 990, "completion_tokens": 10},
        )
        out = cell.config.evaluation_path
        note_record(f"{out}/run-a", publish(Path(out), before), before)
    asked = {"questions": 5, "generates": False, "prompt_tokens": 490, "answer_tokens": 10}
    planned = json.dumps({"benchmarks": {}, "to_be_asked": {"demo_facts": asked}})
    harness = Harness(planning(tmp_path / "go", planned), Path(sys.executable), None)
    notices: list[str] = []

    def hear(update: Update) -> None:
        if isinstance(update, Notice):
            notices.append(update.text)
            (tmp_path / "go").touch()  # without the notice it is never allowed to send requests

    checkpoint = Servable.from_uri(cell.reference.name, cell.reference.uri)
    with running_proxy(tmp_path) as proxy, session_of(proxy, checkpoint) as session, listening(hear):
        record = recorded(cell, RunResources(lambda _: harness, PoolServing(session)))
    assert record.cost is not None
    if rated:
        predicted = record.cost.predicted
        assert predicted is not None and (predicted.how, predicted.seconds) == ("guess", 5.0)
        assert predicted.chip_seconds == 40.0 and predicted.usd == pytest.approx(
            5 * (record.cost.usd_per_hour or 0) / 3600
        )
        assert notices[0].startswith(f"{cell.title}: expected for 1 cell: 5.0 s, 0.011 chip-hours, ")
        assert notices[0].endswith("; a guess (1 guess)") and notices[1].endswith(predicted.basis)
    else:
        assert record.cost.predicted is None
        [words] = notices
        assert words.endswith("unknown: 490 tokens of prompts, and no rate of such an engine is known")


@pytest.mark.usefixtures("priced", "chips")
def test_cell_that_loads_its_checkpoint_itself_costs_the_chips_of_its_job_and_those_of_failed_attempts(tmp_path: Path):
    cell = make_cell(tmp_path, resource_config=SLICES)
    records: list[Record] = []
    for harness, ends_well in ((crashing(), False), (crashing(), False), (ending(sound), True)):
        context = RunResources(lambda _, harness=harness: Harness(harness, Path(sys.executable), None))
        with nullcontext() if ends_well else pytest.raises(UnexpectedError):
            run_cell.fn(cell, context)
        records.append(read_record(cell.uri) or make_record())
    for record in records:
        assert record.chip_seconds == pytest.approx(8 * record.seconds["evaluate"]) and record.chip_seconds > 0
    own = [record.cost.usd for record in records if record.cost is not None and record.cost.usd]
    assert records[-1].succeeded and records[-1].spent.attempts == len(own) == 3
    assert records[-1].spent.usd == pytest.approx(sum(own)) and records[-1].spent.unpriced == 0


def test_cost_without_a_price_is_unknown_at_endpoints_and_on_machines(tmp_path: Path):
    cell = make_cell(tmp_path, evaluator="lm_evaluation_harness", base_url="http://there/v1")
    name = cell.reference.name
    harness = Harness(ending(sound, needs_endpoint=True), Path(sys.executable), None)
    with endpoint(tmp_path, name) as engine:
        serving = EndpointServing(engine.base_url, {name: Servable.from_uri(name, cell.reference.uri)})
        record = recorded(cell, RunResources(lambda _: harness, serving))
    assert record.cost is not None and record.cost.usd is None and record.spent.price == "unknown"
    assert record.spent.chip_hours == "unknown" and "endpoint of another owner" in (record.cost.why_unknown or "")
    itself = Harness(ending(sound), Path(sys.executable), None)
    own = recorded(make_cell(tmp_path / "own"), RunResources(lambda _: itself))
    assert own.cost is not None and (own.cost.usd, own.spent.price) == (None, "unknown")
    assert own.spent.chip_hours == "0.000", "there are no chips"


@pytest.mark.usefixtures("priced")
def test_price_with_a_judge_elsewhere_is_at_least_that_of_the_engine(tmp_path: Path):
    judge = {"base_url": "http://judge.test/v1", "model": "judge-70b"}
    pool = {"model": {"name": "run-a"}, "resource_config": SLICES}
    cell = make_cell(tmp_path, evaluator={"name": "alpaca_eval", "judge": judge}, pool_config=pool)
    judged = cost_of(cell.config, 3600.0, judged=True, predicted=None)
    alone = cost_of(cell.config, 3600.0, judged=False, predicted=None)
    assert alone.usd == judged.known_usd and judged.usd is None
    assert "judge-70b at http://judge.test/v1" in (judged.why_unknown or "")
    spent = make_record(cost=judged).spent + make_record(cost=alone).spent
    assert alone.usd is not None and spent.price == f"at least {2 * alone.usd:.2f} USD, 1 unknown"


def test_attempt_goes_on_when_the_proxy_is_killed_under_it(tmp_path: Path):
    cell = make_cell(tmp_path, evaluator="lm_evaluation_harness", pool_config={"model": {"name": "run-a"}})
    checkpoint = Servable.from_uri(cell.reference.name, cell.reference.uri)
    with running_proxy(tmp_path) as first, session_of(first, checkpoint) as session, ThreadPoolExecutor(1) as threads:
        harness = Harness(
            ending(sound, code=f"import os; os.kill({first.process.pid}, 9)", needs_endpoint=True),
            Path(sys.executable),
            None,
        )
        attempt = threads.submit(run_cell.fn, cell, RunResources(lambda _: harness, PoolServing(session)))
        first.process.wait(60)
        with running_proxy(tmp_path, port=first.address.port):
            record = attempt.result(timeout=60)
        assert record is not None and record.status == "succeeded"


def test_record_names_the_first_error_of_an_engine_that_died_meanwhile(tmp_path: Path):
    cell = make_cell(tmp_path, evaluator="lm_evaluation_harness", pool_config={"model": {"name": "run-a"}})
    checkpoint = Servable.from_uri(cell.reference.name, cell.reference.uri)
    error = "RuntimeError: CPU Generator does not use offset"
    with running_proxy(tmp_path) as proxy, session_of(proxy, checkpoint) as session:

        def fail() -> None:
            [replica] = session.status().replicas
            died = replica.announcement.model_copy(update={"sequence": 1, "restarts": 1, "last_death": error})
            proxy.client.announce("a", died, join_token=JOIN_TOKEN)
            raise EndpointUnusable(expected="answers", found="502", remedy="none")

        harness = Harness(ending(lambda: sound(fail), needs_endpoint=True), Path(sys.executable), None)
        reasons = []
        for _ in range(2):
            with pytest.raises(EndpointUnusable):
                run_cell.fn(cell, RunResources(lambda _: harness, PoolServing(session)))
            record = read_record(cell.uri)
            assert record is not None
            reasons.append(record.reason or "")
    notice = f"An engine died meanwhile; the first error in its log: {error}"
    assert [reason.endswith(notice) for reason in reasons] == [True, False], (
        "an earlier death does not count for this attempt"
    )


@pytest.mark.parametrize("label", ["w0", "later"])
def test_attempt_at_an_endpoint_that_exchanges_its_model_does_not_succeed(tmp_path: Path, *, label: str):
    cell = make_cell(tmp_path, evaluator="lm_evaluation_harness", base_url="http://there/v1")
    name = cell.reference.name
    with ExitStack() as engines:
        first = engines.enter_context(endpoint(tmp_path, name))

        def restart() -> None:
            first.process.kill()
            first.process.wait()
            engines.enter_context(endpoint(tmp_path, name, label=label, port=urlsplit(first.url).port or 0))

        serving = EndpointServing(first.base_url, {name: Servable.from_uri(name, cell.reference.uri)})
        harness = Harness(ending(lambda: sound(restart), needs_endpoint=True), Path(sys.executable), None)
        with nullcontext() if label == "w0" else pytest.raises(EndpointUnusable, match="to be the same model"):
            run_cell.fn(cell, RunResources(lambda _: harness, serving))
    record = read_record(cell.uri)
    assert record is not None and record.status == ("succeeded" if label == "w0" else "infra_failed")
    assert not (Path(cell.uri) / SCOPE_NAME).exists(), "nothing of it is used again"


def test_attempt_uses_no_answers_of_an_attempt_at_another_model(tmp_path: Path):
    cell = make_cell(tmp_path, evaluator="lm_evaluation_harness", base_url="http://there/v1")
    name = cell.reference.name
    scopes = []
    harness = Harness(crashing(needs_endpoint=True), Path(sys.executable), None)
    for label in ("w0", "w0", "later", "later"):
        with endpoint(tmp_path, name, label=label) as engine:
            serving = EndpointServing(engine.base_url, {name: Servable.from_uri(name, cell.reference.uri)})
            with pytest.raises(UnexpectedError):
                run_cell.fn(cell, RunResources(lambda _: harness, serving))
            scopes.append((Path(cell.uri) / SCOPE_NAME).read_text())
    assert scopes[0] == scopes[1] != scopes[2] == scopes[3]


def test_attempt_that_our_own_code_breaks_is_recorded_with_type_and_place_and_counted(tmp_path: Path):
    cell = make_cell(tmp_path)
    context = RunResources(lambda _: Harness(crashing(), Path(sys.executable), None))
    for failures in (1, 2):
        with pytest.raises(UnexpectedError):
            run_cell.fn(cell, context)
        record = read_record(cell.uri)
        assert record is not None and record.reason is not None
        assert (record.status, record.infra_failures, record.interrupted) == ("infra_failed", failures, False)
        assert re.search(r"TypeError at tasks\.evaluators\.harness:\d+", record.reason), record.reason
        assert "answer of the model" not in record.reason, "an exception's text may quote what no record may hold"


def test_failure_with_unwritable_text_is_recorded(tmp_path: Path):
    odd = crashing(BadInput(expected="a name", found=os.fsdecode(b"caf\xe9"), remedy="none"))
    cell = make_cell(tmp_path)
    with pytest.raises(BadInput):
        run_cell.fn(cell, RunResources(lambda _: Harness(odd, Path(sys.executable), None)))
    record = read_record(cell.uri)
    assert record is not None and "caf?" in (record.reason or "")


def test_attempt_is_recorded_though_opening_it_breaks(tmp_path: Path):
    def no_harness(_: EvaluationConfig) -> Harness:
        raise KeyError("unknown")

    cell = make_cell(tmp_path)
    with pytest.raises(UnexpectedError):
        run_cell.fn(cell, RunResources(no_harness))
    record = read_record(cell.uri)
    assert record is not None and (record.status, record.infra_failures) == ("infra_failed", 1)


def test_attempt_that_a_person_interrupts_leaves_no_record(tmp_path: Path):
    cell = make_cell(tmp_path)
    context = RunResources(lambda _: Harness(crashing(KeyboardInterrupt()), Path(sys.executable), None))
    with pytest.raises(KeyboardInterrupt):
        run_cell.fn(cell, context)
    assert read_record(cell.uri) is None


def test_attempt_with_unwritable_results_is_recorded_without_them(tmp_path: Path):
    counts = Counts(requested=1, answered=1, scored=1)
    unwritable = Parsed(metrics=(), counts=counts, versions={"odd": object()})  # pyright: ignore[reportArgumentType]
    odd = ending(lambda: unwritable)
    cell = make_cell(tmp_path)
    with pytest.raises(UnexpectedError):
        run_cell.fn(cell, RunResources(lambda _: Harness(odd, Path(sys.executable), None)))
    record = read_record(cell.uri)
    assert record is not None and (record.status, record.counts) == ("infra_failed", None)


def test_attempt_with_an_unwritable_record_says_so(tmp_path: Path):
    cell = make_cell(tmp_path)
    Path(cell.uri).parent.mkdir(parents=True)
    Path(cell.uri).write_text("a file where the folder of the cell is to be")
    with pytest.raises(RecordUnwritten, match=r"run-a-100"):
        run_cell.fn(cell, RunResources(lambda _: Harness(crashing(), Path(sys.executable), None)))


def with_fallback(cell: Cell) -> Cell:
    hash_ = "of-levanter"
    uri = cell_uri(cell.config, cell.reference, hash_)
    return replace(cell, levanter_fallback=replace(cell, uri=uri, evaluation_hash=hash_))


def write(cell: Cell, status: RecordStatus, *, seconds: float = 0.0) -> Record:
    changes = {**of_cell(cell), "created": now() + timedelta(seconds=seconds)}
    return write_record(cell.uri, make_record(status=status).model_copy(update=changes))


def test_record_of_the_fallback_counts_unless_an_older_record_has_succeeded(tmp_path: Path):
    cell = with_fallback(make_cell(tmp_path))
    assert standing_record(cell) is None
    assert cell.levanter_fallback is not None
    write(cell, "infra_failed")
    later = write(cell.levanter_fallback, "failed", seconds=1)
    assert standing_record(cell) == FoundRecord(cell.levanter_fallback.uri, later)
    success = write(cell, "succeeded")
    assert standing_record(cell) == FoundRecord(cell.uri, success)


def test_success_of_the_fallback_is_sent_to_the_sinks_that_lack_it(tmp_path: Path):
    planned = with_fallback(make_cell(tmp_path, sinks=[{"kind": "object_store", "url": str(tmp_path / "store")}]))
    fallback = planned.levanter_fallback
    assert fallback is not None
    record = write(fallback, "succeeded")
    (Path(fallback.uri) / record.attempt).mkdir()
    cell = replace(planned, levanter_fallback=replace(fallback, record=record))
    assert cell.done
    announce.fn([cell], since=now())
    noted = read_record(fallback.uri)
    assert noted is not None and [state.status for state in noted.sinks.values()] == ["published"]
    assert read_record(cell.uri) is None


@dataclass(frozen=True)
class ByProbe:
    """Serving after a check of log-probabilities of prompts with this result."""

    prompt_logprobs: bool

    def has_prompt_logprobs(self, name: str) -> bool:
        return self.prompt_logprobs


@pytest.mark.parametrize("prompt_logprobs", [True, False])
@pytest.mark.parametrize("device", [{"kind": "tpu", "variant": "v5litepod-16"}, {"kind": "cpu"}])
def test_multiple_choice_goes_where_the_engines_probe_says_on_any_device(
    tmp_path: Path, *, prompt_logprobs: bool, device: dict[str, Any]
):
    served = make_cell(
        tmp_path,
        evaluator={"name": "lm_evaluation_harness", "without_prompt_logprobs": "levanter"},
        pool_config={"model": {"name": "run-a"}, "resource_config": {"device": device}},
    )
    config = served.config.levanter_fallback()
    assert config is not None and config.resource_config is not None
    assert config.resource_config.chip_count() == (8 if device["kind"] == "tpu" else 0), (
        "the chips that Levanter evaluates on"
    )
    cell = replace(
        served,
        levanter_fallback=replace(
            served, config=config, evaluation_hash=evaluation_hash(config), uri=cell_uri(config, served.reference)
        ),
    )
    asked = []

    def note(config: EvaluationConfig) -> Harness:
        asked.append(config.evaluator.name)
        raise KeyError("that is all")

    serving: Any = ByProbe(prompt_logprobs)
    with pytest.raises(UnexpectedError):
        run_cell.fn(cell, RunResources(note, serving))
    assert asked == ["lm_evaluation_harness" if prompt_logprobs else "levanter_lm_evaluation_harness"]
    assert (read_record(cell.uri) is not None) == prompt_logprobs
