"""Comparing checkpoints: tests against known values, accepted and refused pairs, and the command's output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.cli import invoke
from fakes.records import make_metric, make_qualification, make_record, make_samples, publish
from fakes.stores import folder_store
from resources.errors import BadInput
from tasks.records.builds import build_of, write_qualification
from tasks.records.provenance import versions
from tasks.records.record import read_records
from tasks.records.samples import Sample


def answers(right: int, wrong: int) -> list[float]:
    return [1.0] * right + [0.0] * wrong


def put(
    folder: Path,
    step: int,
    scores: Sequence[float],
    *,
    samples: Sequence[Sample] | None = None,
    value: float | None = None,
    higher_is_better: bool = True,
    **others: Any,
) -> str:
    """Publishes a record of `acc` over scores, with their samples unless others are given."""
    mean = float(np.mean(scores)) if value is None else value
    stderr = float(np.std(scores, ddof=1)) / len(scores) ** 0.5
    metric = make_metric(value=mean, stderr=stderr, n=len(scores), higher_is_better=higher_is_better)
    return publish(
        folder,
        make_record(step=step, metrics=(metric,), **others),
        make_samples(scores) if samples is None else samples,
    )


def compared(folder: Path, *arguments: str) -> dict[str, Any]:
    done = invoke(["compare", "--path", str(folder), *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refused(folder: Path, *arguments: str) -> str:
    with pytest.raises(BadInput) as error:
        invoke(["compare", *arguments, "--path", str(folder)], catch_exceptions=False)
    return str(error.value)


# Two checkpoints


def test_compare_two_steps_pairs_questions_by_id(tmp_path: Path):
    put(tmp_path, 100, answers(20, 60))
    put(tmp_path, 200, answers(50, 30))

    comparison = compared(tmp_path, "run-a-100", "run-a@200")

    [metric] = comparison["metrics"]
    assert (metric["test"], metric["pairs"], metric["verdict"]) == ("McNemar, mid-p", 80, "better")
    assert (metric["first"], metric["second"], metric["difference"]) == (0.25, 0.625, 0.375)
    assert metric["p"] == pytest.approx(0.5**30), "the mid-p of thirty that only the second got right"
    assert comparison["adjustment"] == "bh"


def test_compare_where_lower_is_better_says_so_in_the_verdict(tmp_path: Path):
    random = np.random.default_rng(0)
    put(tmp_path, 100, list(random.gamma(2.0, size=90)), higher_is_better=False)
    put(tmp_path, 200, list(random.gamma(1.0, size=90)), higher_is_better=False)

    [metric] = compared(tmp_path, "run-a-100", "run-a-200")["metrics"]
    [back] = compared(tmp_path, "run-a-200", "run-a-100")["metrics"]

    assert metric["test"] == "paired t"
    assert (metric["verdict"], back["verdict"]) == ("better", "worse")
    assert metric["difference"] == pytest.approx(-back["difference"])


def test_compare_counts_questions_of_a_single_side(tmp_path: Path):
    put(tmp_path, 100, answers(30, 10))
    put(tmp_path, 200, [1.0] * 36)

    [metric] = compared(tmp_path, "run-a-100", "run-a-200")["metrics"]
    shown = invoke(["compare", "run-a-100", "run-a-200", "--path", str(tmp_path)]).stdout

    assert [metric[name] for name in ("pairs", "only_first", "only_second", "other_prompts")] == [36, 4, 0, 0]
    assert metric["first"] == pytest.approx(30 / 36), "over the questions that both have"
    assert metric["recorded"] == [0.75, 1.0]
    assert "4 questions only in run-a-100" in " ".join(shown.split())


def test_compare_questions_put_in_other_words_are_refused_unless_told_to_compare_anyway(tmp_path: Path):
    put(tmp_path, 100, answers(30, 10))
    other = [
        sample.model_copy(update={"prompt": "Else?"}) if sample.id == "3" else sample
        for sample in make_samples(answers(30, 10))
    ]
    put(tmp_path, 200, answers(30, 10), samples=other)

    assert "1 of 40 questions were put in other words" in refused(tmp_path, "run-a-100", "run-a-200")
    comparison = compared(tmp_path, "run-a-100", "run-a-200", "--anyway")

    assert comparison["metrics"][0]["other_prompts"] == 1
    assert comparison["measured_differently"] == {"demo_facts": ["1 of 40 questions were put in other words"]}


@pytest.mark.parametrize(
    ("samples", "value", "why"),
    [
        (None, 0.5, "no samples were kept"),
        ([], 0.5, "single questions have no score in it"),
        (make_samples(answers(30, 10)), 7.7, "its value is not the mean over single questions"),
    ],
)
def test_compare_without_scores_of_questions_falls_back_to_a_labelled_z_test(
    tmp_path: Path, samples: list[Sample] | None, value: float, why: str
):
    for step in (100, 200):
        publish(tmp_path, make_record(step=step, metrics=(make_metric(value=value + step / 1000),)), samples)

    [metric] = compared(tmp_path, "run-a-100", "run-a-200")["metrics"]

    assert (metric["test"], metric["pairs"], metric["unpaired_because"]) == ("z, unpaired", None, why)
    assert metric["difference"] == pytest.approx(0.1)
    shown = invoke(["compare", "run-a-100", "run-a-200", "--path", str(tmp_path)]).stdout
    assert f"Not paired ({why})" in " ".join(shown.split())


def test_compare_percentages_pairs_scores_from_0_to_1(tmp_path: Path):
    for step, right in ((100, 10), (200, 30)):
        put(tmp_path, step, answers(right, 40 - right), value=100 * right / 40)

    [metric] = compared(tmp_path, "run-a-100", "run-a-200")["metrics"]

    assert (metric["test"], metric["first"], metric["difference"]) == ("McNemar, mid-p", 25.0, 50.0)
    assert 0 < metric["low"] < 50 < metric["high"] + 2


def test_compare_what_was_measured_differently_is_refused_with_what_differs(tmp_path: Path):
    put(tmp_path, 100, answers(20, 20))
    shots = {**make_record().evaluation, "max_eval_instances": 40}
    shots["evals"] = [{"name": "demo_facts", "num_fewshot": 5, "task_alias": None}]
    put(tmp_path, 200, answers(30, 10), evaluation=shots, evaluation_hash="another")

    refusal = refused(tmp_path, "run-a-100", "run-a-200")
    anyway = compared(tmp_path, "run-a-100", "run-a-200", "--anyway")

    assert "num_fewshot is unset, then 5" in refusal and "max_eval_instances is unset, then 40" in refusal
    assert "--anyway" in refusal
    assert anyway["metrics"][0]["pairs"] == 40
    assert "evals.demo_facts.num_fewshot is unset, then 5" in anyway["measured_differently"]["demo_facts"]


def test_compare_prefers_records_that_were_measured_alike(tmp_path: Path):
    put(tmp_path, 100, answers(20, 20), cell="full-1")
    put(tmp_path, 100, answers(5, 0), cell="quick-1", evaluation={"max_eval_instances": 5}, evaluation_hash="quick")
    put(tmp_path, 200, answers(4, 1), cell="quick-2", evaluation={"max_eval_instances": 5}, evaluation_hash="quick")

    [metric] = compared(tmp_path, "run-a-100", "run-a-200")["metrics"]

    assert metric["n"] == [5, 5]


def test_compare_checkpoints_of_two_folders_and_cells_by_their_folder(tmp_path: Path):
    old = put(tmp_path / "old", 100, answers(10, 30))
    new = put(tmp_path / "new", 100, answers(35, 5))

    by_path = compared(tmp_path / "old", "run-a-100", f"{tmp_path / 'new'}:run-a-100")
    by_cell = compared(tmp_path, old, f"{new}/record.json")

    assert by_path["metrics"][0]["difference"] == by_cell["metrics"][0]["difference"] == 0.625


def test_compare_adjusts_for_the_number_of_metrics_and_narrows_to_those_named(tmp_path: Path):
    names = [f"bench_{number}" for number in range(10)]
    for step, right in ((100, 20), (200, 26)):
        metrics = tuple(make_metric(name, right / 40) for name in names)
        samples = [sample for name in names for sample in make_samples(answers(right, 40 - right), benchmark=name)]
        publish(tmp_path, make_record(step=step, metrics=metrics), samples)

    every = compared(tmp_path, "run-a-100", "run-a-200", "--adjust", "holm")
    narrowed = compared(tmp_path, "run-a-100", "run-a-200", "--adjust", "holm", "--benchmark", "bench_3")

    assert [metric["adjusted_p"] for metric in every["metrics"]] == [pytest.approx(10 * 1 / 64)] * 10
    assert {metric["verdict"] for metric in every["metrics"]} == {"no clear difference"}
    assert [(metric["benchmark"], metric["verdict"]) for metric in narrowed["metrics"]] == [("bench_3", "better")]


def test_compare_says_what_only_one_of_them_has(tmp_path: Path):
    put(tmp_path, 100, answers(20, 20))
    put(tmp_path, 200, answers(20, 20))
    publish(tmp_path, make_record(step=200, metrics=(make_metric("other"),), evaluator="helm"))

    comparison = compared(tmp_path, "run-a-100", "run-a-200")

    assert (comparison["only_first"], comparison["only_second"]) == ([], ["HELM: other · acc"])


def test_compare_of_evaluators_with_the_same_benchmark_keeps_them_apart(tmp_path: Path):
    for step in (100, 200):
        put(tmp_path, step, answers(20, 20))
        publish(tmp_path, make_record(step=step, metrics=(make_metric(value=0.9),), evaluator="helm"))

    comparison = compared(tmp_path, "run-a-100", "run-a-200")

    assert [(metric["evaluator"], metric["first"]) for metric in comparison["metrics"]] == [
        ("lm_evaluation_harness", 0.5),
        ("helm", 0.9),
    ]


def test_compare_reads_every_record_and_all_samples_once(tmp_path: Path):
    for step in range(100, 600, 100):
        put(tmp_path / "e", step, answers(step // 20, 30))
    with folder_store(tmp_path / "log") as store:
        comparison = compared(tmp_path / "e", "run-a-100", "run-a-200", "--path", f"store://{tmp_path / 'e'}")
        reads, samples = store.ranges("record.json"), store.ranges("samples.jsonl.gz")

    assert comparison["metrics"][0]["pairs"] == 35
    assert (len(reads), len(samples)) == (5, 2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run-a-100", "run-a-999"], "run-a-300, run-a-200, run-a-100"),
        (["run-a-100", "run-a-300"], "withheld"),
        (["run-a-100", "run-a-200", "--evaluator", "helmet"], "helmet"),
        (["run-a-100", "run-a-200", "--benchmark", "nothing*"], "take back --evaluator, --benchmark"),
    ],
)
def test_compare_of_what_cannot_be_compared_says_what_there_is(tmp_path: Path, arguments: list[str], expected: str):
    for step in (100, 200):
        put(tmp_path, step, answers(20, 20))
    publish(tmp_path, make_record(step=300, status="withheld"))

    assert expected in refused(tmp_path, *arguments)


def test_unknown_adjustment_is_refused_with_the_known_names(tmp_path: Path):
    done = invoke(["compare", "run-a-100", "run-a-200", "--adjust", "bonferroni", "--path", tmp_path])
    assert done.exit_code == 3 and all(name in done.stderr for name in ("bonferroni", "holm"))


def test_compare_table_fits_eighty_characters_and_tells_test_and_adjustment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    random = np.random.default_rng(5)
    for step in (100, 200):
        put(tmp_path, step, list(random.random(50) * step / 200))

    shown = invoke(["compare", "run-a-100", "run-a-200", "--path", str(tmp_path)]).stdout

    assert max(map(len, shown.splitlines())) <= 80
    for expected in ("a t test of paired differences", "Benjamini–Hochberg", "better", "run-a-200 against run-a-100"):
        assert expected in " ".join(shown.split())


def test_compare_table_keeps_names_next_to_huge_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    name = "wikitext_with_a_long_name"
    for step, value in ((100, 1.23e15), (200, -4.56e33)):
        metric = make_metric(name, value, name="word_perplexity", stderr=abs(value) / 7, n=14_042)
        publish(tmp_path, make_record(step=step, metrics=(metric,)))

    shown = invoke(["compare", "run-a-100", "run-a-200", "--path", str(tmp_path)]).stdout

    assert max(map(len, shown.splitlines())) <= 80
    [heading] = [line for line in shown.splitlines() if line.startswith("  benchmark")]
    names = "".join(line[: heading.index("run-a-100")].strip() for line in shown.splitlines())
    assert name in names and "word_perplexity" in names
    assert "1.23e+15" in shown and "-4.56e+33" in shown


def test_another_build_is_refused_and_named_until_it_is_qualified(tmp_path: Path):
    for step, lm_eval in ((100, "0.4.9"), (200, "0.4.13")):
        put(tmp_path, step, answers(30, 30), versions={**versions(), "lm_eval": lm_eval})
    with pytest.raises(BadInput, match=r"demo_facts: harness lm_eval 0\.4\.9 → 0\.4\.13, and no `assay requalify`"):
        compared(tmp_path, "run-a@100", "run-a@200")
    assert compared(tmp_path, "run-a@100", "run-a@200", "--anyway")["measured_differently"]["demo_facts"]

    both = (build_of(record) for record in read_records(str(tmp_path)))
    write_qualification(str(tmp_path), make_qualification(*both, bound=0.17))
    comparison = compared(tmp_path, "run-a@100", "run-a@200")
    words = "qualified within noise: acc may differ by 0.17 at most (95 %)"
    assert comparison["measured_differently"] == {}
    assert comparison["qualified"] == {"demo_facts": ["harness lm_eval 0.4.9 → 0.4.13", words]}
    shown = invoke(["compare", "run-a@100", "run-a@200", "--path", str(tmp_path)]).stdout
    assert words in " ".join(shown.split()) and "no number" not in shown


def test_prompts_that_a_qualified_build_puts_otherwise_are_compared(tmp_path: Path):
    for step, lm_eval in ((100, "0.4.9"), (200, "0.4.13")):
        samples = [s.model_copy(update={"prompt": f"{lm_eval} {s.prompt}"}) for s in make_samples(answers(30, 30))]
        put(tmp_path, step, answers(30, 30), samples=samples, versions={**versions(), "lm_eval": lm_eval})
    both = [build_of(record) for record in read_records(str(tmp_path))]
    write_qualification(str(tmp_path), make_qualification(*both, verdict="different"))
    with pytest.raises(BadInput, match="60 of 60 questions were put in other words"):
        compared(tmp_path, "run-a@100", "run-a@200")

    for file in (tmp_path / "qualifications" / "verdicts").iterdir():
        file.unlink()
    write_qualification(str(tmp_path), make_qualification(*both))
    assert compared(tmp_path, "run-a@100", "run-a@200")["metrics"][0]["other_prompts"] == 60
