"""Tests that `make chaos` detects differences and identifies processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from fakes.records import make_metric, make_record
from faults.chaos.evaluation import IN_FLIGHT, SAMPLED
from faults.chaos.generation import Job, Kills
from faults.chaos.generation import differences as differences_of
from faults.chaos.outcome import Answered, Outcome, asked_too_often, differences, not_replayed
from faults.chaos.roles import ROLES, Process, Tree
from tasks.generation.output import AnswerFolder, AnswerRow
from tasks.records.samples import Sample

TREE = Tree(
    {
        pid: Process(pid, parent, executes)
        for pid, parent, executes in (
            (10, 1, "python bin/assay evaluate --config e.yaml"),
            (11, 10, "python run_with_parent.py uvicorn --factory prefect.server.api.server:create_app"),
            (20, 10, "python programs/supervise.py jobs/proxy-p"),
            (21, 20, "python -m pools.proxy --host 127.0.0.1"),
            (30, 10, "python programs/supervise.py jobs/replica-0-p"),
            (31, 30, "python programs/run_call.py jobs/replica-0-p/call.pickle"),
            (40, 31, "python programs/supervise.py jobs/warm-serve_vllm-1"),
            (41, 40, "python programs/fork_server.py socket serve_vllm.py"),
            (42, 41, "python programs/fork_server.py socket serve_vllm.py"),
            (43, 42, "python programs/fork_server.py socket serve_vllm.py"),
            (44, 43, "python programs/fork_server.py socket serve_vllm.py"),
            (50, 31, "python programs/supervise.py jobs/engine-1"),
            (51, 50, "python programs/run_forked.py socket serve_vllm.py --port 1"),
            (60, 10, "python programs/supervise.py jobs/lm-eval-1"),
            (61, 60, "python run_lm_eval.py job.json"),
        )
    }
)


def test_processes_are_distinguished_by_program_and_parent():
    by_role = {role: pids for role, find in ROLES.items() if (pids := sorted(find(TREE)))}
    assert by_role == {
        "owner": [10],
        "Prefect's server": [11],
        "proxy": [21],
        "agent": [31],
        "engine's server": [43],
        "engine's core": [44],
        "engine's fork server": [41],
        "harness": [61],
        "supervisor": [20, 30, 40, 50, 60],
        "subreaper": [42],
        "stub": [51],
    }


def outcome(*, output: str = "a", sampled: tuple[str, ...] = ("x", "x", "y"), **fields: Any) -> Outcome:
    samples = [
        Sample(benchmark=name, id="1", prompt="q", output=text, target="a", scores={"acc": 1.0})
        for name, text in (("demo_facts", output), (SAMPLED, sampled[0]))
    ]
    by_question = {(sample.benchmark, sample.id): sample for sample in samples}
    return Outcome(make_record(**fields), by_question, Counter(sampled), prompts=len(samples))


@pytest.mark.parametrize(
    "other",
    [
        outcome(output="b"),
        outcome(sampled=("x", "x")),
        outcome(metrics=(make_metric("demo_facts", 0.75),)),
        outcome(counts={"requested": 3, "answered": 3, "scored": 3}),
    ],
    ids=["sample", "number of samples", "score", "counts"],
)
def test_outcome_with_another_number_or_text_differs(other: Outcome):
    assert differences(other, outcome())


def test_outcome_with_other_sampled_answers_is_the_same():
    assert not differences(outcome(sampled=("u", "v", "w")), outcome())


def test_sampled_answer_that_was_there_at_the_kill_must_be_there_in_the_end_as_often():
    before = Answered(2, Counter({"x": 2}))
    assert not not_replayed(outcome(), before)
    assert not_replayed(outcome(sampled=("x", "y", "z")), before)


def test_engines_may_be_asked_again_for_what_was_in_flight():
    assert not asked_too_often(100 + IN_FLIGHT, 100, starts=1)
    assert asked_too_often(101 + IN_FLIGHT, 100, starts=1)


def written(folder: Path, rows: Iterable[tuple[int, int, str]], *, asked: Iterable[tuple[int, str]]) -> Job:
    """Writes a generation of 2 prompts with 2 samples each, a shard per prompt, with only the answers in `rows`."""
    job = Job(folder, prompts=2, per_shard=1)
    output = AnswerFolder(str(job.output), "parquet")
    for shard in (0, 1):
        answers = [
            AnswerRow(
                **{"prompt_index": index, "prompt_id": str(index), "sample": sample, "prompt": f"prompt {index}"},
                **{"text": text, "tool_calls": None, "finish_reason": "stop", "prompt_tokens": 1},
                **{"completion_tokens": 1, "seed": None, "checkpoint": "run-1", "checkpoint_digest": "d"},
                **{"pool": "p", "parameters": "h", "columns": None, "error": None},
            )
            for index, sample, text in rows
            if index == shard
        ]
        output.write(shard, answers)
    output.conclude({}, shards=2)
    at = time.time_ns()
    lines = (f'{at + late * 10**9} {{"prompt": "{prompt}"}}\n' for late, prompt in asked)
    job.asked_file.write_text("".join(lines))
    return job


WHOLE = [(0, 0, "a"), (0, 1, "b"), (1, 0, "c"), (1, 1, "d")]
BEFORE, AFTER = -60, 60


def found_in(job: Job) -> list[str]:
    kills = Kills()
    kills.look_at(job.parts())
    return differences_of(job, kills)


def test_generation_with_every_sample_once_and_nothing_asked_again_is_right(tmp_path: Path):
    assert found_in(written(tmp_path, WHOLE, asked=[(BEFORE, "prompt 0"), (AFTER, "another")])) == []


@pytest.mark.parametrize(
    ("rows", "asked", "sentence"),
    [
        (WHOLE[:3], [], "1 answers are missing"),
        ([*WHOLE, WHOLE[0]], [], "1 are there too often"),
        ([*WHOLE[:3], (1, 1, "c")], [], "the same sample twice"),
        (WHOLE, [(AFTER, "prompt 1")], "1 requests for part-00001.parquet came after"),
    ],
)
def test_generation_with_a_hole_a_double_or_a_question_asked_again_differs(
    rows: list[tuple[int, int, str]], asked: list[tuple[int, str]], sentence: str, tmp_path: Path
):
    assert any(sentence in problem for problem in found_in(written(tmp_path, rows, asked=asked)))


def test_replaced_file_of_a_generation_is_reported(tmp_path: Path):
    job, kills = written(tmp_path, WHOLE, asked=[]), Kills()
    kills.look_at(job.parts())
    job.parts()[0].write_bytes(b"other")
    kills.look_at(job.parts(), again=True)
    assert kills.wrong == ["part-00000.parquet is another file than when it was first seen"]
