"""Records: written atomically, once, and never over a success."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from fakes.records import cell_of, make_record, publish
from resources.errors import StorageError
from resources.settings import process_environment
from resources.storage import storage
from tasks.records.current import current_records, told_apart
from tasks.records.record import read_record, read_records, record_to_replace, record_uri, write_record


def test_success_is_kept_after_any_later_record(tmp_path: Path) -> None:
    first = make_record(attempt="attempt-1")
    assert write_record(cell_of(tmp_path, make_record()), first) == first
    assert write_record(cell_of(tmp_path, make_record()), make_record(attempt="attempt-2")) == first
    assert (
        write_record(cell_of(tmp_path, make_record()), make_record(status="infra_failed", attempt="attempt-3")) == first
    )
    assert read_record(cell_of(tmp_path, make_record())) == first


@pytest.mark.parametrize("status", ["failed", "infra_failed", "withheld"])
def test_anything_but_success_is_replaced(tmp_path: Path, status: str) -> None:
    write_record(cell_of(tmp_path, make_record()), make_record(status=status))  # pyright: ignore[reportArgumentType]
    better = make_record()
    assert write_record(cell_of(tmp_path, make_record()), better) == better
    assert read_record(cell_of(tmp_path, make_record())) == better


def test_two_runs_at_once_leave_a_single_whole_success(tmp_path: Path) -> None:
    barrier = threading.Barrier(6)
    attempts: list[str] = []

    def finish(index: int) -> None:
        barrier.wait()
        attempts.append(write_record(cell_of(tmp_path, make_record()), make_record(attempt=f"attempt-{index}")).attempt)

    threads = [threading.Thread(target=finish, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record = read_record(cell_of(tmp_path, make_record()))
    assert record is not None
    assert set(attempts) == {record.attempt}


def test_full_disk_leaves_no_record(small_disk: Path) -> None:
    huge = make_record(reason="x" * 3_000_000, status="withheld")
    with pytest.raises(StorageError, match="free some space"):
        write_record(cell_of(small_disk, make_record()), huge)
    assert read_record(cell_of(small_disk, make_record())) is None
    assert not storage.exists(record_uri(cell_of(small_disk, make_record())))


def test_half_written_record_is_not_taken_for_done(tmp_path: Path) -> None:
    content = make_record().model_dump_json()
    storage.write_bytes(record_uri(cell_of(tmp_path, make_record())), content[: len(content) // 2].encode())
    assert read_record(cell_of(tmp_path, make_record())) is None
    record = make_record()
    assert write_record(cell_of(tmp_path, make_record()), record) == record
    assert read_record(cell_of(tmp_path, make_record())) == record


@pytest.mark.parametrize("newer", [{"schema_version": 5}, {"power_watts": 1}])
def test_success_of_a_newer_version_is_kept_but_its_failure_not(tmp_path: Path, newer: dict[str, int]) -> None:
    file = Path(cell_of(tmp_path, make_record()), "record.json")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(make_record().model_dump(mode="json") | newer))
    before = file.read_bytes()
    for refused in (
        lambda: write_record(cell_of(tmp_path, make_record()), make_record()),
        lambda: record_to_replace(cell_of(tmp_path, make_record())),
    ):
        with pytest.raises(StorageError, match="newer Assay"):
            refused()
    assert file.read_bytes() == before
    file.write_text(json.dumps(make_record(status="failed").model_dump(mode="json") | newer))
    assert record_to_replace(cell_of(tmp_path, make_record())) is None
    assert write_record(cell_of(tmp_path, make_record()), make_record()) == make_record()


def test_writers_killed_at_any_moment_leave_whole_records(tmp_path: Path) -> None:
    environment = process_environment({"PYTHONPATH": os.pathsep.join(sys.path)})
    command = [sys.executable, "-c", _KILLED_WRITERS, cell_of(tmp_path, make_record())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


_KILLS, _RECORDS = 150, 16
_KILLED_WRITERS = f"""
import os, signal, sys, time
from random import Random
from fakes.records import cell_of, make_record, publish
from tasks.records.record import read_record, write_record

folder, source, seen = sys.argv[1], Random(7), set()

def write(writer, number):
    attempt = f"attempt-{{writer}}-{{number}}"
    write_record(folder, make_record(status="withheld", attempt=attempt, reason=attempt * 4_000))

write(0, 0)
writer = 0
while writer < {_KILLS} or len(seen) < {_RECORDS}:  # on a busy machine few come to write before they are killed
    writer += 1
    if not (child := os.fork()):
        number = 0
        while number := number + 1:
            write(writer, number)
    time.sleep(source.random() * 0.02)  # the kill may come at any moment of it
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    record = read_record(folder)
    assert record is not None and record.reason == record.attempt * 4_000, record
    seen.add(record.attempt)
"""


def test_records_below_a_folder_come_by_run_and_step(tmp_path: Path) -> None:
    for run, step in [("b", 1), ("a", 20), ("a", 3)]:
        publish(tmp_path, make_record(run=run, step=step))
    (tmp_path / "a" / "notes.txt").write_text("not a record")
    records = read_records(str(tmp_path))
    assert [(record.checkpoint.run, record.checkpoint.step) for record in records] == [("a", 3), ("a", 20), ("b", 1)]


def test_current_records_are_the_newest_and_a_quick_look_does_not_hide_a_full_evaluation() -> None:
    full = make_record(step=5, attempt="full")
    later = full.created + timedelta(hours=1)
    quick = full.model_copy(update={"attempt": "quick", "created": later, "evaluation": {"max_eval_instances": 3}})
    assert [record.attempt for record in current_records([full, quick])] == ["full"]
    assert [record.attempt for record in current_records([quick])] == ["quick"]
    newer, other = full.model_copy(update={"attempt": "newer", "created": later}), make_record(step=6)
    assert [record.attempt for record in current_records([newer, full, other])] == ["newer", other.attempt]


def test_checkpoints_with_the_same_name_in_a_run_get_own_names() -> None:
    reference = make_record(step=5).checkpoint
    twin = reference.model_copy(update={"digest": "0" * 64, "uri": "checkpoints/run-a/hf/checkpoint-5"})
    records = [make_record(step=5), make_record(step=5, checkpoint=twin), make_record(step=6)]
    assert current_records(records) == records
    apart = told_apart([record.checkpoint for record in records])
    names = [apart(record.checkpoint).name for record in records]
    assert names == ["run-a-5 (step-5)", "run-a-5 (checkpoint-5)", "run-a-6"]
    renamed = twin.model_copy(update={"digest": reference.digest})
    later = make_record(step=5, checkpoint=renamed, created=records[0].created + timedelta(hours=1))
    assert current_records([records[0], later]) == [later]


def test_rewritten_and_moved_checkpoints_are_still_the_same(tmp_path: Path) -> None:
    old, copied = make_record(step=5), make_record(step=5, place="/elsewhere")
    rewritten = old.checkpoint.model_copy(update={"digest": "0" * 64, "uri": "checkpoints/run-a/step-5"})
    moved = copied.checkpoint.model_copy(update={"digest": old.checkpoint.digest})
    later = old.created + timedelta(hours=1)
    for checkpoint in (rewritten, moved):
        new = make_record(step=5, created=later, checkpoint=checkpoint)
        assert current_records([old, new]) == [new]
