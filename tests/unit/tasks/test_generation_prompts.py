"""Prompts of a generation: their files and rows, cut into shards without reading unneeded parts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fakes.stores import FolderStore, folder_store
from resources.errors import BadInput
from tasks.generation.config import GenerationConfig, PromptsConfig
from tasks.generation.generate import PlannedGeneration, require_same_prompts
from tasks.generation.prompts import PromptPlan, plan_prompts, rows_of

ROWS = [{"prompt": f"Question {number}?", "name": f"q{number}"} for number in range(7)]


def as_lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_lines(folder: Path) -> Path:
    (folder / "prompts.jsonl").write_bytes(as_lines(ROWS[:3]) + b"\n" + as_lines(ROWS[3:]).rstrip(b"\n"))
    return folder / "prompts.jsonl"


def write_packed(folder: Path) -> Path:
    (folder / "prompts.jsonl.gz").write_bytes(gzip.compress(as_lines(ROWS)))
    return folder / "prompts.jsonl.gz"


def write_parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "prompts.parquet", row_group_size=2)
    return folder / "prompts.parquet"


def write_data_set(folder: Path) -> Path:
    """Writes a data set as `datasets.save_to_disk` does."""
    table = pa.Table.from_pylist(ROWS)
    for number, part in enumerate((table.slice(0, 5), table.slice(5))):
        with pa.ipc.new_stream(folder / f"data-{number}.arrow", table.schema) as stream:
            stream.write_table(part, max_chunksize=2)
    files = [{"filename": f"data-{number}.arrow"} for number in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_indices_data_files": None}))
    return folder


def write_single_split_data_set(folder: Path) -> Path:
    (folder / "train").mkdir()
    write_data_set(folder / "train")
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
    return folder


WRITERS: tuple[Callable[[Path], Path], ...] = (
    *(write_lines, write_packed, write_parquet, write_data_set, write_single_split_data_set),
)


def planned(*files: Path | str, shard: int = 2, **fields: Any) -> PromptPlan:
    config = PromptsConfig.model_validate({"files": [str(file) for file in files], **fields})
    return plan_prompts(config, prompts_per_shard=shard)


def read(plan: PromptPlan) -> list[dict[str, Any]]:
    return [dict(row) for shard in plan.shards for row in rows_of(shard)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[type[FolderStore]]:
    with folder_store(tmp_path / "reads.log") as opened:
        yield opened


@pytest.mark.parametrize("write", WRITERS)
def test_prompts_of_every_kind_of_source_are_read_once_each_and_in_order(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    place = write(tmp_path)
    plan = planned(place)
    assert read(plan) == ROWS
    assert [shard.first_prompt for shard in plan.shards] == list(
        dict.fromkeys(sum(shard.prompts for shard in plan.shards[:number]) for number in range(len(plan.shards)))
    )
    assert max(shard.prompts for shard in plan.shards) == 2
    limited = planned(place, limit=5)
    assert read(limited) == ROWS[:5] and limited.digest != plan.digest
    assert planned(place).digest == plan.digest


def test_a_shard_of_lines_reads_its_own_bytes_only(tmp_path: Path, store: type[FolderStore]) -> None:
    place = write_lines(tmp_path)
    [*_, last] = planned(place).shards
    remote = planned(f"{tmp_path}/prompts.jsonl").shards[-1]
    assert last == remote and last.start is not None and last.end == place.stat().st_size
    [source] = {shard.source for shard in planned(place).shards}
    moved = type(last)(**{**vars(last), "source": type(source)(f"store://{place}", "jsonl")})
    assert list(rows_of(moved)) == ROWS[-1:]
    assert store.ranges("prompts.jsonl") == [(last.start, last.end)]


def test_patterns_and_folders_mean_their_files_in_order_of_name(tmp_path: Path) -> None:
    for name, rows in (("b.jsonl", ROWS[2:]), ("a.jsonl", ROWS[:2]), ("c.txt", ROWS)):
        (tmp_path / name).write_bytes(as_lines(rows))
    assert read(planned(tmp_path / "*.jsonl")) == ROWS
    assert read(planned(tmp_path)) == ROWS
    assert read(planned(tmp_path / "b.jsonl", tmp_path / "*.jsonl")) == ROWS[2:] + ROWS[:2]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", as_lines(ROWS[:2]) + b'{"prompt": \n', "a.jsonl(.|\n)*line 3"),
        ("a.jsonl", as_lines(ROWS[:2]) + b"[1]\n", "line 3: list, not an object"),
        ("a.jsonl", b'{"text": "x"}\n', "the first row: expected a column prompt, found text"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz(.|\n)*as a whole"),
        ("a.parquet", b"no parquet", "a.parquet(.|\n)*as a whole"),
        ("a.arrow", b"no arrow", "a.arrow(.|\n)*as a whole"),
        ("a.jsonl", b"\n\n", "Expected: prompts in /"),
        ("a.txt", b"x", "no such file"),
        ("state.json", b'{"_data_files": [], "_indices_data_files": [{"filename": "i"}]}', "flatten_indices"),
        ("dataset_dict.json", b'{"splits": ["train", "test"]}', "name a split: .*/train"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused_with_its_place(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=words):
        planned(tmp_path)


def test_prompts_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing there"):
        planned(tmp_path / "a.jsonl")
    with pytest.raises(BadInput, match="no such file"):
        planned(tmp_path / "*.jsonl")


def test_prompts_that_changed_since_they_were_counted_are_refused(tmp_path: Path) -> None:
    place = write_parquet(tmp_path)
    plan = planned(place)
    pq.write_table(pa.Table.from_pylist(ROWS[:1]), place)
    with pytest.raises(BadInput, match="leave the prompts as they are"):
        read(plan)


def test_prompts_that_were_replaced_by_as_many_others_are_noticed_at_the_end(tmp_path: Path) -> None:
    prompts = PromptsConfig(files=(str(write_lines(tmp_path)),))
    config = GenerationConfig(pool_name="warm", prompts=prompts, output_path=str(tmp_path / "out"))
    planned = PlannedGeneration(config, plan_prompts(prompts, prompts_per_shard=config.prompts_per_shard), ())
    require_same_prompts(planned)
    (tmp_path / "prompts.jsonl").write_bytes(as_lines(list(reversed(ROWS))))
    with pytest.raises(BadInput, match=r"changed after they were counted: .*prompts\.jsonl"):
        require_same_prompts(planned)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"template": "{{ prompt"}, "expected a Jinja template"),
        ({"template": "x", "column": "prompt"}, "expected a column or a template, found both"),
        ({"system": "be kind"}, "system is for conversations"),
        ({"files": []}, "at least 1 item"),
    ],
)
def test_prompts_that_cannot_be_meant_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PromptsConfig.model_validate({"files": ["a.jsonl"], **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"template": "{{ missing }}"}, "missing"),
        ({"template": "{{ prompt.__class__.__mro__ }}"}, "the template cannot be filled"),
        ({"keep": ["answer"]}, "answer"),
        ({"id_column": "id"}, "id"),
    ],
)
def test_columns_that_no_row_has_are_refused_before_anything_is_asked(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=f"the first row: .*{words}"):
        planned(write_lines(tmp_path), **fields)
