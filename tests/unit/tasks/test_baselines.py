"""Relative baselines: earlier checkpoints of a run and other runs as references of a gate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fakes.cli import invoke
from fakes.records import FIRST, make_metric, make_record, make_samples, publish, renamed
from tasks.records.provenance import versions
from tasks.records.record import find_records
from tasks.records.verdicts import Reason, Verdict
from tasks.verdicts.baselines import TRAINER_STATE, Baseline, baseline_of
from tasks.verdicts.comparison import ScoreKey
from tasks.verdicts.gate import BaselineRule, Gate
from tasks.verdicts.judge import judge, judged_checkpoints
from tasks.verdicts.statistics.composition import QuestionScores

FACTS = ScoreKey("lm_evaluation_harness", "demo_facts", "acc")


def rule(baseline: str, **fields: Any) -> BaselineRule:
    content = {"benchmark": "demo_*", "metric": "acc", "not_worse_than": baseline, "by_more_than": 0.1}
    return BaselineRule.model_validate(content | fields)


def scored(folder: Path, step: int, right: Sequence[int] | int, *, questions: int = 400, **fields: Any) -> None:
    """Publishes a record with samples; `right`: the correct questions, or the number of correct first questions."""
    chosen = set(range(right)) if isinstance(right, int) else set(right)
    scores = [float(number in chosen) for number in range(questions)]
    metric = make_metric(value=sum(scores) / questions, n=questions)
    publish(folder, make_record(step=step, metrics=(metric,), **fields), make_samples(scores))


def judged_at(folder: Path, step: int, *rules: BaselineRule, **fields: Any) -> Verdict:
    records = find_records(str(folder / "run-a"))
    mine = [item for item in records if item.record.checkpoint.step == step]
    return judge(Gate(rules=rules, **fields), judged_checkpoints(mine), evaluation_path=str(folder))


def resolved(folder: Path, step: int, baseline_rule: BaselineRule) -> Baseline:
    baseline = baseline_of(
        baseline_rule, make_record(step=step).checkpoint, evaluation_path=str(folder), hashes={"5f0c2a7be1d94c36"}
    )
    assert isinstance(baseline, Baseline), baseline
    return baseline


def steps_of(baseline: Baseline, key: ScoreKey = FACTS) -> list[int]:
    return [item.record.checkpoint.step for item in baseline.scores[key].records]


def said(verdict: Verdict, of: BaselineRule) -> list[Reason]:
    return [reason for reason in verdict.reasons if reason.rule == of.words]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints of run-a: the best at step 200, an equal score at 300, 500 and 600, and the worst at 700."""
    for step, right in ((100, 240), (200, 280), (300, 260), (400, 250), (500, 260), (600, 260), (700, 150)):
        scored(tmp_path, step, right)
    return tmp_path


def test_previous_is_the_recorded_checkpoint_with_the_next_lower_step(run: Path):
    assert steps_of(resolved(run, 600, rule("previous"))) == [500]
    assert steps_of(resolved(run, 650, rule("previous"))) == [600], "the judged checkpoint needs no record yet"
    go, no_go = (judged_at(run, step, rule("previous")) for step in (600, 700))
    assert go.go and not no_go.go
    [reason] = said(no_go, rule("previous"))
    assert (
        "demo_facts · acc: against run-a-600 (step 600): 0.650 ± 0.040 (standard error): 0.650 → 0.375" in reason.found
    )


def test_best_is_by_the_score_in_its_direction_and_its_luck_is_paid_for(run: Path):
    assert steps_of(resolved(run, 600, rule("best"))) == [200]
    [best] = said(judged_at(run, 600, rule("best")), rule("best"))
    [named] = said(judged_at(run, 600, rule("run-a@200")), rule("run-a@200"))
    assert "the best of 5 by these questions, so too high by chance" in best.found
    assert smallest_loss(best) > smallest_loss(named)
    metric = make_metric("demo_texts", 9.0, name="acc", higher_is_better=False)
    for step, value in ((100, 8.0), (200, 7.0), (300, 12.0)):
        publish(run, make_record(step=step, metrics=(metric.model_copy(update={"value": value}),), cell="texts"))
    assert steps_of(resolved(run, 400, rule("best")), ScoreKey(FACTS.evaluator, "demo_texts", "acc")) == [200]


def smallest_loss(reason: Reason) -> float:
    return float(reason.found.partition("pass margins from ")[2].split()[0])


def test_mean_of_last_is_per_question_over_questions_that_all_have(tmp_path: Path):
    scored(tmp_path, 100, [0, 1, 2], questions=4)
    scored(tmp_path, 200, [0, 2], questions=6)
    scored(tmp_path, 300, [0], questions=6)
    mean = resolved(tmp_path, 400, rule("mean of last 3"))
    assert steps_of(mean) == [300, 200, 100]
    questions = mean.scores[FACTS].questions(QuestionScores())
    assert not isinstance(questions, str)
    asked = questions.asked["demo_facts"]
    assert {name: asked[name].sum for name in asked} == pytest.approx({"0": 1.0, "1": 1 / 3, "2": 2 / 3, "3": 0.0})
    value, error = mean.scores[FACTS].value(QuestionScores())
    assert value == pytest.approx(0.5) and error is not None and error > 0
    assert steps_of(resolved(tmp_path, 400, rule("mean of last 2"))) == [300, 200]


def test_mean_of_last_is_tested_by_fractions_and_says_when_there_are_fewer(run: Path):
    asked = rule("mean of last 9")
    go, no_go = (judged_at(run, step, asked) for step in (600, 700))
    assert go.go and not no_go.go
    [reason] = said(go, asked)
    assert "against the mean of 5, run-a-100 (step 100) to run-a-500 (step 500): 0.645 ±" in reason.found
    assert "; 9 were asked for, more there are not: 0.645 → 0.650 (400 questions of both)" in reason.found


def test_question_that_one_of_the_mean_was_asked_in_other_words_is_not_compared(tmp_path: Path):
    for step in (100, 200, 300):
        scored(tmp_path, step, 300)
    scores = [1.0] * 300 + [0.0] * 100
    others = [sample.model_copy(update={"prompt": f"Now: {sample.prompt}"}) for sample in make_samples(scores)]
    publish(tmp_path, make_record(step=150, metrics=(make_metric(value=0.75, n=400),)), others)
    [reason] = judged_at(tmp_path, 300, rule("mean of last 3")).refusals
    assert "cannot be compared" in reason.found and "400 of 400 questions were put in other words" in reason.found
    assert judged_at(tmp_path, 300, rule("previous")).go


def test_mean_without_samples_is_compared_by_its_standard_error(tmp_path: Path):
    for step, value in ((100, 0.5), (200, 0.6), (300, 0.57)):
        publish(tmp_path, make_record(step=step, metrics=(make_metric(value=value, stderr=0.01),)))
    baseline_rule = rule("mean of last 2", by_more_than=0.5)
    [reason] = said(judged_at(tmp_path, 300, baseline_rule), baseline_rule)
    assert reason.go and "0.550 ± 0.010 (standard error): 0.550 → 0.570 (no samples were kept)" in reason.found


@pytest.mark.parametrize("baseline", ["previous", "best", "mean of last 5"])
def test_first_checkpoint_of_a_run_passes_by_name_and_a_failure_before_it_does_not(tmp_path: Path, baseline: str):
    scored(tmp_path, 200, 200)
    first = judged_at(tmp_path, 200, rule(baseline))
    assert first.go
    assert [reason.found for reason in said(first, rule(baseline))] == ["first checkpoint, nothing before it"]
    publish(tmp_path, make_record(step=100, status="failed"))
    [reason] = judged_at(tmp_path, 200, rule(baseline)).refusals
    assert "recorded for earlier checkpoints, none of which has this score" in reason.found


def test_score_of_a_benchmark_that_was_never_asked_before_passes_and_says_so(tmp_path: Path):
    publish(tmp_path, make_record(step=100, metrics=(make_metric("demo_facts"),)))
    publish(tmp_path, make_record(step=200, metrics=(make_metric("demo_facts"), make_metric("demo_new"))))
    reasons = said(
        judged_at(tmp_path, 200, rule("previous", by_more_than=0.9, anyway=True)), rule("previous", by_more_than=0.9)
    )
    assert [reason.go for reason in reasons] == [True, True]
    assert "demo_new · acc: no earlier checkpoint was asked this" in reasons[0].found


def test_score_that_earlier_checkpoints_have_by_the_same_evaluation_must_be_there(tmp_path: Path):
    both = (make_metric("demo_facts"), make_metric("demo_more"))
    publish(tmp_path, make_record(step=100, metrics=both, benchmarks=("demo_facts", "demo_more")))
    publish(tmp_path, make_record(step=200, metrics=both[:1], benchmarks=("demo_facts", "demo_more")))
    [reason] = judged_at(tmp_path, 200, rule("previous", by_more_than=0.9)).refusals
    assert "demo_more · acc: only the baseline has this score" in reason.found


@pytest.mark.parametrize("baseline", ["previous", "best", "mean of last 2", "run-b@same step"])
@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"evaluation_hash": "another", "evaluation": {"max_eval_instances": 7}}, "differences"),
        ({"versions": {**versions(), "lm_eval": "0.0.1"}}, "lm_eval"),
    ],
)
def test_baseline_measured_with_other_settings_or_builds_is_refused(
    tmp_path: Path, baseline: str, other: dict[str, Any], expected: str
):
    for step, run in ((100, "run-a"), (200, "run-b")):
        scored(tmp_path, step, 300, run=run, **other)
    scored(tmp_path, 200, 300)
    [reason] = judged_at(tmp_path, 200, rule(baseline)).refusals
    assert "cannot be compared" in reason.found and expected in reason.found


def test_best_passes_over_other_settings_and_says_how_many(run: Path):
    scored(run, 250, 400, evaluation_hash="another")
    [reason] = said(judged_at(run, 600, rule("best")), rule("best"))
    assert "against run-a-200 (step 200)" in reason.found
    assert "(1 checkpoint with other settings not looked at)" in reason.found


def test_earlier_checkpoint_of_another_run_with_the_name_does_not_count(tmp_path: Path):
    for step in (100, 200):
        scored(tmp_path, step, 300)
        scored(tmp_path, step, 100, place="/elsewhere", cell="twin", created=FIRST + timedelta(days=1))
    assert steps_of(resolved(tmp_path, 200, rule("previous"))) == [100]
    [item] = resolved(tmp_path, 200, rule("previous")).scores[FACTS].records
    assert item.record.checkpoint.uri.startswith("checkpoints/")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [((100, 200, 300), 200), ((190, 400), 190), ((196, 204), 204), ((100, 300), "at step 300, this checkpoint at 200")],
)
def test_other_run_at_the_same_step_is_its_nearest_checkpoint_within_a_bound(
    tmp_path: Path, steps: tuple[int, ...], expected: int | str
):
    for step in steps:
        scored(tmp_path, step, 300, run="run-b")
    scored(tmp_path, 200, 300)
    baseline_rule = rule("run-b@same step")
    if isinstance(expected, int):
        assert steps_of(resolved(tmp_path, 200, baseline_rule)) == [expected]
        [reason] = said(judged_at(tmp_path, 200, baseline_rule), baseline_rule)
        assert reason.go and f"against run-b-{expected} (step {expected})" in reason.found
        assert (f"; at step {expected}, this checkpoint at 200" in reason.found) == (expected != 200)
    else:
        [reason] = judged_at(tmp_path, 200, baseline_rule).refusals
        assert expected in reason.found and "further than nearest_within, 5.0%" in reason.found


def test_other_run_below_another_folder_is_found_by_its_path(tmp_path: Path):
    scored(tmp_path / "old", 200, 300, run="run-b")
    scored(tmp_path / "new", 200, 300)
    assert steps_of(resolved(tmp_path / "new", 200, rule(f"{tmp_path}/old:run-b@same step"))) == [200]
    [reason] = judged_at(tmp_path / "new", 200, rule("run-b@same step")).refusals
    assert "no succeeded record of run-b" in reason.found


def test_other_run_at_the_same_tokens_is_found_by_what_the_rule_or_the_checkpoints_say(tmp_path: Path):
    for step in (100, 200, 400):
        scored(tmp_path / "out", step, 300, run="run-b", place=str(tmp_path))
    scored(tmp_path / "out", 200, 300, place=str(tmp_path))
    [reason] = judged_at(tmp_path / "out", 200, rule("run-b@same tokens")).refusals
    assert "nothing says how many tokens run-b had read" in reason.found

    mapped = rule("run-b@same tokens", tokens_per_step={"run-a": 2e6, "run-b": 1e6})
    [reason] = said(judged_at(tmp_path / "out", 200, mapped), mapped)
    assert reason.go and "against run-b-400 (step 400)" in reason.found

    def counted(run: str, step: int, tokens: int) -> None:
        file = tmp_path / run / "hf" / f"step-{step}" / TRAINER_STATE
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"global_step": step, "num_input_tokens_seen": tokens}))

    counted("run-b", 100, 50_000)
    counted("run-b", 200, 101_000)
    counted("run-a", 200, 0)  # a trainer without a token count
    [reason] = judged_at(tmp_path / "out", 200, rule("run-b@same tokens")).refusals
    assert "nothing says how many tokens run-a had read" in reason.found
    counted("run-a", 200, 100_000)
    [reason] = said(judged_at(tmp_path / "out", 200, rule("run-b@same tokens")), rule("run-b@same tokens"))
    assert reason.go and "against run-b-200 (step 200)" in reason.found
    assert "; at tokens 101,000, this checkpoint at 100,000" in reason.found


@pytest.mark.parametrize("named", ["acme/series@stage1-step50-tokens4B", "hf://acme/series@stage1-step50-tokens4B"])
def test_revision_on_the_hub_is_a_baseline_and_a_side_of_a_comparison(named: str, tmp_path: Path):
    record = make_record(step=50, run="series-stage1", metrics=(make_metric(value=0.9, n=400),))
    uri = "hf://acme/series@stage1-step50-tokens4B"
    record = renamed(record.model_copy(update={"checkpoint": record.checkpoint.model_copy(update={"uri": uri})}))
    publish(tmp_path, record, make_samples([1.0] * 360 + [0.0] * 40))
    scored(tmp_path, 100, 300)
    verdict = judged_at(tmp_path, 100, rule(named))
    assert not verdict.go and said(verdict, rule(named))
    done = invoke(["compare", "--path", str(tmp_path), named, "run-a-100", "--json"], catch_exceptions=False)
    [metric] = json.loads(done.stdout)["metrics"]
    assert (metric["first"], metric["second"], metric["pairs"], metric["verdict"]) == (0.9, 0.75, 400, "worse")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"not_worse_than": "mean of last 0"}, "mean of last 5"),
        ({"not_worse_than": "mean of five"}, "mean of last 5"),
        ({"not_worse_than": "run-b@same epoch"}, "RUN@same tokens"),
        ({"not_worse_than": "previous", "tokens_per_step": {"run-a": 1}}, "for `not_worse_than: RUN@same tokens` only"),
        ({"not_worse_than": "run-b@same tokens", "tokens_per_step": {"run-a": 0}}, "above 0"),
    ],
)
def test_baseline_that_is_nearly_relative_is_refused(fields: dict[str, Any], expected: str):
    with pytest.raises(ValidationError, match=expected):
        BaselineRule.model_validate({"benchmark": "*", "metric": "acc", "by_more_than": 0.1} | fields)
