"""Early decisions: their time, their error, refusals, and the separation of verdicts from scores."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fakes.cli import invoke
from fakes.records import FIRST, make_metric, make_record, make_samples, publish, renamed
from fakes.records import cell_of as folder_of
from resources.errors import BadInput
from tasks.errors import CountsDisagree
from tasks.evaluators.early import Answered, WantedEarly, batches_in, scores_decided
from tasks.policies.early import EarlyDecisions
from tasks.policies.gate import with_early
from tasks.prefect_server.progress import listening
from tasks.records.index import indexed_records
from tasks.records.record import FoundRecord, Metric, Record, find_records, read_records
from tasks.records.verdicts import EarlyVerdict, agreement, find_early, read_early, write_early
from tasks.reports.page import write_report
from tasks.reports.parts import early_parts
from tasks.reports.texts import verdict_markdown
from tasks.running.cells import Cell
from tasks.running.early import decided_early, early_below
from tasks.spec.evaluation import EvaluationConfig
from tasks.verdicts.gate import Gate
from tasks.verdicts.judge import JudgedCheckpoint, judge, judged_checkpoints
from tasks.verdicts.statistics.early import EarlyAsking, EarlyDecision

RULE = {"benchmark": "demo_facts", "metric": "acc", "not_worse_than": "run-a@100", "by_more_than": 0.1}
HASH = "5f0c2a7be1d94c36"
RIGHT = [1.0, 1.0, 0.0, 1.0, 0.0] * 40
PERPLEXITY = make_metric(name="word_perplexity", value=float(np.exp(2.0)), higher_is_better=False)


def decision(
    predictions: Sequence[float], *, margin: float, alpha: float = 0.05, draws: Sequence[int] | None = None
) -> EarlyDecision:
    """Returns a decision on questions of equal weight against the mean of their predictions."""
    number = len(predictions)
    return EarlyDecision(
        draws=range(number) if draws is None else draws,
        shares=[1 / number] * number,
        predictions=predictions,
        threshold=sum(predictions) / number - margin,
        alpha=alpha,
    )


def flipped(number: int, *, loss: float, flips: float = 0.1, seed: int = 0) -> tuple[list[float], list[float]]:
    """Returns answers of a baseline and of a checkpoint that is worse by `loss`, in random order."""
    random = np.random.default_rng(seed)
    before = (random.random(number) < 0.6).astype(float)
    after = before.copy()
    lost = round(number * (flips + loss) / 2)
    after[random.permutation(np.flatnonzero(before == 1))[:lost]] = 0.0
    after[random.permutation(np.flatnonzero(before == 0))[: lost - round(number * loss)]] = 1.0
    return before.tolist(), after.tolist()


# The decision


@pytest.mark.parametrize(
    ("loss", "margin", "word", "most"),
    [(0.0, 0.02, "not worse", 0.4), (0.05, 0.02, "worse", 0.3), (-0.02, 0.02, "not worse", 0.2)],
)
def test_decision_is_that_of_the_whole_after_a_part_of_the_questions(
    loss: float, margin: float, word: str, most: float
):
    before, after = flipped(10_000, loss=loss)
    decided = decision(before, margin=margin)
    decided.add(after)
    assert decided.word == word
    assert decided.asked < most * 10_000


@pytest.mark.parametrize("lost", [20, 21])
def test_decision_at_the_margin_takes_nearly_all_questions_and_is_exact_at_the_last(lost: int):
    before, after = flipped(1_000, loss=lost / 1_000)
    decided = decision(before, margin=0.02, alpha=1e-9)
    decided.add(after)
    assert decided.word == ("not worse" if lost == 20 else "worse")
    assert decided.asked > 900


def test_decision_does_not_depend_on_how_many_questions_are_asked_at_once():
    before, after = flipped(2_000, loss=0.0)
    at_once, in_batches = decision(before, margin=0.05), decision(before, margin=0.05)
    at_once.add(after)
    for start in range(0, 2_000, 7):
        in_batches.add(after[start : start + 7] if in_batches.word is None else [])
    assert (at_once.word, at_once.asked) == (in_batches.word, in_batches.asked)
    assert at_once.estimate() == pytest.approx(in_batches.estimate())


@pytest.mark.parametrize(("loss", "seed"), [(0.0, 1), (0.1, 2), (-0.05, 3), (0.05, 4)])
def test_interval_at_the_verdict_holds_the_whole_and_agrees_with_the_verdict(loss: float, seed: int):
    before, after = flipped(3_000, loss=loss, seed=seed)
    decided = decision(before, margin=0.03)
    decided.add(after)
    value, low, high = decided.estimate()
    threshold = sum(before) / 3_000 - 0.03
    assert low <= value <= high and low <= sum(after) / 3_000 <= high
    assert low >= threshold - 1e-6 if decided.word == "not worse" else high <= threshold + 1e-6


def test_cluster_counts_as_a_single_draw_so_that_its_repeats_prove_nothing():
    before, after = flipped(500, loss=0.0)
    alone = decision(before, margin=0.1)
    alone.add(after)
    clusters = [number // 5 for number in range(2_500)]
    repeated = decision(np.repeat(before, 5).tolist(), margin=0.1, draws=clusters)
    repeated.add(np.repeat(after, 5).tolist())
    assert repeated.asked == 5 * alone.asked


def test_questions_of_a_decided_score_are_not_asked_while_another_is_undecided():
    request = {
        "draws": list(range(400)),
        "scores": [
            {
                "metric": "acc",
                "bound": 1.0,
                "mirrored": False,
                "questions": list(range(start, 400, 2)),
                "shares": [1 / 200] * 200,
                "predictions": [1.0] * 200,
                "threshold": threshold,
                "alpha": 0.05,
            }
            for start, threshold in ((0, 0.5), (1, 0.999))
        ],
    }
    asking = EarlyAsking(request)
    while not asking.decisions[0].word:
        asking.take({place: {"acc": 1.0} for place in asking.next(8)})
    assert not asking.decided
    assert all(place % 2 == 1 for place in asking.next(50)), "all room belongs to the other score"


# Requests of a gate


def early_gate(*rules: dict[str, Any], **fields: Any) -> Gate:
    return Gate.model_validate({"rules": rules or (RULE,), "decide": "early", **fields})


def cell_of(folder: Path, *, step: int = 200, evaluator: str = "lm_evaluation_harness", **fields: Any) -> Cell:
    """Returns an open cell with the benchmarks and the evaluation of `make_record`."""
    benchmarks = fields.pop("benchmarks", ("demo_facts",))
    given = {"model_path": "checkpoints/run-a", "evaluation_path": str(folder), "evaluator": evaluator}
    config = EvaluationConfig.model_validate({**given, "evals": [{"name": name} for name in benchmarks]})
    record = make_record(step=step)
    hash_ = fields.get("hash", HASH)
    named = renamed(record.model_copy(update={"evaluator": evaluator, "evaluation_hash": hash_}))
    uri = folder_of(folder, named)
    return Cell(config, cast(Any, None), cast(Any, None), record.checkpoint, hash_, uri, None)


def baseline(folder: Path, scores: Sequence[float] = RIGHT, *, metric: Metric | None = None, **fields: Any) -> None:
    """Publishes a record of run-a@100 with samples."""
    mean = sum(scores) / len(scores)
    metric = metric or make_metric(value=mean, n=len(scores))
    samples = fields.pop("samples", None) or make_samples(scores, metric=metric.name)
    publish(folder, make_record(metrics=(metric,), **fields), samples)


def wanted_early(folder: Path, gate: Gate | None = None, **fields: Any) -> WantedEarly:
    [cell] = decided_early(gate or early_gate(), [cell_of(folder, **fields)])
    assert cell.early is not None
    return cell.early


def answers(early: WantedEarly, score: float | None = None, *, metric: str = "acc") -> list[Answered]:
    """Returns an answer to each question in request order: as predicted, or all with the same score."""
    [asked] = early.scores
    return [
        Answered(
            benchmark=question.benchmark,
            id=question.id,
            batch=place // 16,
            scores={metric: asked.predictions[place] if score is None else score},
        )
        for place, question in enumerate(early.questions)
    ]


def test_gate_asks_all_questions_in_an_order_that_the_checkpoint_seeds(tmp_path: Path):
    baseline(tmp_path)
    first, again = wanted_early(tmp_path), wanted_early(tmp_path)
    assert first.digest == again.digest
    names = [question.id for question in first.questions]
    assert sorted(names, key=int) == [str(number) for number in range(200)] != names
    [score] = first.scores
    assert [score.predictions[place] for place in range(200)] == [RIGHT[int(name)] for name in names]
    assert sum(score.shares) == pytest.approx(1.0) and score.expected == pytest.approx(0.6)


def test_questions_of_a_cluster_are_adjacent(tmp_path: Path):
    samples = [
        sample.model_copy(update={"cluster": f"passage-{number % 40}"})
        for number, sample in enumerate(make_samples(RIGHT))
    ]
    baseline(tmp_path, samples=samples)
    draws = [question.draw for question in wanted_early(tmp_path).questions]
    assert draws == sorted(draws) and len(set(draws)) == 40


def test_alpha_is_split_among_all_scores_of_a_checkpoint(tmp_path: Path):
    baseline(tmp_path)
    gate = early_gate(RULE, {**RULE, "by_more_than": 0.2}, alpha=0.04)
    assert [score.alpha for score in wanted_early(tmp_path, gate).scores] == [0.02, 0.02]


def test_metric_of_which_less_is_better_is_mirrored_and_per_cent_scaled(tmp_path: Path):
    lower = make_metric(value=60.0, n=200, higher_is_better=False)
    baseline(tmp_path, metric=lower)
    gate = early_gate({**RULE, "by_more_than": 10})
    early = wanted_early(tmp_path, gate)
    [score] = scores_decided(answers(early, 1.0), early)
    assert (score.verdict, score.baseline_value, score.higher_is_better) == ("worse", pytest.approx(60.0), False)
    assert score.low > 70 and score.high == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("metric", "scores", "reason"),
    [
        (PERPLEXITY, [2.0] * 20, "ratio of sums over tokens"),
        (make_metric(value=0.3), RIGHT, "not the mean over single questions"),
        (make_metric(value=0.6, higher_is_better=None), RIGHT, "which direction is better"),
        (make_metric(value=-3.0), [-3.0] * 20, "not from 0 to 1"),
        (make_metric(value=7.5), [5.0, 10.0], "not from 0 to 1"),
    ],
)
def test_score_that_cannot_be_decided_early_is_refused_by_name_with_the_reason(
    tmp_path: Path, metric: Metric, scores: list[float], reason: str
):
    samples = None
    if metric is PERPLEXITY:
        samples = [
            sample.model_copy(update={"scores": {}, "ratios": {metric.name: (-2.0, 1.0)}})
            for sample in make_samples(scores)
        ]
    baseline(tmp_path, scores, metric=metric, samples=samples or make_samples(scores))
    with pytest.raises(BadInput, match=rf"demo_facts · {metric.name} cannot[\s\S]*{reason}"):
        wanted_early(tmp_path, early_gate({**RULE, "metric": metric.name}))


@pytest.mark.parametrize(
    ("evaluator", "reason"),
    [("alpaca_eval", "length-corrected"), ("helm", "all questions at once"), ("levanter_lm_evaluation_harness", "all")],
)
def test_evaluator_that_cannot_decide_early_is_refused_by_name(tmp_path: Path, evaluator: str, reason: str):
    baseline(tmp_path)
    with pytest.raises(BadInput, match=reason):
        wanted_early(tmp_path, evaluator=evaluator)


def test_benchmark_without_a_rule_and_a_baseline_with_other_settings_are_refused(tmp_path: Path):
    baseline(tmp_path)
    with pytest.raises(BadInput, match="demo_facts, demo_backwards"):
        wanted_early(tmp_path, benchmarks=("demo_facts", "demo_backwards"))
    with pytest.raises(BadInput, match="other settings"):
        wanted_early(tmp_path, hash="another")
    assert wanted_early(tmp_path, early_gate({**RULE, "anyway": True}), hash="another").questions[0].prompt is None


def test_baseline_that_has_only_an_early_verdict_is_refused(tmp_path: Path):
    baseline(tmp_path)
    decide(tmp_path, 200)
    with pytest.raises(BadInput, match="run-a@200"):
        wanted_early(tmp_path, early_gate({**RULE, "not_worse_than": "run-a@200"}), step=300)


def test_first_checkpoint_of_a_run_has_nothing_to_be_compared_with_and_is_asked_whole(tmp_path: Path):
    [cell] = decided_early(early_gate({**RULE, "not_worse_than": "previous"}), [cell_of(tmp_path)])
    assert cell.early is None


def test_cell_of_a_policy_that_cannot_be_decided_early_is_asked_whole_and_the_reason_said(tmp_path: Path):
    baseline(tmp_path)
    early, said = EarlyDecisions(early_gate(alpha=0.04)), list[str]()
    cells = [cell_of(tmp_path), cell_of(tmp_path, hash="another")]
    with listening(lambda update: said.append(str(update))):
        fit, unfit = with_early(early, cells, evaluations=4)
    assert fit.early is not None and fit.early.alpha == 0.01, "others of the checkpoint may be decided elsewhere"
    assert unfit.early is None
    assert any("evaluated whole, not decided early" in line and "other settings" in line for line in said)


@pytest.mark.parametrize("rules", [(), ({"benchmark": "demo_facts", "metric": "acc", "at_least": 0.5},)])
def test_gate_that_decides_early_needs_rules_with_baselines(rules: tuple[dict[str, Any], ...]):
    with pytest.raises(ValueError, match="only rules with not_worse_than"):
        Gate.model_validate({"rules": rules, "decide": "early"})


# Answers and their decisions


def test_verdict_is_taken_from_the_answers_once_more(tmp_path: Path):
    baseline(tmp_path)
    early = wanted_early(tmp_path)
    [score] = scores_decided(answers(early)[:120], early)
    assert (score.verdict, score.questions, score.baseline) == ("not worse", 200, "run-a-100") and score.asked < 120
    with pytest.raises(ValueError, match=r"a score of 1\.5"):
        decision([1.0, 0.0], margin=0.1).add([1.5])
    for few in (answers(early)[:5], [*answers(early)[:5], answers(early, metric="other")[5]]):
        with pytest.raises(CountsDisagree):
            scores_decided(few, early)


def test_batches_are_read_as_they_were_asked(tmp_path: Path):
    baseline(tmp_path)
    asked = answers(wanted_early(tmp_path))
    lines = "".join(answer.model_dump_json() + "\n" for answer in asked)
    assert [len(batch) for batch in batches_in(lines)] == [16] * 12 + [8]
    assert batches_in(lines)[1][0] == (asked[16].benchmark, asked[16].id)


# Use of a verdict


def decide(folder: Path, step: int, score: float | None = None) -> EarlyVerdict:
    """Writes the early verdict of a checkpoint with all answers as predicted, or with the same score."""
    [cell] = decided_early(early_gate(), [cell_of(folder, step=step)])
    assert cell.early is not None
    verdict = EarlyVerdict(
        cell=Path(cell.uri).name,
        checkpoint=cell.reference,
        evaluator="lm_evaluation_harness",
        benchmarks=("demo_facts",),
        evaluation_hash=HASH,
        wanted=cell.early.digest,
        gate="gate",
        alpha=0.05,
        scores=scores_decided(answers(cell.early, score), cell.early),
        asked=128,
        questions=200,
        attempt="attempt-1",
        created=FIRST,
    )
    write_early(cell.uri, verdict)
    assert read_early(cell.uri) == verdict
    return verdict


def test_verdict_says_when_it_was_decided_with_what_error_and_what_it_does_not_cover(tmp_path: Path):
    baseline(tmp_path)
    verdict = decide(tmp_path, 200)
    judgement = judge(
        early_gate(), [JudgedCheckpoint("run-a-200", 200, (), early=(verdict,))], evaluation_path=str(tmp_path)
    )
    assert judgement.go
    [reason] = [reason for reason in judgement.reasons if reason.early]
    [score] = verdict.scores
    assert (
        f"decided early at {score.asked} of 200 questions (α = 0.05 per command and baseline): not worse"
        in reason.found
    )
    assert "neither training's jitter nor other questions" in reason.found and "0.600 → 0.600 (" in reason.found
    assert reason.found.replace("|", "\\|") in verdict_markdown(judgement)
    shown = json.loads(json.dumps(judgement.as_dict()))["reasons"][-1]["early"]
    assert (shown["asked"], shown["low"] <= shown["estimate"] <= shown["high"]) == (score.asked, True)


def test_worse_or_another_build_is_no_go(tmp_path: Path):
    baseline(tmp_path)
    verdict = decide(tmp_path, 200, 0.0)
    [score] = verdict.scores
    unlike = score.model_copy(update={"verdict": "not worse", "unlike": ("engine vllm 1 → 2",)})
    for scores in ((score,), (unlike,)):
        early = (verdict.model_copy(update={"scores": scores}),)
        judged = JudgedCheckpoint("run-a-200", 200, (), early=early)
        assert not judge(early_gate(), [judged], evaluation_path=str(tmp_path)).go


@pytest.mark.parametrize(("whole", "word"), [(RIGHT, "agrees with"), ([0.0] * 200, "contradicts")])
def test_whole_says_whether_it_agrees_with_the_early_verdict(tmp_path: Path, whole: list[float], word: str):
    baseline(tmp_path)
    decide(tmp_path, 200)
    metric = make_metric(value=sum(whole) / 200, n=200)
    cell = publish(tmp_path, make_record(step=200, metrics=(metric,)), make_samples(whole))
    [record] = [item.record for item in find_records(str(tmp_path)) if item.record.checkpoint.step == 200]
    judged = JudgedCheckpoint("run-a-200", 200, (FoundRecord(cell, record),))
    gate = early_gate().model_copy(update={"decide": "whole"})
    judgement = judge(gate, [judged], evaluation_path=str(tmp_path))
    assert any(f"{word} the early verdict" in reason.found for reason in judgement.reasons)


def test_verdict_is_no_record_for_readers_of_scores(tmp_path: Path):
    baseline(tmp_path)

    def read_by_everybody() -> list[Any]:
        # The index, and the output of commands about the records of a run.
        rows = indexed_records(str(tmp_path / "run-a"), use_index=False)
        commands = (
            ["records", str(tmp_path), "--json"],
            ["records", str(tmp_path), "--format", "csv"],
            ["records", str(tmp_path), "--verify"],
        )
        done = [invoke(command) for command in commands]
        assert {result.exit_code for result in done} == {0}
        return [rows, find_records(str(tmp_path)), *(result.stdout for result in done)]

    before = read_by_everybody()
    decide(tmp_path, 200)
    assert read_by_everybody() == before
    compared = invoke(["compare", "run-a@100", "run-a@200", "--path", str(tmp_path)])
    assert isinstance(compared.exception, BadInput) and "run-a@200" in compared.exception.found


# The page


def page_of(folder: Path, *, run: str | None = None) -> tuple[str, str]:
    """Returns the written page's section with early verdicts, and the rest."""
    file = folder / "page.html"
    write_report(read_records(str(folder)), str(file), title="t", records_at=str(folder), run=run)
    before, start, rest = file.read_text().partition('<section aria-labelledby="early">')
    section, end, after = rest.partition("</section>\n")
    return start + section + end, before + after


def words_of(section: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", section).split())


def test_page_shows_an_early_verdict_in_a_section_of_its_own_and_nowhere_else(tmp_path: Path):
    baseline(tmp_path)
    without, page = page_of(tmp_path)
    assert (without, page.count("arly")) == ("", 0)
    [score] = decide(tmp_path, 200).scores
    section, rest = page_of(tmp_path)
    assert rest == page, "no curve, no table, no sum has it"
    shown = words_of(section)
    assert f"run-a-200 demo_facts · acc not worse decided early at {score.asked} of 200 questions (α = 0.05" in shown
    assert f"0.600 [{score.low:.3f}, {score.high:.3f}] 0.600 run-a-100 margin 0.100 not asked" in shown
    assert "neither training" in shown and "--finish" in shown and "badge" not in section
    again = decide(tmp_path, 200, 0.0)
    assert 'failed">worse<' in page_of(tmp_path)[0], "a verdict that changed is news to the page"
    assert f"{again.scores[0].asked} of 200" in page_of(tmp_path, run="run-a")[0]
    assert page_of(tmp_path, run="run-b")[0] == "", "the page of a run is about that run"


@pytest.mark.parametrize(
    ("whole", "words"),
    [(RIGHT, "0.600 agrees"), ([0.0] * 200, "0.000 contradicts"), (None, "without this score")],
    ids=["agrees", "contradicts", "without"],
)
def test_page_says_what_the_whole_has_found_of_an_early_verdict_since(
    tmp_path: Path, whole: list[float] | None, words: str
):
    baseline(tmp_path)
    decide(tmp_path, 200)
    page_of(tmp_path)
    metric = make_metric(value=sum(whole) / 200, n=200) if whole else make_metric(name="another")
    record = make_record(step=200, metrics=(metric,))
    publish(tmp_path, record)
    shown = words_of(page_of(tmp_path)[0])
    assert shown.endswith(f"margin 0.100 {words}")
    publish(tmp_path, make_record(step=200, metrics=(make_metric(value=0.2, n=200),), cell="other"))
    assert words_of(page_of(tmp_path)[0]) == shown, "another cell is no whole of it"


def test_whole_of_another_state_of_the_checkpoint_or_changed_by_hand_confirms_nothing(tmp_path: Path):
    baseline(tmp_path)
    decide(tmp_path, 200)
    record = make_record(step=200, metrics=(make_metric(value=0.6, n=200),))
    state = record.checkpoint.model_copy(update={"digest": "f" * 64})
    verdicts = [verdict for _, verdict in find_early(str(tmp_path))]

    def said(of: Record) -> list[tuple[str | None, bool | None]]:
        return [(part.whole, part.agrees) for part in early_parts(verdicts, [of])]

    assert len(list(agreement(verdicts[0], record))) == 1
    assert not list(agreement(verdicts[0], make_record(step=200, metrics=(make_metric(name="another"),))))
    assert said(record) == [("0.600", True)]
    assert said(make_record(step=200, metrics=record.metrics, checkpoint=state)) == [(None, None)]
    assert said(make_record(step=200, status="withheld")) == [(None, None)]
    changed = record.model_copy(update={"metrics": (make_metric(value=0.9, n=200),)})
    assert said(changed) == [("its record was changed since it was written", None)]


def test_page_shows_the_newest_verdicts_first_and_escapes_what_others_named(tmp_path: Path):
    baseline(tmp_path)
    hostile = "<script>alert(1)"
    for step in (200, 300):
        verdict = decide(tmp_path, step)
        named = {"benchmark": hostile, "metric": hostile, "baseline": hostile, "unlike": (hostile,)}
        scores = tuple(score.model_copy(update=named) for score in verdict.scores)
        checkpoint = verdict.checkpoint.model_copy(update={"name": f"{step}{hostile}"})
        update = {"scores": scores, "checkpoint": checkpoint}
        write_early(cell_of(tmp_path, step=step).uri, verdict.model_copy(update=update))
    section, _ = page_of(tmp_path)
    assert "<script" not in section and section.count("&lt;script&gt;") >= 8
    newest, _, earlier = section.partition("<details>")
    assert ("300&lt;" in newest, "200&lt;" in newest) == (True, False)
    assert ("300&lt;" in earlier, "200&lt;" in earlier) == (False, True)
    assert "cannot be compared" in newest


# The command


def test_rule_over_a_score_decided_early_and_one_of_a_whole_record_judges_each(tmp_path: Path):
    baseline(tmp_path)
    other = make_metric("demo_more", value=0.6, n=200)
    more = {"benchmarks": ("demo_more",), "cell": "more"}
    samples = [sample.model_copy(update={"benchmark": "demo_more"}) for sample in make_samples(RIGHT)]
    publish(tmp_path, make_record(metrics=(other,), **more), samples)
    publish(tmp_path, make_record(step=200, metrics=(other,), **more), samples)
    gate = early_gate({**RULE, "benchmark": "demo_*"})
    verdict = decide(tmp_path, 200)
    scores = tuple(score.model_copy(update={"rule": gate.rules[0].words}) for score in verdict.scores)
    records = [item for item in find_records(str(tmp_path)) if item.record.checkpoint.step == 200]
    early = (verdict.model_copy(update={"scores": scores}),)
    judgement = judge(gate, judged_checkpoints(records, early), evaluation_path=str(tmp_path))
    assert judgement.go, judgement.refusals
    assert {"demo_facts", "demo_more"} <= set(re.findall(r"demo_[a-z]+", " ".join(r.found for r in judgement.reasons)))


def test_early_verdict_on_a_checkpoint_that_was_written_again_and_evaluated_whole_says_nothing(tmp_path: Path):
    baseline(tmp_path)
    decide(tmp_path, 200, 0.0)
    later = {"cell": "again", "created": FIRST + timedelta(hours=1), "benchmarks": ("demo_facts",)}
    publish(tmp_path, make_record(step=200, metrics=(make_metric(value=0.6, n=200),), **later), make_samples(RIGHT))
    judged = judged_checkpoints(find_records(str(tmp_path)), early_below(str(tmp_path)))
    assert judge(early_gate(), judged, evaluation_path=str(tmp_path)).go


@pytest.mark.parametrize("score", [None, 0.0], ids=["not worse", "worse"])
def test_gate_judges_by_early_verdicts_only_if_configured(tmp_path: Path, score: float | None):
    baseline(tmp_path)
    decide(tmp_path, 200, score)
    file = tmp_path / "gate.json"
    file.write_text(json.dumps({"rules": [RULE]}))
    arguments = ["gate", str(file), "--records", str(tmp_path), "--json"]
    whole = invoke(arguments)
    assert "early" not in whole.stdout
    early = invoke([*arguments, "--early"])
    verdict = json.loads(early.stdout)
    assert verdict["verdict"] == ("GO" if score is None else "NO-GO")
    assert (early.exit_code == 0) is (score is None)
    assert verdict["reasons"][-1]["checkpoint"] == "run-a-200" and verdict["reasons"][-1]["early"]["questions"] == 200


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--early"], "found=no gate"),
        (["--finish"], "found=no gate"),
        (["--gate", "GATE", "--early", "--finish"], "found=both"),
        (["--gate", "GATE", "--finish"], "early verdicts"),
    ],
)
def test_options_of_early_decisions_that_cannot_be_right_are_refused(tmp_path: Path, options: list[str], problem: str):
    (tmp_path / "GATE").write_text(json.dumps({"rules": [RULE]}))
    given = [str(tmp_path / "GATE") if option == "GATE" else option for option in options]
    done = invoke(["evaluate", "--model", "nowhere", "--eval", "demo_facts", "--output", str(tmp_path), *given])
    assert isinstance(done.exception, BadInput)
    assert problem in f"{done.exception.expected} found={done.exception.found}"
