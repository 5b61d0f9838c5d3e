"""The parts of the benchmark scripts that could cause wrong figures: requests, counts and comparisons."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import math
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
from benchmarks.alarms import KINDS as JITTERS
from benchmarks.alarms import compared_with_neighbours, distance, false_alarms, found_drops
from benchmarks.bodies import KINDS, Kind
from benchmarks.early_simulations import TABLE, Clusters, Outcome, Setting, simulated
from benchmarks.load import Accounts, LoadPlan, Requests, percentile, run_load
from benchmarks.side_by_side import Comparison, Contest, Phases, comparisons, interleaved
from benchmarks.simulations import (
    RELATIVE,
    RelativeBaseline,
    alarms,
    mean_coverage,
    passed_losses,
    power,
    ratio_alarms,
    refused_by_relative,
    refused_runs,
    share_coverage,
)
from benchmarks.stub_engine import CHAT, COMPLETIONS, GENERATE, Connection, Replica, answer_to

from fakes.engine import FakeEngine
from fakes.polling import eventually
from pools.journal.answers import judge
from pools.journal.terms import terms_of, token_terms_of
from resources.settings import process_environment

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def compared(ours: float, theirs: float, better: Literal["less", "more"]) -> Comparison:
    return Comparison("some", "seconds", ours, theirs, better=better)


@pytest.mark.parametrize(
    ("ours", "theirs", "better", "ratio"),
    [
        (2.0, 6.0, "less", 3.0),
        (6.0, 2.0, "more", 3.0),
        (97.0, 100.0, "more", 0.97),
        (0.0, 1.0, "less", None),
        (1.0, -0.1, "less", None),
    ],
)
def test_comparison_of_two_figures_has_a_ratio_above_1_for_ours(
    ours: float, theirs: float, better: Literal["less", "more"], ratio: float | None
):
    assert compared(ours, theirs, better).ratio == (None if ratio is None else pytest.approx(ratio))


def test_comparison_as_json_is_a_line_with_figures_and_machine():
    comparison = Comparison("some", "requests/s", 967.6, 1000.0, better="more", facts={"rounds": 3})
    line = comparison.as_json()
    content = json.loads(line)
    assert "\n" not in line
    assert (content["ratio"], content["ours"], content["theirs"], content["rounds"]) == (0.968, 967.6, 1000.0, 3)
    assert content["environment"]["cores"] >= 1


def test_comparison_as_json_without_a_ratio_is_still_json():
    assert json.loads(compared(-0.01, 1.0, "less").as_json())["ratio"] is None


def test_interleaved_sides_take_turns_at_being_first():
    assert "".join(interleaved("abc", 4)) == "abc" + "bca" + "cab" + "abc"


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [(range(1, 101), 50, 50), (range(1, 101), 99, 99), ([7], 99, 7), ([1, 2], 50, 1), ([1, 2], 51, 2), ([1, 2], 0, 1)],
)
def test_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: range | list[int], percent: float, expected: float
):
    assert percentile(list(values), percent) == expected


def test_accounts_count_answers_that_come_within_the_window():
    accounts = Accounts(begin=10.0, end=12.0)
    for sent, now in ((9.0, 9.9), (9.9, 10.1), (10.0, 10.4), (11.0, 11.9), (11.9, 12.0)):
        accounts.answered(200, sent=sent, now=now)
    result = accounts.result(now=20.0)
    assert (result.requests, result.seconds, result.per_second) == (3, 2.0, 1.5)
    assert result.p50_ms == pytest.approx(400) and result.p99_ms == pytest.approx(900)


def test_accounts_of_errors_keep_them_by_kind_and_out_of_rate_and_latency():
    accounts = Accounts(begin=0.0, end=10.0)
    accounts.answered(200, sent=1.0, now=1.5)
    accounts.answered(503, sent=1.0, now=9.0)
    accounts.answered(503, sent=1.0, now=9.0)
    accounts.failed("connection lost", now=2.0)
    accounts.failed("connection lost", now=11.0)
    result = accounts.result(now=5.0)
    assert result.errors == {"status 503": 2, "connection lost": 1}
    assert (result.requests, result.per_second, result.p99_ms) == (1, 0.2, pytest.approx(500))


def test_accounts_without_an_answer_have_no_latency():
    result = Accounts(begin=0.0, end=1.0).result(now=1.0)
    assert result.requests == 0 and math.isnan(result.p50_ms)


def test_requests_of_a_plan_are_all_different_and_as_long_as_they_say():
    requests = Requests(LoadPlan(port=1, concurrency=1, tag="x", fields={"ignore_eos": True}, key="k"))
    bodies = [requests.body(number) for number in (0, 1, 123_456)]
    assert len(set(bodies)) == 3
    for number, body in zip((0, 1, 123_456), bodies, strict=True):
        head, _, rest = requests.request(number).partition(b"\r\n\r\n")
        assert rest == body and f"Content-Length: {len(body)}".encode() in head.split(b"\r\n")
        fields = json.loads(body)
        assert f"x-{number:010d}:" in fields["prompt"] and fields["ignore_eos"] is True


def test_kinds_of_bodies_are_49_and_each_number_makes_another_body():
    assert len(KINDS) == len({kind.name for kind in KINDS}) == 49
    bodies = [kind.body(number) for kind in KINDS for number in (1, 2)]
    assert len(set(bodies)) == len(bodies)
    assert all(json.loads(body)["model"] == "tiny" for body in bodies)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_stub_answers_each_kind_as_an_engine_would(kind: Kind):
    body = kind.body(1)
    terms = terms_of(json.loads(body), chat=kind.path == CHAT)
    assert judge("application/json", answer_to(kind.path, body), terms=terms) is not None


def test_stub_weighs_labels_and_tokens_as_an_engine_would():
    labels = {"prompt": [[1, 2], [3]], "logprobs": 2, "logprob_token_ids": [7, 8], "return_tokens_as_token_ids": True}
    answer = answer_to(COMPLETIONS, json.dumps({**labels, "max_tokens": 1}).encode())
    assert judge("application/json", answer, terms=terms_of(labels)) is not None
    for sampling in ({"prompt_logprobs": 0, "skip_reading_prefix_cache": False}, {"logprobs": 1}, {}):
        asked = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1, **sampling}}
        answer = answer_to(GENERATE, json.dumps(asked).encode())
        assert judge("application/json", answer, terms=token_terms_of(asked)) is not None


def test_peers_requirements_are_pinned_and_name_no_address():
    lists = sorted((BENCHMARKS / "requirements").glob("*.txt"))
    lines = [line for path in lists for line in path.read_text().splitlines()]
    assert lines and all("==" in line and "://" not in line for line in lines)


class Listener(Connection):
    """A client's connection without the network."""

    def __init__(self, answers: list[bytes], *, gone: bool = False) -> None:
        self._answers = answers
        self._gone = gone

    @property
    def is_gone(self) -> bool:
        return self._gone

    def answer(self, reply: bytes) -> None:
        self._answers.append(reply)


async def test_stub_replica_at_its_capacity_makes_others_wait_their_turn():
    answers: list[bytes] = []
    replica = Replica(delay_seconds=0.001, capacity=2)
    for number, gone in enumerate((False, False, False, True, False)):
        replica.take(Listener(answers, gone=gone), b"%d" % number)
    assert (replica.busy, len(replica.waiting), answers) == (2, 3, [])
    while replica.busy:
        assert replica.busy <= 2
        await asyncio.sleep(0)
    assert answers == [b"0", b"1", b"2", b"4"] and replica.requests == 5


@contextmanager
def running_stub(folder: Path, *arguments: str) -> Iterator[list[int]]:
    address_file = folder / "stub.json"
    command = [sys.executable, BENCHMARKS / "stub_engine.py", "--address-file", address_file, *arguments]
    with subprocess.Popen(command, env=process_environment()) as process:
        try:
            eventually(address_file.exists)
            yield json.loads(address_file.read_text())["ports"]
        finally:
            process.terminate()


def page(port: int, name: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stub/{name}", timeout=10) as reply:
        return json.loads(reply.read())


def test_load_on_a_checking_stub_arrives_whole_and_once(tmp_path: Path):
    with running_stub(tmp_path, "--check", "--replicas", "2", "--delay-ms", "1", "--capacity", "3") as ports:
        plan = LoadPlan(ports[1], concurrency=8, seconds=60, requests=200)
        result = run_load(plan)
        arrived, counts = page(ports[0], "digests"), page(ports[0], "counts")
    assert (result.requests, result.errors, counts) == (200, {}, [0, 200])
    sent = [hashlib.sha256(Requests(plan).body(number)).hexdigest() for number in range(200)]
    assert sorted(arrived) == sorted(sent)


def test_load_on_a_stub_for_a_time_counts_less_than_it_has_sent(tmp_path: Path):
    with running_stub(tmp_path) as ports:
        result = run_load(LoadPlan(ports[0], concurrency=2, seconds=0.2, warm_up_seconds=0.2))
        [count] = page(ports[0], "counts")
    assert 0 < result.requests < count and result.errors == {}


@pytest.mark.parametrize(
    ("fault", "kind"), [({"status": 503, "status_count": 3}, "status 503"), ({"refuse": 3}, "connection lost")]
)
async def test_load_on_a_faulty_engine_names_what_was_not_answered(fault: dict[str, int], kind: str):
    async with FakeEngine() as engine:
        for name, value in fault.items():
            setattr(engine.faults, name, value)
        result = await asyncio.to_thread(run_load, LoadPlan(engine.port, concurrency=2, seconds=60, requests=10))
    assert (result.requests, result.errors) == (7, {kind: 3})


def test_load_without_clients_is_refused():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        result = run_load(LoadPlan(unused.getsockname()[1], concurrency=1, seconds=0.2, requests=1))
    assert result.requests == 0 and set(result.errors) == {"connection refused"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script with its folder on the path, as when it is run."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def record_of(step: int, created: str) -> dict[str, Any]:
    return {"checkpoint": {"step": step}, "created": f"2026-01-01T00:00:{created}+00:00", "served": {"seconds": step}}


def test_series_seconds_are_split_into_what_each_checkpoint_takes_and_the_rest(script: Callable[[str], ModuleType]):
    created = {1: "10", 3: "12", 2: "14"}
    series = script("series").Ours(20.0, {step: record_of(step, at) for step, at in created.items()})
    assert (series.between_records, series.fixed) == (2.0, 14.0)
    assert (series.median("served", "seconds"), series.median("served", "no such phase")) == (2.0, 0.0)


@pytest.mark.parametrize("theirs", [{(1, "b", "acc"): 0.25}, {}, {(1, "b", "acc"): 0.5, (1, "b", "em"): 1.0}])
def test_series_with_other_scores_than_theirs_is_no_result(
    theirs: dict[tuple[int, str, str], float], script: Callable[[str], ModuleType]
):
    ours = {(1, "b", "acc"): 0.5, (2, "b", "acc"): 0.75}
    with pytest.raises(SystemExit, match="disagree"):
        script("series").check_scores(ours, theirs, [1])


def test_series_with_their_scores_says_how_many_were_compared(script: Callable[[str], ModuleType]):
    ours = {(1, "b", "acc"): 0.5, (2, "b", "acc"): 0.75}
    assert script("series").check_scores(ours, {(1, "b", "acc"): 0.5}, [1]) == 1
    with pytest.raises(SystemExit, match="no score"):
        script("series").check_scores(ours, {}, [3])


@pytest.mark.parametrize("theirs", [("Dunmar", 1.0), ("Fairhop", 2.0), None])
def test_evaluators_with_another_output_or_preference_than_theirs_are_no_result(
    theirs: tuple[str, float] | None, script: Callable[[str], ModuleType]
):
    ours = {(1, "Where?"): ("Dunmar", 2.0), (2, "Where?"): ("Holm", 1.0)}
    check = script("evaluators").check_outputs
    assert check(ours, {(1, "Where?"): ("Dunmar", 2.0)}, [1]) == 1
    with pytest.raises(SystemExit, match="disagree"):
        check(ours, {(1, "Where?"): theirs} if theirs else {}, [1])


REFERENCES = {1: ("ab", (-1.0, -2.0)), 2: ("ab", (-1.0, -2.5))}


def checked_swap(module: ModuleType, text: str, logprobs: tuple[float, ...]) -> float:
    """Returns the check's result for an answer that should be the first checkpoint's."""
    references = {step: module.Answer(*answer) for step, answer in REFERENCES.items()}
    load = module.LoadReport(number=1, model="m-1", digest="d", how="reload", seconds=0.1)
    return module.check(references, {"idle": [module.Swap(1, module.Answer(text, logprobs), load)]})


def test_swap_answer_within_the_tolerance_is_right(script: Callable[[str], ModuleType]):
    assert checked_swap(script("swap"), "ab", (-1.0, -2.0005)) == pytest.approx(0.0005)


@pytest.mark.parametrize(
    ("text", "logprobs"), [("ac", (-1.0, -2.0)), ("ab", (-1.0, -2.5)), ("ab", (-1.0,)), ("ab", (-1.0, math.nan))]
)
def test_swap_answer_of_other_weights_is_no_result(
    text: str, logprobs: tuple[float, ...], script: Callable[[str], ModuleType]
):
    with pytest.raises(SystemExit, match="step 1 said"):
        checked_swap(script("swap"), text, logprobs)


def test_swap_between_checkpoints_that_answer_the_same_is_no_result(script: Callable[[str], ModuleType]):
    swap = script("swap")
    with pytest.raises(SystemExit, match="answer the same"):
        swap.check({step: swap.Answer("ab", (-1.0,)) for step in (1, 2)}, {})


def test_choices_are_as_long_as_they_say_and_no_two_seeds_share_a_question(
    script: Callable[[str], ModuleType], tmp_path: Path
):
    choices = script("choices")
    folders = [
        choices.write_benchmarks(tmp_path / f"{seed}", questions={"one_token": 3, "long": 5}, shots=2, seed=seed)
        for seed in (1, 2)
    ]
    for kind, number in (("one_token", 3), ("long", 5)):
        first, second = ([json.loads(line) for line in (f / f"{kind}.test.jsonl").open()] for f in folders)
        assert len(first) == len(second) == number
        assert not {row["question"] for row in first} & {row["question"] for row in second}
        lengths = {len(choice.split()) for row in (*first, *second) for choice in row["choices"]}
        assert lengths == {1} if kind == "one_token" else lengths <= set(range(8, 21)) and len(lengths) > 1
    assert json.loads((folders[0] / "long.yaml").read_text())["num_fewshot"] == 2


def test_loglikelihood_with_another_score_than_theirs_is_no_result(script: Callable[[str], ModuleType]):
    module = script("loglikelihood")
    ours = module.Asking(1.0, 2.0, {0: [-1.0, -2.0]}, {0: (1.0, 1.0)})
    near = module.Asking(1.0, 2.0, {0: [-1.0, -2.25]}, {0: (1.0, 1.0)})
    assert module.largest_difference(ours, near, "theirs") == 0.25
    for scores in ({0: (1.0, 0.0)}, {}):
        with pytest.raises(SystemExit, match="score questions differently"):
            module.largest_difference(ours, module.Asking(1.0, 2.0, ours.answers, scores), "theirs")


def test_resume_job_asks_greedy_requests_once_and_sampled_requests_repeatedly(script: Callable[[str], ModuleType]):
    resume = script("resume")
    asked = [(body["prompt"], body["temperature"]) for body in resume.bodies(64)]
    times = {kind: [asked.count(pair) for pair in dict.fromkeys(asked) if pair[1] == kind] for kind in (0, 1.0)}
    assert times == {0: [1] * 32, 1.0: [resume.SAME_SAMPLES] * (32 // resume.SAME_SAMPLES)}


@pytest.mark.parametrize("change", [{"sampled 0": "another"}, {"greedy 0": None}])
def test_resume_without_an_answer_that_was_given_before_is_no_result(
    change: dict[str, str | None], script: Callable[[str], ModuleType]
):
    resume = script("resume")
    second = [(body["prompt"], f"{number}") for number, body in enumerate(resume.bodies(8))]
    resume.check_answers(second[:4], second, 8, replays=True)
    changed = [(prompt, change.get(prompt, text)) for prompt, text in second]
    kept = [(prompt, text) for prompt, text in changed if text is not None]
    with pytest.raises(SystemExit):
        resume.check_answers(second[:4], kept, 8, replays=True)


def test_resume_may_ask_for_what_was_not_answered_and_what_was_under_way(script: Callable[[str], ModuleType]):
    outcome = script("resume").ResumeOutcome(
        100, got_before=50, asked_before=60, in_flight=10, asked_after=50, replayed=50
    )
    assert outcome.bound == 60


def test_job_that_is_timed_is_gone_at_the_end_and_both_times_are_seen_from_outside(
    script: Callable[[str], ModuleType], tmp_path: Path
):
    jobs, backends = script("jobs"), script("backends")
    slow_to_end = 0.1

    def starts(path: Path) -> Callable[[], object]:
        ends = backends.as_process(jobs.command(path), {})
        return lambda: (time.sleep(slow_to_end), ends())

    phases = jobs.timed(starts, tmp_path / "pid", gone_at_return=True, quiet_seconds=0)
    assert phases["started"] > 0 and phases["ended"] > slow_to_end
    assert jobs.is_gone(int((tmp_path / "pid").read_text()))


def test_job_of_ours_with_a_process_after_its_end_is_refused(script: Callable[[str], ModuleType], tmp_path: Path):
    jobs, backends = script("jobs"), script("backends")
    started: list[Callable[[], object]] = []

    def starts(path: Path) -> Callable[[], object]:
        started.append(backends.as_process(jobs.command(path), {}))
        return lambda: None

    with pytest.raises(SystemExit, match="its process was there"):
        jobs.timed(starts, tmp_path / "pid", gone_at_return=True, quiet_seconds=0)
    started[0]()


def contest(calls: list[str], *seconds: float) -> Contest:
    """Returns sides that take these times in turn, and theirs twice as long."""
    left = {"ours": list(seconds), "theirs": [2 * value for value in seconds]}

    def side(name: str) -> Phases:
        calls.append(name)
        return {"started": (value := left[name].pop(0)), "ended": value / 10}

    return Contest("some", partial(side, "ours"), partial(side, "theirs"), {"ray": "2"})


def test_contest_has_its_sides_take_turns_and_does_not_count_what_warms_up():
    calls: list[str] = []
    measurements = contest(calls, 100.0, 1.0, 9.0).measured(2)
    assert calls == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert [phases["started"] for side in ("ours", "theirs") for phases in measurements[side]] == [1.0, 9.0, 2.0, 18.0]


def test_contest_is_compared_by_the_medians_of_each_side_and_phase():
    run = contest([], 3.0, 1.0, 9.0)
    started, ended = comparisons(run, run.measured(3, warm_up_rounds=0), unit="ms")
    assert (started.name, started.ours, started.theirs, started.ratio) == ("some.started", 3000, 6000, 2.0)
    assert (ended.ours, ended.facts["ours_slowest"], ended.facts["ray"]) == (pytest.approx(300), 900.0, "2")


SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if f"make bench NAME={path.stem}" in path.read_text())


def test_every_script_has_a_small_size_and_a_row_of_the_page(script: Callable[[str], ModuleType]):
    every = script("every")
    assert sorted(every.SMALL) == SCRIPTS
    made = every.PAGE.read_text().partition(every.BEGIN)[2].partition(every.END)[0]
    assert {every.script_of(line) for line in made.splitlines()} - {""} == set(SCRIPTS)


def test_table_of_every_script_has_its_ratios_and_replaces_the_former(script: Callable[[str], ModuleType]):
    every = script("every")
    line = json.loads(Comparison("jobs.local.started", "ms", 40.0, 10.0, better="less").as_json())
    rows = every.rows_of({"jobs": [line], "alarms": [{"rows": []}], "swap": None})
    assert rows == [
        "| `jobs` | jobs.local.started | 40; 10 ms | 0.25 |",
        "| `alarms` | simulations | – | – |",
        "| `swap` | gave up | – | – |",
    ]
    kept = "| `merge` | merge.BF16 | 1; 2 GB/s | 0.5 |"
    former = "| `no_such_script` | a | b | c |\n| `swap` | d | e | f |"
    page = every.written(f"before\n{every.BEGIN}{kept}\n{former}\n{every.END}\nafter\n", rows)
    made = "\n".join([*every.HEAD, rows[1], rows[0], kept, rows[2]])
    assert page == f"before\n{every.BEGIN}{made}\n\n{every.END}\nafter\n"


# Small simulations of statistics.py: bounds hold for so few trials, and seeds make them exact


@pytest.mark.parametrize("kind", ["binary", "normal", "lognormal"])
@pytest.mark.parametrize("size", [1, 10])
def test_alarms_where_nothing_differs_are_about_as_many_as_promised(
    kind: Literal["binary", "normal", "lognormal"], size: int
):
    assert 0.02 <= alarms(kind, 200, size, trials=400, seed=1) <= 0.08


def test_alarms_of_equal_perplexities_and_their_coverage_are_about_what_is_promised():
    alarmed, held = ratio_alarms(62, trials=400, seed=1)
    assert 0.02 <= alarmed <= 0.08 and 0.92 <= held <= 0.98


@pytest.mark.parametrize(("share", "size"), [(0.01, 1), (0.1, 1), (0.1, 10), (0.5, 10)])
def test_intervals_of_shares_hold_them_about_as_often_as_promised(share: float, size: int):
    assert 0.92 <= share_coverage(share, 500, size, trials=400, seed=1) <= 0.99


@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_intervals_of_means_hold_them_about_as_often_as_promised(kind: Literal["normal", "lognormal"]):
    assert 0.92 <= mean_coverage(kind, 100, 1, trials=400, seed=1) <= 0.98


def test_group_tested_stratified_and_paired_finds_what_an_unpaired_test_misses():
    paired, unpaired = power(2_000, points=0.02, alike=0.95, trials=100, seed=1)
    assert paired > 0.5 > 0.3 > unpaired


def test_gate_refuses_hardly_any_run_of_equal_checkpoints_and_passes_hardly_any_loss():
    assert refused_runs(runs=4, seed=1, checkpoints=6) == 0.0
    assert passed_losses(trials=400, seed=1) <= 0.05


@pytest.mark.parametrize("baseline", RELATIVE)
def test_gate_refuses_no_more_than_its_share_of_equal_checkpoints_by_a_relative_baseline(baseline: RelativeBaseline):
    assert refused_by_relative(baseline, trials=300, seed=1, earlier=15, questions=300) <= 0.08


def test_best_would_refuse_many_equal_checkpoints_were_false_alarms_not_shared_among_those_before():
    assert refused_by_relative("best", trials=100, seed=1, earlier=15, questions=300, shared=False) > 0.15


# Small simulations of early.py


@pytest.mark.parametrize("clusters", ["none", "of 5", "unequal"])
@pytest.mark.parametrize("lost", [20, 21], ids=["at the margin", "beyond it"])
def test_whole_contradicts_no_more_early_decisions_than_alpha(clusters: Clusters, lost: int):
    outcome = simulated(Setting(1_000, 0.1, 0.02, lost / 1_000, clusters), decisions=150, seed=1)
    assert outcome.contradicted <= 0.1 * 150  # the highest of 1,000 trials at a rate of 0.05
    assert not outcome.unlikely


def test_unlikely_is_what_a_wrong_decision_would_be():
    setting = Setting(1_000, 0.1, 0.02, 0.02)
    assert Outcome(setting, np.ones(150), 30).unlikely and not Outcome(setting, np.ones(150), 15).unlikely


@pytest.mark.parametrize(("truth", "most"), [("unchanged", 0.2), ("5 points worse", 0.1), ("2 points better", 0.08)])
def test_early_decisions_take_a_small_part_of_so_many_questions(truth: str, most: float):
    outcome = simulated(TABLE[truth], decisions=10, seed=1)
    assert np.median(outcome.shares) < most and outcome.contradicted == 0


def test_script_named_as_a_python_module_does_not_replace_it():
    code = "import statistics; print(statistics.median([1, 2, 9]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_generation_without_an_answer_to_each_prompt_is_no_result(script: Callable[[str], ModuleType], tmp_path: Path):
    generate = script("generate")
    asked = generate.Round.new(tmp_path, requests=3, in_flight=2)
    generate.check_answers("ours", [2, 1], asked.plan)
    with pytest.raises(SystemExit, match="2 answers to 3 prompts"):
        generate.check_answers("ours", [2], asked.plan)


async def test_generation_is_asked_alike_by_both_sides(script: Callable[[str], ModuleType], tmp_path: Path):
    generate = script("generate")
    asked = generate.Round.new(tmp_path, requests=3, in_flight=2)
    async with FakeEngine(models=("tiny",)) as engine:
        for side in (generate.by_client, generate.by_asker):
            assert await side(asked, engine.port) > 0
        bodies = [json.loads(body) for body in engine.bodies]

    def canonical(part: list[dict[str, Any]]) -> list[str]:
        return sorted(json.dumps(body, sort_keys=True) for body in part)

    assert canonical(bodies[:3]) == canonical(bodies[3:])


@pytest.mark.parametrize("kind", JITTERS)
def test_runs_without_a_drop_raise_few_alarms(kind: str):
    unlike = ("heavy", "growing", "correlated", "90 %")  # a rate of 1 in 1,000 checkpoints is not stated for these

    assert false_alarms(kind, runs=4, seed=1).runs <= (0.75 if kind.startswith(unlike) else 0.25)


def test_alarms_of_a_curve_are_as_seldom_as_stated():
    assert compared_with_neighbours(runs=30, seed=1) == 1.0
    assert distance(stated=200, checkpoints=4_000, seed=1) >= 150


def test_drop_of_two_points_is_alarmed_within_two_checkpoints_while_jitter_is_half_a_point():
    assert found_drops(after=30, runs=40, seed=1) >= 0.7
