"""Several evaluations of the same checkpoints, concurrently on a shared endpoint, each with its own records."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fakes import engine as engine_program
from fakes.collector import collector
from fakes.engine import FakeEngine
from fakes.http_server import Answer, Request, http_server
from fakes.models import CONFIG, write_checkpoint
from fakes.polling import eventually
from fakes.processes import running_program
from fakes.proxy import ADMIN_KEY, CLIENT_KEY, JOIN_TOKEN, replica_of, running_proxy
from fakes.tokenizers import write_byte_tokenizer
from flows.evaluation import evaluate
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable
from pools.pool.access import PoolDescription
from pools.protocol import DesiredState, LoadReport
from resources.errors import BadInput
from resources.settings import settings
from tasks.checkpoints.checkpoint import Checkpoint
from tasks.checkpoints.discovery import find_checkpoints
from tasks.errors import EvaluationInterrupted, RecordUnwritten
from tasks.records.record import Record, read_records
from tasks.running.cells import plan_cells
from tasks.running.claimed_cells import ClaimedCells
from tasks.running.planning import plan_checkpoints
from tasks.running.provisioning import provisioned
from tasks.running.scheduler import schedule_cells, stage_tokenizers
from tasks.spec.evaluation import EvaluationConfig

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300), pytest.mark.usefixtures("prefect_api")]

QUESTIONS = 3
PATIENCE_SECONDS = 90.0


@contextmanager
def gate(upstream: str) -> Iterator[str]:
    """Forwards requests to an engine only after a request of each kind has arrived: log-likelihood and generation."""
    seen: set[str] = set()
    opened = threading.Event()

    def answer(request: Request) -> Answer:
        fields = json.loads(request.body or b"{}")
        if "seed" in fields:  # from the harness; Assay's own probes have none
            seen.add("log-likelihood" if fields.get("echo") else "generation")
            if len(seen) == 2:
                opened.set()
            if not opened.wait(PATIENCE_SECONDS):
                return 400, {}, b"the other evaluation has not begun"
        json_type = {"Content-Type": "application/json"}
        passed = urllib.request.Request(upstream + request.path, request.body or None, json_type)
        with urllib.request.urlopen(passed, timeout=60) as response:
            return 200, json_type, response.read()

    with http_server(answer) as address:
        yield address


@pytest.fixture
def engine_url(tmp_path: Path) -> Iterator[str]:
    address = tmp_path / "engine.json"
    with running_program(str(engine_program.__file__), "--address-file", str(address), "--model", "run-7"):
        eventually(address.is_file)
        yield json.loads(address.read_text())["url"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = {**CONFIG, "num_attention_heads": 1}
    write_byte_tokenizer(write_checkpoint(tmp_path / "run" / "hf" / "step-7", seed=7, config=config))
    return tmp_path / "run"


def evaluation(run: Path, benchmark: str, **changes: Any) -> EvaluationConfig:
    given = {
        "model_path": str(run),
        "evaluation_path": str(run.parent / "evaluations"),
        "evals": [{"name": benchmark}],
        "max_eval_instances": QUESTIONS,
    }
    return EvaluationConfig.model_validate({**given, **changes})


def evaluated(configs: list[EvaluationConfig], checkpoints: list[Checkpoint]) -> list[Record]:
    return evaluate(plan_checkpoints(configs, checkpoints))


def by_benchmark(run: Path) -> dict[str, Record]:
    return {record.benchmarks[0]: record for record in read_records(str(run.parent / "evaluations"))}


def test_evaluations_of_a_checkpoint_run_together_and_write_a_record_each(run: Path, engine_url: str):
    with gate(engine_url) as url:  # would never open if the evaluations ran in sequence
        configs = [evaluation(run, name, base_url=f"{url}/v1") for name in ("demo_facts", "demo_backwards")]
        records = evaluated(configs, find_checkpoints(str(run)))
    assert {record.benchmarks for record in records} == {("demo_facts",), ("demo_backwards",)}
    assert all(record.succeeded and record.samples == QUESTIONS for record in records)
    assert len({record.cell for record in records}) == 2


def test_evaluation_that_fails_leaves_the_other_its_record(run: Path, engine_url: str):
    good = evaluation(run, "demo_facts", base_url=f"{engine_url}/v1")
    late = evaluation(run, "demo_backwards", base_url=f"{engine_url}/v1", timeout_seconds=0.01)
    with pytest.raises(EvaluationInterrupted, match="run-7 · lm-eval: infra_failed"):
        evaluated([good, late], find_checkpoints(str(run)))
    records = by_benchmark(run)
    assert records["demo_facts"].status == "succeeded"
    assert records["demo_backwards"].status == "infra_failed"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_url": "http://127.0.0.1:9/v1"}, "the same base_url"),
        ({"evaluation_path": "/elsewhere"}, "the same evaluation_path"),
        ({"model_name": "other"}, "the same run"),
        ({"evals": [{"name": "demo_facts"}]}, "evaluations that differ"),
    ],
)
def test_evaluations_that_cannot_be_made_together_are_refused(
    run: Path, engine_url: str, changes: dict[str, Any], words: str
):
    first = evaluation(run, "demo_facts", base_url=f"{engine_url}/v1")
    second = evaluation(run, "demo_backwards", **{"base_url": f"{engine_url}/v1", **changes})
    with pytest.raises(BadInput, match=words):
        evaluated([first, second], find_checkpoints(str(run)))
    assert not by_benchmark(run)


def test_sink_that_fails_costs_no_cell_and_gets_what_it_lacks_with_the_next_run(run: Path, engine_url: str):
    cards, store = run.parent / "cards", run.parent / "store"
    store.write_text("a file where the folder is to be")
    sinks = [{"kind": "hugging_face", "path": str(cards)}, {"kind": "object_store", "url": str(store)}]
    config = evaluation(run, "demo_facts", base_url=f"{engine_url}/v1", sinks=sinks)

    [record] = evaluated([config], find_checkpoints(str(run)))
    assert record.succeeded
    states = {name.partition(":")[0]: state for name, state in record.sinks.items()}
    assert {name: state.status for name, state in states.items()} == {
        "hugging_face": "published",
        "object_store": "failed",
    }
    assert "demo_facts" in (cards / "run" / "step-7" / "README.md").read_text()
    assert states["object_store"].reason

    store.unlink()
    [again] = evaluated([config], find_checkpoints(str(run)))
    assert again.created == record.created, "nothing is evaluated again"
    assert {state.status for state in again.sinks.values()} == {"published"}
    copied = [path.name for path in store.rglob("*") if path.is_file()]
    assert {"record.json", "samples.jsonl.gz", "report.html"} <= set(copied)


def test_record_that_cannot_be_written_is_raised_by_the_scheduler(run: Path, engine_url: str):
    config = evaluation(run, "demo_facts", base_url=f"{engine_url}/v1")
    [cell] = plan_cells([config], find_checkpoints(str(run)))
    Path(cell.uri).parent.mkdir(parents=True)
    Path(cell.uri).write_text("a file where the folder of the cell is to be")
    with provisioned([config], stage_tokenizers([cell])) as serving, pytest.raises(RecordUnwritten, match="run-7"):
        schedule_cells([cell], serving, claimed=ClaimedCells((), wait=False))


async def test_trace_holds_cell_and_phases_and_names_the_cell_to_the_engine_of_a_pool(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    [checkpoint] = find_checkpoints(str(run))
    served = Servable.from_uri("run-7", checkpoint.uri)
    config = InferencePoolConfig.model_validate({"model": {"name": "run"}})
    described = PoolDescription(config=config, engine_build="b").model_dump_json()
    load = {"number": 1, "model": "run-7", "digest": served.digests.checkpoint, "how": "reload", "seconds": 0.5}
    phases = {"stage": 0.2, "reload": 0.3}
    loaded = LoadReport.model_validate({**load, "phases": phases, "ended": time.time() + 60})
    async with FakeEngine() as engine:
        with collector() as came, running_proxy(tmp_path, description=described) as proxy:
            ready = replica_of(engine, digest=served.digests.checkpoint)
            announcement = ready.announcement.model_copy(
                update={"prompt_logprobs": True, "max_model_len": 4096, "loads": (loaded,)}
            )
            proxy.client.set_state(DesiredState(models={"run-7": served.served}, orders={ready.name: "run-7"}))
            proxy.client.announce(ready.name, announcement, join_token=JOIN_TOKEN)
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", came.url)
            monkeypatch.setenv("ASSAY_POOL_KEY", CLIENT_KEY)
            monkeypatch.setenv("ASSAY_POOL_ADMIN_KEY", ADMIN_KEY)
            settings.cache_clear()
            try:
                asked = evaluation(run, "demo_facts", pool_name=proxy.url)
                [record] = await asyncio.to_thread(evaluated, [asked], [checkpoint])
            finally:
                monkeypatch.undo()
                settings.cache_clear()
    assert record.succeeded and record.served["phases"] == phases and "ended" not in record.served
    inside = ("open", "load", "load/stage", "load/reload", "evaluate", "evaluate/ask", "evaluate/score", "record")
    assert {"evaluation", "evaluation/cell", *(f"evaluation/cell/{name}" for name in inside)} <= set(came.paths())
    cell = came.span_named("cell")
    named = {item.key: item.value.string_value or item.value.int_value for item in cell.attributes}
    assert (named["assay.checkpoint"], named["assay.step"], named["assay.benchmarks"]) == ("run-7", 7, "demo_facts")
    [carried] = set(engine.traceparents)
    assert carried is not None and carried.startswith(f"00-{cell.trace_id.hex()}-{cell.span_id.hex()}-0")
