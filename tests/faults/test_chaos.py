"""Differences that `make chaos` sees, and processes that it tells apart: it must not be blind."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fakes.records import make_metric, make_record
from faults.chaos.evaluation import IN_FLIGHT, SAMPLED
from faults.chaos.outcome import Answered, Outcome, asked_too_often, differences, not_replayed
from faults.chaos.roles import ROLES, Process, Tree
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


def test_processes_are_told_apart_by_what_they_execute_and_whose_children_they_are():
    found = {role: pids for role, find in ROLES.items() if (pids := sorted(find(TREE)))}
    assert found == {
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
