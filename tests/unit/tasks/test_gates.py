"""Gates: passes, failures, and no pass without a score."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from fakes.cli import invoke
from fakes.records import make_metric, make_qualification, make_record, make_samples, publish
from resources.errors import BadInput
from tasks.errors import GateRefused
from tasks.records.builds import build_of, write_qualification
from tasks.records.provenance import versions
from tasks.records.record import FoundRecord, Record, find_records, read_records
from tasks.records.samples import Sample
from tasks.records.search import records_of_checkpoints
from tasks.records.verdicts import Reason, Verdict
from tasks.reports.texts import verdict_markdown
from tasks.spec.loading import load_config
from tasks.verdicts.gate import BaselineRule, BoundRule, Gate
from tasks.verdicts.judge import JudgedCheckpoint, judge, judged_checkpoints
from tasks.verdicts.statistics.paired import PairedStratum, compare_pairs, score_bound

FACTS = {"benchmark": "demo_facts", "metric": "acc"}


def gate(*rules: dict[str, Any], **fields: Any) -> Gate:
    return Gate.model_validate({"rules": rules, **fields})


def verdict(folder: Path, by: Gate, *, step: int | None = None) -> Verdict:
    """Returns a gate's verdict on the records below a folder, or on the records of a single step."""
    records = [item for item in find_records(str(folder)) if step in (None, item.record.checkpoint.step)]
    return judge(by, judged_checkpoints(records), evaluation_path=str(folder))


def about(verdict: Verdict, rule: str) -> list[Reason]:
    return [reason for reason in verdict.reasons if rule in reason.rule]


def scored(folder: Path, step: int, scores: Sequence[float], **fields: Any) -> None:
    mean = sum(scores) / len(scores)
    record = make_record(step=step, metrics=(make_metric(value=mean, n=len(scores)),), **fields)
    publish(folder, record, make_samples(scores))


@pytest.mark.parametrize(
    ("bounds", "value", "go"),
    [
        ({"at_least": 0.5}, 0.5, True),
        ({"at_least": 0.5}, 0.499, False),
        ({"at_most": 12.0}, 12.0, True),
        ({"at_most": 12.0}, 12.1, False),
        ({"at_least": 0.2, "at_most": 0.4}, 0.3, True),
        ({"at_least": 0.2}, float("nan"), False),
        ({"at_least": 0.2}, float("inf"), False),
    ],
)
def test_bound_passes_values_up_to_it_and_never_what_is_no_number(
    tmp_path: Path, bounds: dict[str, float], value: float, go: bool
):
    record = make_record(metrics=(make_metric(value=value),))
    judgement = judge(gate(FACTS | bounds), [judged(record)], evaluation_path=str(tmp_path))
    assert judgement.go is go
    assert [reason.go for reason in about(judgement, "demo_facts")] == [go]


def judged(*records: Record) -> JudgedCheckpoint:
    """Returns a checkpoint with records that are not stored."""
    placed = tuple(FoundRecord("nowhere", record) for record in records)
    return JudgedCheckpoint(records[0].checkpoint.name, records[0].checkpoint.step, placed)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"benchmark": "mmlu", "metric": "acc"}, "not asked"),
        ({"benchmark": "demo_facts", "metric": "acc_norm"}, "with acc"),
        ({"benchmark": "demo_facts", "metric": "acc", "evaluator": "helm"}, "not asked"),
    ],
)
@pytest.mark.parametrize("asked", [{"at_least": 0.0}, {"not_worse_than": "run-a@100", "by_more_than": 0.1}])
def test_score_that_is_missing_is_a_reason_for_no_go(
    tmp_path: Path, rule: dict[str, Any], asked: dict[str, Any], expected: str
):
    publish(tmp_path, make_record(step=100))
    judgement = verdict(tmp_path, gate(rule | asked))
    assert not judgement.go
    [reason] = judgement.refusals
    assert expected in reason.found


def test_pattern_asks_every_matching_score_and_names_the_failing_score(tmp_path: Path):
    metrics = (make_metric("mmlu_law", 0.6), make_metric("mmlu_art", 0.3), make_metric("other", 0.1))
    publish(tmp_path, make_record(metrics=metrics))
    judgement = verdict(tmp_path, gate({"benchmark": "mmlu*", "metric": "acc", "at_least": 0.5}))
    passed, refused = about(judgement, "mmlu")
    assert passed.go and "mmlu_law · acc = 0.600" in passed.found
    assert not refused.go and "mmlu_art · acc = 0.300" in refused.found


def test_score_of_several_evaluations_is_judged_once_each_and_says_which_suite_it_is_of(tmp_path: Path):
    def record(suite: str, value: float, hash_: str, **fields: Any) -> Record:
        return make_record(
            metrics=(make_metric(value=value),), tags=(f"suite={suite}",), evaluation_hash=hash_, **fields
        )

    key, core = record("key_evals", 0.61, "aaaa"), record("core", 0.62, "bbbb", evaluation={"max_eval_instances": 20})
    newer = record("key_evals", 0.63, "aaaa", created=key.created + timedelta(minutes=1))
    judgement = judge(gate(FACTS | {"at_least": 0.5}), [judged(newer, key, core)], evaluation_path=str(tmp_path))
    shown = [reason.found for reason in about(judgement, "demo_facts")]
    assert sum("0.630" in line and "suite key_evals" in line for line in shown) == 1
    assert sum("0.620" in line and "suite core" in line and "20 questions at most" in line for line in shown) == 1
    assert len(shown) == 2, "the older one of two alike is not judged"
    [alone] = about(judge(gate(FACTS | {"at_least": 0.5}), [judged(key)], evaluation_path=""), "demo_facts")
    assert "suite" not in alone.found


@pytest.mark.parametrize(
    ("statuses", "fields", "go"),
    [
        (["succeeded", "succeeded"], {}, True),
        (["succeeded", "withheld"], {}, False),
        (["succeeded", "withheld"], {"max_withheld": 1}, True),
        (["succeeded", "withheld"], {"max_failed": 1}, False),
        (["succeeded", "failed"], {}, False),
        (["succeeded", "infra_failed"], {"max_failed": 1}, True),
        (["failed", "infra_failed"], {"max_failed": 1}, False),
    ],
)
def test_cells_that_did_not_succeed_are_counted_against_what_is_allowed(
    statuses: list[Any], fields: dict[str, int], go: bool
):
    records = [
        make_record(status=status, metrics=(make_metric(f"benchmark_{number}"),))
        for number, status in enumerate(statuses)
    ]
    assert judge(gate(**fields), [judged(*records)], evaluation_path="nowhere").go is go


def test_cell_without_a_record_counts_as_failed_and_nothing_at_all_is_no_go():
    checkpoint = judged(make_record())
    missing = JudgedCheckpoint(checkpoint.name, checkpoint.step, checkpoint.records, without_record=1)
    [reason] = judge(gate(), [missing], evaluation_path="nowhere").refusals
    assert "1 of 2 failed, 1 of them without a record" in reason.found
    assert not judge(gate(), [], evaluation_path="nowhere").go
    with pytest.raises(GateRefused, match="no record to look at"):
        judge(gate(), [], evaluation_path="nowhere").raise_unless_go()


def test_gate_judges_the_latest_or_every_checkpoint_as_configured(tmp_path: Path):
    publish(tmp_path, make_record(step=100, metrics=(make_metric(value=0.1),)))
    publish(tmp_path, make_record(step=2000, metrics=(make_metric(value=0.9),)))
    rule = FACTS | {"at_least": 0.5}
    assert verdict(tmp_path, gate(rule)).go
    assert {reason.checkpoint for reason in verdict(tmp_path, gate(rule)).reasons} == {"run-a-2000"}
    every = verdict(tmp_path, gate(rule, checkpoints="every"))
    assert [reason.checkpoint for reason in every.refusals] == ["run-a-100"]


BASELINE = {"not_worse_than": "run-a@100", "by_more_than": 0.1}


@pytest.mark.parametrize(
    ("lost", "margin", "go", "words"),
    [
        (0, 0.1, True, "worse by 0.0"),
        (10, 0.1, True, ""),
        (60, 0.1, False, ""),
        (0, 0.005, False, "takes about"),  # nothing was lost, but 400 questions cannot show so little
        (400, 0.1, False, ""),
        (-200, 0.005, True, "better by"),  # a proven improvement needs no margin
    ],
)
def test_baseline_is_compared_question_by_question(tmp_path: Path, lost: int, margin: float, go: bool, words: str):
    right = 400 if lost >= 0 else 200
    scored(tmp_path, 100, [1.0] * right + [0.0] * (400 - right))
    scored(tmp_path, 200, [1.0] * (right - lost) + [0.0] * (400 - right + lost))

    [reason] = about(verdict(tmp_path, gate(FACTS | BASELINE | {"by_more_than": margin})), "worse than run-a@100")

    assert reason.go is go
    assert (
        "400 questions of both" in reason.found
        and "equal scores pass margins from" in reason.found
        and words in reason.found
    )


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.0), (1.0, 1.0), (0.9, 0.1)])
def test_five_questions_show_nothing_for_any_answers(tmp_path: Path, before: float, after: float):
    scored(tmp_path, 100, [before] * 5)
    scored(tmp_path, 200, [after] * 5)
    [reason] = verdict(tmp_path, gate(FACTS | BASELINE)).refusals
    assert "may not pass 0.1: that takes about" in reason.found


def test_equal_scores_pass_the_margin_that_was_named(tmp_path: Path):
    # Of equal runs with a tenth of the answers flipped, all that exclude the margin pass, for any number of flips.
    random, passed = np.random.default_rng(1), 0
    margin = 1.001 * (compare_pairs([PairedStratum(*flipped(10, 10, 200), range(200))]).detectable(0.05) or 0.0)
    for step in range(1, 41):
        lost, won = random.multinomial(200, [0.05, 0.05, 0.9])[:2]
        before, after = flipped(int(lost), int(won), 200)
        scored(tmp_path / str(step), 100, before)
        scored(tmp_path / str(step), 200, after)
        [reason] = about(verdict(tmp_path / str(step), gate(FACTS | BASELINE | {"by_more_than": margin})), "not worse")
        bound = float(reason.found.split("worse by ")[1].split()[0]) if "worse by" in reason.found else 0.0
        assert reason.go is (bound < margin), reason.found
        assert not (reason.go and "may not pass" in reason.found)
        passed += reason.go
    assert passed >= 36, (
        "5 % of equal runs are refused by chance; half were, where each reason named a margin of its own"
    )


def flipped(lost: int, won: int, questions: int) -> tuple[list[float], list[float]]:
    same = [1.0] * (questions - lost - won)
    return [1.0] * lost + [0.0] * won + same, [0.0] * lost + [1.0] * won + same


def test_scores_worse_by_the_margin_seldom_pass():
    # Every outcome weighted by its probability where the true loss equals the margin (exact, no simulation).
    worst = 0.0
    for questions in (20, 56, 100):
        outcomes = [(won, lost) for won in range(questions + 1) for lost in range(questions + 1 - won)]
        won, lost = np.array(outcomes).T
        bounds = np.array([score_bound(*outcome, questions) for outcome in outcomes])
        for margin, wins in itertools.product((0.02, 0.05, 0.1, 0.15, 0.2, 0.3), (0.0, 0.01, 0.05, 0.1, 0.2, 0.3)):
            if 2 * wins + margin <= 1:
                shares = [wins, wins + margin, 1 - 2 * wins - margin]
                chance = stats.multinomial.pmf(np.stack([won, lost, questions - won - lost], axis=1), questions, shares)
                worst = max(worst, float(chance[bounds > -margin].sum()))
    assert 0.02 < worst <= 0.032, "6.9 % by a Wald interval; it is 2.5 % where questions are many"


@pytest.mark.parametrize(("asked", "go"), [(400, True), (380, True), (379, False)])
def test_questions_of_a_single_side_are_refused_above_a_share(tmp_path: Path, asked: int, go: bool):
    scored(tmp_path, 100, [1.0] * 400)
    scored(tmp_path, 200, [1.0] * asked)

    [reason] = about(verdict(tmp_path, gate(FACTS | BASELINE)), "worse than run-a@100")

    assert reason.go is go
    assert (f"left out: {400 - asked} question" in reason.found) is (asked < 400)
    assert ("more than 5% of all" in reason.found) is not go
    assert verdict(tmp_path, gate(FACTS | BASELINE | {"anyway": True})).go


def test_benchmark_of_a_single_question_has_samples(tmp_path: Path):
    for step in (100, 200):
        publish(
            tmp_path, make_record(step=step, metrics=(make_metric(value=1.0, n=1, stderr=None),)), make_samples([1])
        )
    [reason] = verdict(tmp_path, gate(FACTS | BASELINE)).refusals
    assert "they have a single question in common" in reason.found and "samples" not in reason.found


def test_smallest_loss_that_is_ruled_out_grows_with_the_scores_and_checkpoints_that_a_gate_decides_on(tmp_path: Path):
    def smallest(folder: Path, **fields: Any) -> float:
        [*_, reason] = about(verdict(folder, gate(FACTS | BASELINE, **fields)), "worse than")
        return float(reason.found.partition("margins from ")[2].split()[0])

    for step in (100, *range(101, 170)):
        scored(tmp_path / "long", step, [1.0] * 200 + [0.0] * 200)
    scored(tmp_path / "short", 100, [1.0] * 200 + [0.0] * 200)
    scored(tmp_path / "short", 169, [1.0] * 200 + [0.0] * 200)
    (tmp_path / "short" / "run-a" / "step-²" / "e" / "c").mkdir(parents=True)
    (tmp_path / "short" / "run-a" / "step-²" / "e" / "c" / "record.json").touch()

    assert smallest(tmp_path / "long") > smallest(tmp_path / "short")
    alone = smallest(tmp_path / "long", false_alarms="per checkpoint")
    assert alone == smallest(tmp_path / "short", false_alarms="per checkpoint") < smallest(tmp_path / "short")


@pytest.mark.parametrize("change", [0.0, 0.3], ids=["equal", "improved"])
def test_perplexity_that_improved_or_stayed_passes_by_its_documents(tmp_path: Path, change: float):
    documents = 60

    def perplexity(step: int, per_word: float) -> None:
        pairs = [(-(per_word + number % 7 / 10) * 100.0, 100.0) for number in range(documents)]
        value = math.exp(-sum(pair[0] for pair in pairs) / sum(pair[1] for pair in pairs))
        metric = make_metric("texts", value, name="word_perplexity", higher_is_better=False, stderr=None, n=documents)
        samples = [
            Sample(benchmark="texts", id=str(n), prompt="", output="", target=None, scores={},
                   ratios={"word_perplexity": pair})
            for n, pair in enumerate(pairs)
        ]  # fmt: skip
        publish(tmp_path, make_record(step=step, metrics=(metric,)), samples)

    perplexity(1, 2.5)
    perplexity(2, 2.5 - change)
    perplexity(3, 2.9)
    rule = {"benchmark": "texts", "metric": "word_perplexity", "not_worse_than": "run-a@1", "by_more_than": 0.5}
    assert verdict(tmp_path, gate(rule), step=2).go
    assert not verdict(tmp_path, gate(rule), step=3).go


@pytest.mark.parametrize(
    ("other", "rule", "expected"),
    [
        ({"evaluation_hash": "another"}, {}, "cannot be compared: differences"),
        ({"status": "withheld"}, {}, "cannot be compared"),
        ({}, {"not_worse_than": "run-z@1"}, "run-z@1"),
        ({"metrics": (make_metric(stderr=None),)}, {}, "not tested"),
        ({"metrics": (make_metric(higher_is_better=None),)}, {}, "which direction is better"),
    ],
)
def test_comparison_that_cannot_be_made_is_a_reason_for_no_go(
    tmp_path: Path, other: dict[str, Any], rule: dict[str, Any], expected: str
):
    publish(tmp_path, make_record(step=1, **other))
    mine = {key: value for key, value in other.items() if key == "metrics"}
    publish(tmp_path, make_record(step=2, **mine))
    judgement = verdict(tmp_path, gate(FACTS | BASELINE | {"not_worse_than": "run-a@1"} | rule))
    [reason] = judgement.refusals
    assert expected in reason.found


def test_score_that_only_the_baseline_has_is_a_reason_for_no_go(tmp_path: Path):
    publish(tmp_path, make_record(step=1, metrics=(make_metric("mmlu_law"), make_metric("mmlu_art"))))
    publish(tmp_path, make_record(step=2, metrics=(make_metric("mmlu_law"),)))
    rule = {"benchmark": "mmlu*", "metric": "acc", "not_worse_than": "run-a@1", "by_more_than": 0.5, "anyway": True}
    [reason] = verdict(tmp_path, gate(rule)).refusals
    assert "mmlu_art" in reason.found and "only the baseline" in reason.found


def test_rules_differ_by_what_they_name_and_survive_a_file(tmp_path: Path):
    rules = (FACTS | {"at_least": 0.5}, FACTS | {"not_worse_than": "run-a@1", "by_more_than": 0.02})
    file = tmp_path / "gate.yaml"
    file.write_text(yaml.safe_dump({"name": "release", "rules": list(rules)}))
    read = load_config(str(file), Gate)
    assert [type(rule) for rule in read.rules] == [BoundRule, BaselineRule]
    assert Gate.model_validate_json(read.model_dump_json()) == read


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"rules": [FACTS]}, "at_least, at_most or not_worse_than"),
        ({"rules": [FACTS | {"at_leats": 0.5}]}, "did you mean at_least?"),
        ({"rules": [{"benchmark": "demo_facts", "at_least": 0.5}]}, "metric"),
        ({"rules": [FACTS | {"at_least": 0.5, "not_worse_than": "run-a@1"}]}, "at_least"),
        ({"rules": [FACTS | {"not_worse_than": "run-a@1"}]}, "by_more_than"),
        ({"rules": [FACTS | {"not_worse_than": "run-a@1", "by_more_than": 0}]}, "by_more_than"),
        ({"max_witheld": 1}, "did you mean max_withheld?"),
        ({"rules": [FACTS | {"at_least": float("nan")}]}, "expected a number"),
    ],
)
def test_invalid_gate_is_refused(tmp_path: Path, content: dict[str, Any], expected: str):
    file = tmp_path / "gate.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(BadInput, match="a valid Gate") as refused:
        load_config(str(file), Gate)
    assert expected in refused.value.found


def test_verdict_as_markdown_has_a_line_for_each_reason():
    reasons = (
        Reason("run-a-1", "mmlu* · acc at least 0.5", "a | b\nc", go=False),
        Reason("run-a-1", "x", "y", go=True),
        Reason("run-a-2", "a\r| GO |", "b\u2028c\x0b<img src=x> &lt; ![i](u) `d` \\| e", go=True),
    )
    text = verdict_markdown(Verdict("release", reasons))
    assert text.startswith("## NO-GO: release\n")
    assert text.splitlines()[1:] == [
        "",
        "- **NO-GO** run-a-1, mmlu\\* · acc at least 0.5: a \\| b<br>c",
        "- **GO** run-a-1, x: y",
        r"- **GO** run-a-2, a<br>\| GO \|: b<br>c<br>\<img src=x> \&lt; \!\[i](u) \`d\` \\\| e",
    ]


@pytest.fixture
def release(tmp_path: Path) -> Path:
    publish(tmp_path / "evaluations", make_record(step=1, metrics=(make_metric(value=0.7),)))
    publish(tmp_path / "evaluations", make_record(step=2, metrics=(make_metric(value=0.3),)))
    file = tmp_path / "gate.yaml"
    file.write_text(yaml.safe_dump({"name": "release", "rules": [FACTS | {"at_least": 0.5}]}))
    return file


def test_command_says_go_or_no_go_for_people_scripts_and_summaries(release: Path):
    records, summary = ["--records", str(release.parent / "evaluations")], release.parent / "summary.md"
    go = invoke(["gate", str(release), *records, "--step", "1", "--summary", str(summary)])
    assert go.exit_code == 0 and go.stdout.rstrip().endswith("release: GO")
    no_go = invoke(["gate", str(release), *records, "--summary", str(summary), "--json"])
    assert isinstance(no_go.exception, GateRefused) and no_go.exception.exit_code == 1
    printed = json.loads(no_go.stdout)
    assert printed["verdict"] == "NO-GO"
    assert [reason["checkpoint"] for reason in printed["reasons"] if not reason["go"]] == ["run-a-2"]
    assert [line for line in summary.read_text().splitlines() if line.startswith("## ")] == [
        "## GO: release",
        "## NO-GO: release",
    ]


def test_error_in_a_log_is_not_broken_into_lines_of_a_terminal(tmp_path: Path):
    missing = tmp_path / "-".join(["a gate with a long name"] * 6)
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli.app", "gate", str(missing)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3
    assert any(str(missing) in line for line in done.stderr.splitlines())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--step", "3"], "steps 1, 2"),
        (["--run", "run-z"], "runs run-a"),
        (["--records", "nowhere-at-all"], "none"),
        (["--summary", "no/such/folder/summary.md"], "No such file"),
        (["--checkpoint", "run-a@2", "--step", "2"], "both"),
        (["--checkpoint", "run-a@2", "--run", "run-a"], "both"),
    ],
)
def test_command_about_records_that_are_not_there_or_options_that_say_two_things_is_bad_input(
    release: Path, arguments: list[str], expected: str
):
    records = ["--records", str(release.parent / "evaluations")]
    done = invoke(["gate", str(release), *records, *arguments])
    assert isinstance(done.exception, BadInput) and done.exception.exit_code == 3
    assert expected in done.exception.found


def test_gate_judges_each_of_two_checkpoints_with_the_same_name(tmp_path: Path):
    for place, value in (("/runs/exp1", 0.9), ("/runs/exp2", 0.1)):
        record = make_record(step=0, run="final", place=place, cell=place[-4:], metrics=(make_metric(value=value),))
        publish(tmp_path, record)
    judgement = verdict(tmp_path, gate(FACTS | {"at_least": 0.5}, checkpoints="every"))
    assert [(reason.checkpoint, reason.go) for reason in about(judgement, "demo_facts")] == [
        ("final (exp1/final)-0", True),
        ("final (exp2/final)-0", False),
    ]
    with pytest.raises(BadInput, match=r"/runs/exp1/final/hf/step-0 and /runs/exp2/final/hf/step-0"):
        records_of_checkpoints(["final-0"], evaluation_path=str(tmp_path))


def test_baseline_by_another_version_is_no_go_and_named_until_it_is_qualified(tmp_path: Path):
    for step, lm_eval in ((1, "0.4.9"), (2, "0.4.13")):
        scored(tmp_path, step, [1.0, 0.0] * 400, versions={**versions(), "lm_eval": lm_eval})
    rule = FACTS | {"not_worse_than": "run-a@1", "by_more_than": 0.1}
    refused = verdict(tmp_path, gate(rule), step=2)
    assert not refused.go
    assert "harness lm_eval 0.4.9 → 0.4.13, and no `assay requalify`" in about(refused, "demo_facts")[0].found
    assert verdict(tmp_path, gate(rule | {"anyway": True}), step=2).go

    both = [build_of(record) for record in read_records(str(tmp_path))]
    write_qualification(str(tmp_path), make_qualification(*both))
    judgement = verdict(tmp_path, gate(rule), step=2)
    assert judgement.go
    assert about(judgement, "demo_facts")[0].found == (
        "demo_facts: harness lm_eval 0.4.9 → 0.4.13, qualified within noise, but nothing bounds how far acc may differ"
    )
