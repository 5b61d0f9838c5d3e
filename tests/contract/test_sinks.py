"""Promises of every sink, for all targets."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakes.alerts import known_alert
from fakes.broken_servers import broken_server
from fakes.cells import make_cell
from fakes.gcs import fake_gcs
from fakes.records import labelled, make_metric
from fakes.wandb_files import read_offline_run
from resources.environments.environments import ensure_environment
from tasks.evaluators.environments import LM_EVAL
from tasks.records.cost import Cost, Predicted
from tasks.records.record import Record, SinkState, note_sinks, read_record
from tasks.sinks.announcement import Announcement
from tasks.sinks.hugging_face import HuggingFaceSink
from tasks.sinks.mlflow_runs import MlflowSink
from tasks.sinks.object_store import ObjectStoreSink
from tasks.sinks.publishing import missing_sinks, publish_alerts, publish_missing, publish_record
from tasks.sinks.senders import Senders
from tasks.sinks.weights_and_biases import WeightsAndBiasesSink
from tasks.spec.sinks import Sink
from tasks.verdicts.alert_files import KnownAlert, write_first
from tasks.verdicts.alerts import sentence

KEY = "f00dfacef00dfacef00dfacef00dfacef00dface"
NUMBERS = {
    "demo_facts/acc": 0.5,
    "demo_facts/acc_stderr": 0.04,
    "demo_facts/acc_n": 120,
    "demo_backwards/exact_match": 0.25,
    "demo_backwards/exact_match_n": 120,
}


@dataclass
class Place:
    """A sink, and functions that read its content: `numbers` by training step, `everything` for comparisons.

    `alerts` has for each alert its training step, the deviation of the value, and the text; `values` the latest values.
    """

    sink: Sink
    broken: Sink
    numbers: Callable[[], dict[int, dict[str, float]]]
    everything: Callable[[], Any]
    alerts: Callable[[], list[tuple[int, float, str]]] = list
    values: Callable[[], dict[str, Any]] = dict


@pytest.fixture
def refusing() -> Iterator[str]:
    with broken_server("refusing") as address:
        yield address


@pytest.fixture
def senders() -> Iterator[Senders]:
    with Senders() as started:
        yield started


@pytest.fixture(params=["object_store", "wandb", "mlflow", "hugging_face"])
def place(request: pytest.FixtureRequest, tmp_path: Path, refusing: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.setenv(name, KEY)
    match request.param:
        case "object_store":
            store = request.getfixturevalue("gcs_place")
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.address)
            return object_store_place(store)
        case "wandb":
            return wandb_place(tmp_path / "wandb", refusing)
        case "mlflow":
            address = request.getfixturevalue("mlflow_address")
            return mlflow_place(address, f"experiment of {request.node.name}", refusing)
        case _:
            return hugging_face_place(tmp_path / "cards", tmp_path / "no-card")


@pytest.fixture
def gcs_place() -> Iterator[Any]:
    with fake_gcs("bucket") as store:
        yield store


def object_store_place(store: Any) -> Place:
    def records() -> list[dict[str, Any]]:
        names = [name for name in store.names("bucket") if name.endswith("/record.json")]
        return [json.loads(store.content("bucket", name)) for name in names]

    def numbers() -> dict[int, dict[str, float]]:
        return {record["checkpoint"]["step"]: of_metrics(record["metrics"]) for record in records()}

    return Place(
        ObjectStoreSink(url="gs://bucket/evaluations"),
        ObjectStoreSink(url="gs://no-such-bucket/evaluations"),
        numbers,
        lambda: (list(store.uploads), {name: store.content("bucket", name) for name in store.names("bucket")}),
    )


def wandb_place(folder: Path, refusing: str) -> Place:
    def runs() -> list[Any]:
        return [read_offline_run(path) for path in sorted(folder.rglob("*.wandb"))]

    def numbers() -> dict[int, dict[str, float]]:
        lines = [line for run in runs() for line in run.history]
        return {
            line["training_step"]: {name: line[name] for name in line if name in NUMBERS or name.startswith("cost/")}
            for line in lines
            if "training_step" in line
        }

    return Place(
        WeightsAndBiasesSink(project="p", mode="offline", folder=str(folder)),
        WeightsAndBiasesSink(project="p", base_url=refusing, timeout_seconds=6),
        numbers,
        lambda: sorted(str(path) for path in folder.rglob("*")) + [str(run) for run in runs()],
        lambda: [
            (line["training_step"], line["demo_facts/acc_alert"], run.config[f"alert/{line['training_step']:016x}"])
            for run in runs()
            for line in run.history
            if "demo_facts/acc_alert" in line and "alert" in run.tags and run.alerts
        ],
        lambda: {name: value for run in runs() for name, value in run.summary.items()},
    )


def mlflow_place(address: str, experiment: str, refusing: str) -> Place:
    from mlflow import MlflowClient

    client = MlflowClient(address)

    def runs() -> list[Any]:
        mlflow_experiment = client.get_experiment_by_name(experiment)
        return list(client.search_runs([mlflow_experiment.experiment_id])) if mlflow_experiment else []

    def history() -> list[Any]:
        return [
            metric
            for run in runs()
            for name in run.data.metrics
            for metric in client.get_metric_history(run.info.run_id, name)
        ]

    def numbers() -> dict[int, dict[str, float]]:
        by_step: dict[int, dict[str, float]] = {}
        for metric in history():
            by_step.setdefault(metric.step, {})[metric.key] = metric.value
        return by_step

    return Place(
        MlflowSink(tracking_uri=address, experiment=experiment),
        MlflowSink(tracking_uri=refusing, experiment=experiment, timeout_seconds=30),
        numbers,
        lambda: ([(run.info.run_id, run.data.tags) for run in runs()], [str(metric) for metric in history()]),
        lambda: [
            (metric.step, metric.value, run.data.tags[f"alert.{metric.step:016x}"])
            for run in runs()
            if run.data.tags.get("alert") == "true"
            for metric in client.get_metric_history(run.info.run_id, "demo_facts/acc_alert")
        ],
        lambda: {name: value for run in runs() for name, value in run.data.metrics.items()},
    )


def hugging_face_place(folder: Path, in_the_way: Path) -> Place:
    in_the_way.write_text("a file where a folder should be")

    def numbers() -> dict[int, dict[str, float]]:
        by_step = {}
        for path in folder.rglob("README.md"):
            metadata = yaml.safe_load(path.read_text().split("---")[1])
            named = {}
            for result in metadata["model-index"][0]["results"]:
                metrics = [
                    {**metric, "benchmark": result["dataset"]["name"], **metric["args"]} for metric in result["metrics"]
                ]
                named |= of_metrics(metrics)
            by_step[int(path.parent.name.removeprefix("step-"))] = named
        return by_step

    return Place(
        HuggingFaceSink(path=str(folder)),
        HuggingFaceSink(path=str(in_the_way)),
        numbers,
        lambda: {path: path.read_bytes() for path in folder.rglob("*.md")},
    )


def of_metrics(metrics: list[dict[str, Any]]) -> dict[str, float]:
    named: dict[str, float] = {}
    for metric in metrics:
        name = f"{metric['benchmark']}/{metric['name']}"
        named |= {name: metric["value"], f"{name}_n": metric["n"]}
        named |= {f"{name}_stderr": metric["stderr"]} if metric.get("stderr") is not None else {}
    return named


def test_sink_shows_every_number_with_error_and_n_and_publishing_twice_is_the_same_as_once(
    place: Place, senders: Senders, tmp_path: Path
):
    record, cell = make_cell(tmp_path / "evaluations")
    first = publish_record(record, str(cell), (place.sink,), senders=senders)
    state = first[place.sink.name]
    assert (state.status, state.reason) == ("published", None)
    [(step, numbers)] = place.numbers().items()
    assert (step, {name: numbers[name] for name in numbers if not name.startswith("cost/")}) == (100, NUMBERS)
    before = place.everything()
    noted = note_sinks(str(cell), first)
    assert noted is not None
    again = publish_record(noted, str(cell), (place.sink,), senders=senders)
    assert {name: (state.status, state.where) for name, state in again.items()} == {
        name: (state.status, state.where) for name, state in first.items()
    }
    assert place.everything() == before


@pytest.mark.parametrize("place", ["wandb", "mlflow"], indirect=True)
def test_tracker_shows_a_label_as_a_value_of_its_own_name_and_on_no_curve(
    place: Place, senders: Senders, tmp_path: Path
):
    for record, cell in (
        make_cell(tmp_path / "evaluations"),
        make_cell(tmp_path / "evaluations", record=labelled("best", 0.75)),
    ):
        assert publish_record(record, str(cell), (place.sink,), senders=senders)[place.sink.name].status == "published"
    curve = {
        step: numbers["demo_facts/acc"] for step, numbers in place.numbers().items() if "demo_facts/acc" in numbers
    }
    assert curve == {100: 0.5}
    assert place.values()["best/demo_facts/acc"] == 0.75


@pytest.mark.parametrize("linked", ["file", "attempt"])
@pytest.mark.parametrize("kind", ["object_store", "mlflow", "hugging_face"])
def test_sink_publishes_no_file_behind_a_link(
    kind: str, linked: str, senders: Senders, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    private, out = tmp_path / "private", tmp_path / "out"
    private.mkdir()
    (private / "key").write_text(KEY)
    record, cell = make_cell(tmp_path / "evaluations")
    attempt = cell / record.attempt
    if linked == "attempt":
        attempt.rename(tmp_path / "moved")
        attempt.symlink_to(private)
    else:
        (attempt / "log").symlink_to(private / "key")
        (attempt / "work" / "log").symlink_to(private / "key")
        os.mkfifo(attempt / "pipe")
    card = out / "run-a" / "step-100" / "README.md"
    card.parent.mkdir(parents=True)
    card.symlink_to(private / "key")
    sinks: dict[str, Sink] = {
        "object_store": ObjectStoreSink(url=str(out)),
        "mlflow": MlflowSink(tracking_uri=str(out), experiment="links"),
        "hugging_face": HuggingFaceSink(path=str(out)),
    }
    state = publish_record(record, str(cell), (sinks[kind],), senders=senders)[sinks[kind].name]
    published = [path for path in out.rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path for path in published if KEY in path.read_bytes().decode(errors="replace")] == []
    assert ("Not sent: 3 pipes, or links" in caplog.text) is (kind != "hugging_face" and linked == "file")
    refused = kind == "hugging_face" or linked == "attempt"
    assert (state.status, "link" in (state.reason or "")) == ("failed", True) if refused else ("published", False)


@pytest.mark.parametrize("place", ["wandb", "mlflow"], indirect=True)
def test_tracker_shows_the_price_with_its_list_and_no_unknown_number(place: Place, senders: Senders, tmp_path: Path):
    predicted = Predicted(how="guess", basis="a record", seconds=90.0, usd=0.1)
    known = Cost(usd=0.12, replica_seconds=100.0, source="the contract of March", predicted=predicted)
    unknown = Cost(why_unknown="the judge has no price", replica_seconds=5.0)
    for step, cost in ((100, known), (200, unknown)):
        record, cell = make_cell(tmp_path / "evaluations", step=step, cost=cost, chip_seconds=800.0)
        states = publish_record(record, str(cell), (place.sink,), senders=senders)
        assert states[place.sink.name].status == "published"
    costs = {
        step: {name: number for name, number in numbers.items() if name.startswith("cost/")}
        for step, numbers in place.numbers().items()
    }
    seconds = {"cost/chip_seconds": 800.0, "cost/seconds": pytest.approx(9.85)}
    expected = {"cost/predicted_usd": 0.1, "cost/predicted_seconds": 90.0}
    assert costs == {100: {"cost/usd": 0.12, **seconds, **expected}, 200: seconds}
    assert "the contract of March" in (shown := str(place.everything())) and "the judge has no price" in shown


def test_cells_finishing_at_once_and_out_of_order_keep_their_steps(place: Place, senders: Senders, tmp_path: Path):
    def publish(written: tuple[Record, Path]) -> dict[str, SinkState]:
        record, cell = written
        return publish_record(record, str(cell), (place.sink,), senders=senders)

    cells = [
        make_cell(tmp_path / "evaluations", step=step, metrics=(make_metric(value=step / 1000, stderr=None),))
        for step in (200, 100)
    ]
    with ThreadPoolExecutor(2) as threads:
        states = list(threads.map(publish, cells))
    assert {state[place.sink.name].status for state in states} == {"published"}
    assert {step: numbers["demo_facts/acc"] for step, numbers in place.numbers().items()} == {100: 0.1, 200: 0.2}


def test_alert_appears_next_to_its_curve_once_at_sinks_with_curves(place: Place, senders: Senders, tmp_path: Path):
    record, cell = make_cell(tmp_path / "evaluations")
    known = known_alert(record)
    elsewhere = known_alert(record.model_copy(update={"evaluation_hash": "another"}))
    assert write_first(str(tmp_path / "evaluations" / "run-a"), known)
    publish_missing(str(tmp_path / "evaluations"), [place.sink])
    before = place.everything()

    def publish(*alerts: KnownAlert) -> set[str]:
        states = publish_alerts(Announcement.of(record, str(cell)), (place.sink,), alerts, senders=senders)
        return {state.status for state in states.values()}

    if not place.sink.takes_alerts:
        assert publish(known) == set() and place.everything() == before
        return
    assert publish(elsewhere) == set() and place.everything() == before
    for _ in range(2):
        assert publish(known, elsewhere) == {"published"}
        assert place.alerts() == [(100, -0.25, sentence(known.alert))]
    assert place.numbers()[100].items() >= NUMBERS.items()
    later = known_alert(record.model_copy(update={"checkpoint": record.checkpoint.model_copy(update={"step": 200})}))
    assert publish(known, later) == {"published"}
    assert sorted(step for step, _, _ in place.alerts()) == [100, 200]


@pytest.mark.parametrize("status", ["failed", "infra_failed", "withheld"])
def test_record_without_a_success_is_sent_nowhere(place: Place, tmp_path: Path, status: Any):
    record, cell = make_cell(tmp_path / "evaluations", status=status)
    assert publish_record(record, str(cell), (place.sink,)) == {}
    assert missing_sinks(record, (place.sink,)) == ()
    assert place.numbers() == {}


def test_sink_that_fails_says_why_raises_nothing_and_stops_no_other(place: Place, tmp_path: Path):
    record, cell = make_cell(tmp_path / "evaluations")
    other = HuggingFaceSink(path=str(tmp_path / "other"))
    states = publish_record(record, str(cell), (place.broken, other))
    failed = states[place.broken.name]
    assert failed.status == "failed" and failed.where is None
    assert failed.reason is not None and "To do:" in failed.reason and KEY not in failed.reason
    assert states[other.name].status == "published"
    noted = note_sinks(str(cell), states)
    assert noted is not None and missing_sinks(noted, (place.broken, other)) == (place.broken,)
    standing = read_record(str(cell))
    assert standing is not None and standing.succeeded and standing.metrics == record.metrics


@pytest.mark.harness
def test_model_card_is_valid_for_the_parser_of_the_hub(tmp_path: Path):
    record, cell = make_cell(tmp_path / "evaluations")
    sink = HuggingFaceSink()
    where = publish_record(record, str(cell), (sink,))[sink.name].where
    program = (
        "import json, sys; from huggingface_hub import ModelCard; card = ModelCard.load(sys.argv[1]);"
        "results = card.data.eval_results;"
        "print(json.dumps([[each.dataset_name, each.metric_type, each.metric_value] for each in results]))"
    )
    python = ensure_environment(LM_EVAL).python
    output = subprocess.run([python, "-c", program, str(where)], capture_output=True, text=True, check=True).stdout
    assert sorted(json.loads(output)) == [["demo_backwards", "exact_match", 0.25], ["demo_facts", "acc", 0.5]]
