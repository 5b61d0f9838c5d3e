"""Records and generated text in an object store: unmodified gcsfs over HTTP, against an emulator that also refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.cells import make_cell
from fakes.gcs import FakeGcs, fake_gcs
from resources.errors import BadInput
from resources.storage import storage
from tasks.generation.config import PromptsConfig
from tasks.generation.output import AnswerFolder, AnswerRow, decoded
from tasks.generation.prompts import plan_prompts, rows_of
from tasks.records.record import Record
from tasks.sinks.announcement import Announcement
from tasks.sinks.object_store import ObjectStoreSink
from tasks.sinks.publishing import publish_record, publish_report
from tasks.sinks.senders import Senders

SINK = ObjectStoreSink(url="gs://bucket/evaluations", timeout_seconds=60)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with fake_gcs("bucket", "busy") as started:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", started.address)
        yield started


@pytest.fixture
def senders() -> Iterator[Senders]:
    with Senders() as started:
        yield started


def place_of(record: Record) -> str:
    return f"evaluations/run-a/step-{record.checkpoint.step}/{record.evaluator}/{record.cell}"


def test_record_tree_arrives_with_the_record_last(store: FakeGcs, tmp_path: Path):
    record, cell = make_cell(tmp_path)
    state = publish_record(record, str(cell), (SINK,))[SINK.name]
    place = place_of(record)
    assert state.where == f"gs://bucket/{place}"
    assert store.uploads[-1] == f"{place}/record.json"
    assert {name.removeprefix(f"{place}/attempt-1/") for name in store.uploads[:-1]} == {
        "harness.log",
        "samples.jsonl.gz",
        "work/job.json",
    }
    assert store.content("bucket", f"{place}/attempt-1/harness.log") == b"harness of step 100\n"
    assert Record.model_validate_json(store.content("bucket", f"{place}/record.json")) == record


def answer_to(index: int, prompt: str) -> AnswerRow:
    unset = dict.fromkeys(("tool_calls", "prompt_tokens", "completion_tokens", "seed", "columns", "error"))
    texts = dict.fromkeys(("checkpoint", "checkpoint_digest", "pool", "parameters", "text", "finish_reason"), "same")
    return AnswerRow(prompt_index=index, prompt_id=str(index), sample=0, prompt=prompt, **texts, **unset)


def test_text_is_generated_from_a_bucket_into_a_bucket(store: FakeGcs):
    for number in range(2):
        lines = "".join(f'{{"prompt": "question {number} {row}"}}\n' for row in range(3))
        storage.write_bytes(f"gs://bucket/prompts/part-{number}.jsonl", lines.encode())
    config = PromptsConfig(files=("gs://bucket/prompts/*.jsonl",))
    plan = plan_prompts(config, prompts_per_shard=2)
    output = AnswerFolder("gs://bucket/generated/run-a-100", "parquet")
    output.begin({"prompts": plan.digest})
    for shard in plan.shards:
        answers = [answer_to(shard.first_prompt + place, row["prompt"]) for place, row in enumerate(rows_of(shard))]
        output.write(shard.number, answers)
    manifest = output.conclude({"prompts": plan.digest}, shards=len(plan.shards))
    assert manifest["totals"]["rows"] == plan.prompts == 6
    assert output.written() == [0, 1, 2, 3]
    rows = [row for shard in plan.shards for row in decoded(storage.read_bytes(output.part(shard.number)), "parquet")]
    assert [row["prompt"] for row in rows] == [f"question {number} {row}" for number in range(2) for row in range(3)]
    with pytest.raises(BadInput, match="another output folder"):
        output.begin({"prompts": "others"})


def test_record_alone_arrives_where_the_harness_output_is_not_wanted(store: FakeGcs, tmp_path: Path):
    record, cell = make_cell(tmp_path)
    publish_record(record, str(cell), (SINK.model_copy(update={"harness_output": False}),))
    assert store.uploads == [f"{place_of(record)}/record.json"]


def test_report_arrives_next_to_the_records_of_the_run(store: FakeGcs, senders: Senders, tmp_path: Path):
    record, cell = make_cell(tmp_path)
    assert publish_report(Announcement.of(record, str(cell)), (SINK,), senders=senders) == {}, "there is none yet"
    (tmp_path / "run-a" / "report.html").write_text("<html>")
    (state,) = publish_report(Announcement.of(record, str(cell)), (SINK,), senders=senders).values()
    assert state.where == "gs://bucket/evaluations/run-a/report.html"
    assert store.content("bucket", "evaluations/run-a/report.html") == b"<html>"


def test_upload_that_was_cut_off_goes_on_without_what_is_there(store: FakeGcs, tmp_path: Path):
    record, cell = make_cell(tmp_path)
    (cell / "attempt-1" / "z.log").write_text("the last file")
    store.refuse("z.log", 403)
    assert publish_record(record, str(cell), (SINK,))[SINK.name].status == "failed"
    place = place_of(record)
    assert f"{place}/record.json" not in store.names("bucket"), "an unfinished copy has no record"
    assert len(store.uploads) == 3
    assert publish_record(record, str(cell), (SINK,))[SINK.name].status == "published"
    assert store.uploads[3:] == [f"{place}/attempt-1/z.log", f"{place}/record.json"]


def test_file_that_differs_at_the_same_size_is_sent_again(store: FakeGcs, senders: Senders, tmp_path: Path):
    record, cell = make_cell(tmp_path)
    publish_record(record, str(cell), (SINK,), senders=senders)
    (cell / "attempt-1" / "harness.log").write_text("harness of step 999\n")
    publish_record(record, str(cell), (SINK,), senders=senders)
    assert store.content("bucket", f"{place_of(record)}/attempt-1/harness.log") == b"harness of step 999\n"


def test_store_that_forbids_says_which_permission_is_lacking(store: FakeGcs, tmp_path: Path):
    record, cell = make_cell(tmp_path)
    store.refuse("", 403, always=True)
    state = publish_record(record, str(cell), (SINK,))[SINK.name]
    assert state.status == "failed" and state.reason is not None
    assert "the permission storage.objects.create on the bucket" in state.reason
    assert len(store.requests) == 1, "asking again would not help"


def test_store_that_is_busy_is_asked_again_and_then_reported(store: FakeGcs, tmp_path: Path):
    record, cell = make_cell(tmp_path)
    store.refuse("/b/bucket/", 429, 503)
    store.refuse("/b/busy/", 503, always=True)
    busy = ObjectStoreSink(url="gs://busy/evaluations", timeout_seconds=100)
    states = publish_record(record, str(cell), (SINK, busy))
    assert states[SINK.name].status == "published"
    reason = states[busy.name].reason
    assert reason is not None and "503" in reason and "busy" in reason
    assert len([request for request in store.requests if "/b/busy/" in request]) == 6


def test_bucket_that_is_not_there_is_named(store: FakeGcs, tmp_path: Path):
    record, cell = make_cell(tmp_path)
    sink = ObjectStoreSink(url="gs://elsewhere/evaluations")
    reason = publish_record(record, str(cell), (sink,))[sink.name].reason
    assert reason is not None and "a bucket at gs://elsewhere/evaluations" in reason


@pytest.mark.parametrize(("url", "about"), [("floppy://a/b", "before ://"), ("", "another place than the records'")])
def test_place_that_cannot_be_is_reported(tmp_path: Path, url: str, about: str):
    record, cell = make_cell(tmp_path)
    sink = ObjectStoreSink(url=url or str(tmp_path))
    state = publish_record(record, str(cell), (sink,))[sink.name]
    assert state.status == "failed" and state.reason is not None and about in state.reason
