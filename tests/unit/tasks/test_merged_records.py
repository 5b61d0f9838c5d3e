"""Records of merged checkpoints next to those of training: their separation and their display."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from fakes.alerts import DROP, STEADY, run_of
from fakes.records import FIRST, make_metric, make_record, make_samples, merged_record, publish, renamed
from resources.errors import BadInput
from tasks.records.current import how_merged, merged_by
from tasks.records.record import Record, find_records
from tasks.records.search import records_of_checkpoints
from tasks.reports.charts import chart_of, last_means, wavering
from tasks.reports.page import curves_svg, render_report, results_rows
from tasks.reports.table import Results
from tasks.sinks.announcement import Announcement
from tasks.sinks.hugging_face import with_results
from tasks.verdicts.alert_events import find_news
from tasks.verdicts.alerts import alerts_in
from tasks.verdicts.baselines import Baseline, baseline_of
from tasks.verdicts.gate import BaselineRule, Gate
from tasks.verdicts.judge import judge, judged_checkpoints
from tasks.verdicts.statistics.training_noise import training_noise

MERGED = "run-a (merged: mean of 3)"


def means_of(values: Sequence[float], *, apart: int = 3, count: int = 3, run: str = "run-a") -> list[Record]:
    """Returns a record of a mean of `count` checkpoints for each value; their last steps are `apart` hundred apart."""
    ends = [100 * (count + apart * number) for number in range(len(values))]
    return [
        merged_record(range(end - 100 * (count - 1), end + 1, 100), run=run, metrics=(make_metric(value=value),))
        for end, value in zip(ends, values, strict=True)
    ]


def noisy(values: int, *, by: float) -> list[float]:
    return [0.5 + by * (1 if number % 2 else -1) for number in range(values)]


def test_merged_checkpoints_are_a_curve_of_their_own_in_the_colour_of_their_run():
    results = Results([*run_of(noisy(6, by=0.1)), *run_of(noisy(6, by=0.1), run="run-b"), *means_of([0.7, 0.8])])
    [chart] = [chart_of(results, column) for column in results.columns]

    raw, merged, other = chart.curves
    assert (raw.run, merged.run, other.run) == ("run-a", MERGED, "run-b")
    assert (raw.series, merged.series, other.series) == (0, 0, 1)
    assert (raw.merged, merged.merged, other.merged) == (0, 1, 0)
    assert [point.step for point in merged.points] == [300, 600]
    assert all(point.interval is not None for point in merged.points)
    assert [point.value for point in raw.points] == noisy(6, by=0.1), "a merged one of its step is no point of it"
    assert f">{MERGED}</text>" in curves_svg(results.records)


def test_noise_of_training_is_per_curve_and_shared_inputs_count_once():
    raw, merged = run_of(noisy(18, by=0.1)), means_of(noisy(6, by=0.02))
    [column] = (results := Results([*raw, *merged])).columns
    by_run = wavering(results, column)
    assert by_run["run-a"].noise == training_noise([list(enumerate(noisy(18, by=0.1)))])
    assert by_run[MERGED].noise == training_noise([list(enumerate(noisy(6, by=0.02)))]) and not by_run[MERGED].siblings

    overlapping = means_of(noisy(16, by=0.02), apart=1)
    [column] = (results := Results([*raw, *overlapping])).columns
    assert wavering(results, column)[MERGED].noise == training_noise([list(enumerate(noisy(16, by=0.02)[::3]))])
    few = Results([*raw, *means_of([0.5, 0.6])])
    assert MERGED not in wavering(few, few.columns[0]), "not that of the checkpoints that were written"
    sibling = Results([*few.records, *means_of(noisy(6, by=0.02), run="run-b")])
    assert wavering(sibling, sibling.columns[0])[MERGED].siblings


def test_mean_of_the_last_checkpoints_is_over_written_checkpoints_alone():
    raw, merged = run_of([0.5] * 6), means_of([0.9] * 6)
    [column] = (results := Results([*raw, *merged])).columns
    noises = wavering(results, column)
    assert {mean.mean for mean in last_means(results, column, "run-a", noises).values()} == {0.5}
    assert last_means(results, column, MERGED, noises) == {}


def test_alert_stays_on_its_own_curve_despite_merged_scores(tmp_path: Path):
    high = means_of([0.9] * 7)
    assert alerts_in([*run_of(STEADY), *high]) == []
    [alert] = alerts_in([*run_of([*STEADY, DROP]), *high])
    assert (alert.run, alert.merged_by) == ("run-a", "")

    fallen = means_of([*STEADY, DROP])
    [alert] = alerts_in([*run_of(STEADY), *fallen])
    assert (alert.run, alert.checkpoint) == (MERGED, fallen[-1].checkpoint.name)
    assert alerts_in(means_of([*STEADY, DROP], apart=1)) == [], "seven that share no input are too few"

    each = means_of([value for falling in (*STEADY, DROP) for value in (0.6, falling)] + [0.6], apart=2)
    asked = [record.model_copy(update={"evaluation_hash": "0" * 64}) for record in each[::2]]
    assert len(alerts_in([*asked, *each[1::2]])) == 1, "checkpoints of another suite take none of these away"

    for record in [*run_of([*STEADY, *[0.6] * 43]), *fallen]:
        publish(tmp_path, record)
    [news] = find_news(str(tmp_path / "run-a"), since=FIRST - timedelta(days=1))
    assert news.record.checkpoint.name == alert.checkpoint, "not the written one of its step"
    to_merged, to_written = (
        Announcement.of(record, "/e/run-a/step-1/e/x").of_alerts([news.known])
        for record in (fallen[-1], run_of([1])[0])
    )
    assert (len(to_merged.alerts), len(to_written.alerts)) == (1, 0)


def test_page_counts_merged_checkpoints_apart_and_says_what_each_was_made_of():
    page = render_report([*run_of([0.5, 0.6, 0.7]), *means_of([0.8])], title="t")
    lead = re.sub(r"\s+", " ", re.sub("<[^>]+>", "", page[page.index('class="lead"') : page.index("</header>")]))
    assert "Run run-a · 3 checkpoints and 1 merged, steps 100 to 300" in lead
    assert "Open markers are merged checkpoints" in page
    assert "mean of 3: run-a 100..300 by 100" in page[page.index('id="provenance"') :]
    assert "merged" not in render_report(run_of([0.5, 0.6]), title="t")


def test_rows_say_how_a_merged_checkpoint_was_made():
    rows = results_rows([*run_of([0.5, 0.6, 0.7]), *means_of([0.8])])
    assert [(row["run"], row["step"], row["merge"]) for row in rows] == [
        *(("run-a", step, None) for step in (100, 200, 300)),
        (MERGED, 300, "mean of 3: run-a 100..300 by 100"),
    ]


@pytest.mark.parametrize(
    ("kind", "parameter", "words"),
    [
        ("mean", "", " (merged: mean of 3)"),
        ("mean", "1+2+1", " (merged: mean of 3 1+2+1)"),
        ("ema", "0.9", " (merged: ema 0.9)"),
        ("wsm", "cosine", " (merged: wsm of 3 cosine)"),
    ],
)
def test_kind_of_merge_names_a_curve(kind: str, parameter: str, words: str):
    checkpoint = merged_record((100, 200, 300)).checkpoint
    assert checkpoint.merge is not None
    merge = checkpoint.merge.model_copy(update={"kind": kind, "parameter": parameter})
    assert merged_by(checkpoint.model_copy(update={"merge": merge})) == words


def test_how_a_checkpoint_was_merged_says_weights_that_differ():
    checkpoint = merged_record((100, 200)).checkpoint
    assert checkpoint.merge is not None and "weights" not in (how_merged(checkpoint) or "")
    first, second = checkpoint.merge.inputs
    inputs = first.model_copy(update={"weight": 0.25}), second.model_copy(update={"weight": 0.75})
    merge = checkpoint.merge.model_copy(update={"inputs": inputs})
    assert (how_merged(checkpoint.model_copy(update={"merge": merge})) or "").endswith("weights 0.25, 0.75")


# Names


@pytest.fixture
def evaluations(tmp_path: Path) -> Path:
    """Records of three checkpoints and of their mean, each with ten questions."""
    for record in [*run_of([0.5, 0.6, 0.7]), *means_of([0.8])]:
        right = round(record.metrics[0].value * 10)
        publish(tmp_path, record, make_samples([1.0] * right + [0.0] * (10 - right)))
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "run-a-100-to-300-mean3",
        "mean(run-a@last:3)",
        "mean(run-a@100..300)",
        "mean(/somewhere/run-a@100+200+300)",
        "mean(run-a/hf/step-100, run-a/hf/step-200, run-a/hf/step-300)",
    ],
)
def test_merged_checkpoint_is_found_by_the_name_in_records_and_by_what_it_is_made_of(evaluations: Path, name: str):
    for text in (name, f"{evaluations}:{name}"):
        [records] = records_of_checkpoints([text], evaluation_path=str(evaluations))
        assert [each.record.checkpoint.name for each in records] == ["run-a-100-to-300-mean3"]


def test_single_steps_mean_the_merged_checkpoint_of_that_order(tmp_path: Path):
    for kind, parameter, steps in (
        ("interpolate", "0.3", (100, 200)),
        ("interpolate", "0.3", (200, 100)),
        ("mean", "1+3", (200, 100)),
        ("ema", "0.9", (100, 200)),
    ):
        publish(tmp_path, of_kind(merged_record(steps), kind, parameter))
    for text, name in (
        ("interpolate(run-a@100+200, 0.3)", "run-a-100-to-200-interpolate-0.3"),
        ("interpolate(run-a@200+100, 0.30)", "run-a-200-to-100-interpolate-0.3"),
        ("mean(run-a@200+100, 1+3)", "run-a-200-to-100-mean-1+3"),
        ("ema(run-a@last:2, 0.90)", "run-a-100-to-200-ema-0.9"),
    ):
        [records] = records_of_checkpoints([text], evaluation_path=str(tmp_path))
        assert [each.record.checkpoint.name for each in records] == [name], text
    with pytest.raises(BadInput):
        records_of_checkpoints(["mean(run-a@100+200, 1+3)"], evaluation_path=str(tmp_path))


def of_kind(record: Record, kind: str, parameter: str) -> Record:
    """Returns a copy of a merged record with another kind of merge."""
    original = record.checkpoint
    assert original.merge is not None
    steps = f"{original.merge.inputs[0].step}-to-{original.step}"
    changes = {
        "name": f"{original.run}-{steps}-{kind}-{parameter}",
        "digest": sha256(f"{original.digest} {kind} {parameter}".encode()).hexdigest(),
        "merge": original.merge.model_copy(update={"kind": kind, "parameter": parameter}),
    }
    checkpoint = original.model_copy(update=changes)
    return renamed(record.model_copy(update={"checkpoint": checkpoint}))


def test_step_of_a_run_means_the_written_checkpoint_and_an_unknown_merge_is_refused(evaluations: Path):
    [records] = records_of_checkpoints(["run-a@300"], evaluation_path=str(evaluations))
    assert [each.record.checkpoint.name for each in records] == ["run-a-300"]
    for name in ("mean(run-a@last:2)", "ema(run-a@last:3, 0.9)", "mean(run-b@last:3)"):
        with pytest.raises(BadInput, match="run-a-100-to-300-mean3"):
            records_of_checkpoints([name], evaluation_path=str(evaluations))


# Gates


def rule(baseline: str) -> BaselineRule:
    content = {"benchmark": "demo_facts", "metric": "acc", "not_worse_than": baseline, "by_more_than": 0.5}
    return BaselineRule.model_validate(content)


@pytest.mark.parametrize(("baseline", "merged"), [("previous", 600), ("best", 300), ("mean of last 2", 600)])
def test_earlier_checkpoints_are_merged_or_written_like_the_judged(tmp_path: Path, baseline: str, merged: int):
    records = [*run_of([0.5] * 9), *means_of([0.8, 0.7, 0.6])]
    for record in records:
        publish(tmp_path, record)

    def of(record: Record) -> list[str]:
        hashes = {record.evaluation_hash}
        resolved = baseline_of(rule(baseline), record.checkpoint, evaluation_path=str(tmp_path), hashes=hashes)
        assert isinstance(resolved, Baseline)
        [score] = resolved.scores.values()
        return [each.record.checkpoint.name for each in score.records]

    assert of(records[-1])[0] == f"run-a-{merged - 200}-to-{merged}-mean3"
    assert all(name.endswith("mean3") for name in of(records[-1]))
    assert not any(name.endswith("mean3") for name in of(records[8]))


def test_other_run_at_the_same_step_is_merged_as_the_judged(tmp_path: Path):
    mine = means_of([0.8])[0]
    for record in [*run_of([0.5] * 3, run="run-b"), *means_of([0.7], run="run-b"), mine, *run_of([0.5] * 3)]:
        publish(tmp_path, record)
    for record, name in ((mine, "run-b-100-to-300-mean3"), (run_of([0.5] * 3)[2], "run-b-300")):
        resolved = baseline_of(rule("run-b@same step"), record.checkpoint, evaluation_path=str(tmp_path))
        assert isinstance(resolved, Baseline)
        assert [each.records[0].record.checkpoint.name for each in resolved.scores.values()] == [name]


def test_gate_judges_both_checkpoints_of_the_highest_step(evaluations: Path):
    judged = judged_checkpoints(find_records(str(evaluations)))
    assert {reason.checkpoint for reason in judge(Gate(), judged, evaluation_path=str(evaluations)).reasons} == {
        "run-a-300",
        "run-a-100-to-300-mean3",
    }
    [written] = [each for each in judged if each.name == "run-a-300"]
    against = rule("mean(run-a@last:3)")
    verdict = judge(Gate(rules=(against,)), [written], evaluation_path=str(evaluations))
    [reason] = [reason for reason in verdict.reasons if reason.rule == against.words]
    assert "0.800" in reason.found and "→ 0.700" in reason.found


# Trackers and cards


def test_series_of_a_tracker_is_of_merged_or_of_written_checkpoints():
    written, merged = (
        Announcement.of(record, "/e/run-a/step-300/lm_evaluation_harness/x-1").series
        for record in (make_record(step=300), merged_record((100, 200, 300)))
    )
    other = Announcement.of(merged_record((100, 200)), "/e/run-a/step-200/lm_evaluation_harness/x-1").series
    assert len({written.id, merged.id, other.id}) == 3
    assert merged.name == f"{MERGED} lm_evaluation_harness demo_facts 5f0c2a7b"


def test_model_card_of_a_merged_checkpoint_says_what_it_was_made_of():
    record = merged_record((100, 200, 300))
    announcement = Announcement.of(record, "gs://bucket/evaluations/run-a/step-300/lm_evaluation_harness/x-1")
    _, front, body = with_results("", record, announcement, task_type="text-generation", uri="README.md").split(
        "---\n", 2
    )
    [result] = yaml.safe_load(front)["model-index"][0]["results"]
    assert result["dataset"]["args"]["merge"] == "mean of 3: run-a 100..300 by 100"
    assert "# run-a-100-to-300-mean3" in body and "training wrote no such checkpoint" in body
    assert re.findall(r"- run-a, step (\d+): weight 0\.333333, digest `\w+`", body) == ["100", "200", "300"]
