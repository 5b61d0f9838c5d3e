"""Scores in total, clean and flagged: in the numbers, on the page, in exports and on the command line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakes.cli import invoke
from fakes.records import FIRST, make_metric, make_record, make_samples, publish
from tasks.contamination.texts import TextSource, training_texts
from tasks.records.questions.flags import Evidence, Flags, QuestionFlag, Search, read_flags, write_flags
from tasks.records.record import Metric, Record, find_records, read_records
from tasks.records.samples import Sample
from tasks.reports.contamination import Split, splits_of
from tasks.reports.page import write_report

HOSTILE = '<script>alert(1)</script>&amp;"><img src=x onerror=alert(1)>'
RIGHT = [1.0] * 30 + [0.0] * 70  # the first 30 of 100 questions are right


def flags_of(
    path: Path, flagged: Sequence[int], clean: Sequence[int], *, benchmark: str = "demo_facts", text: str = "the words"
) -> Flags:
    def flag(number: int, hit: bool) -> QuestionFlag:
        evidence = Evidence(place=f"{text}.jsonl, document 3", text=text) if hit else None
        return QuestionFlag(benchmark=benchmark, id=str(number), text="", flagged=hit, score=float(hit),
                            longest=17 if hit else 0, evidence=evidence)  # fmt: skip

    flags = [*(flag(number, True) for number in flagged), *(flag(number, False) for number in clean)]
    search = Search(name="pile", tool="assay", version="1", created=FIRST, texts=("data/*.jsonl",), n=13, shortest=8,
                    threshold=0.5, text_files=2, text_bytes=3 * 10**9, documents=5, words=6, not_read=(text,),
                    questions=len(flags), flagged=len(flagged))  # fmt: skip
    return write_flags(str(path), search, flags)


def split(path: Path, metric: Metric, samples: Sequence[Sample], *others: Metric) -> Split:
    record = make_record(metrics=(metric, *others), samples=len(samples))
    publish(path, record, samples)
    [halves] = [
        each for each in splits_of([record], read_flags(str(path)), evaluation_path=str(path)) if each.metric == metric
    ]
    return halves


def test_score_is_split_into_clean_and_flagged_with_an_interval_that_holds_for_few(tmp_path: Path) -> None:
    flags_of(tmp_path, flagged=range(10), clean=range(10, 90))
    halves = split(tmp_path, make_metric(value=0.3, n=100), make_samples(RIGHT))
    assert halves.clean is not None and halves.flagged is not None
    assert (halves.clean.value, halves.clean.n) == (pytest.approx(20 / 80), 80)
    assert (halves.flagged.value, halves.flagged.n, halves.not_scanned) == (1.0, 10, 10)
    assert halves.difference == pytest.approx(-0.75)
    # Ten of ten correct have a standard error of 0 and still an interval: the difference uses both intervals.
    assert halves.flagged.low == pytest.approx(0.05 ** (1 / 10) * 0.9332, abs=0.01)
    assert halves.low == pytest.approx(-0.75 - (0.25 - (halves.clean.low or 0)), abs=1e-9)
    assert halves.high is not None and -0.75 + 0.3 < halves.high < -0.3


def test_interval_of_a_difference_is_as_wide_as_both_sides_make_it(tmp_path: Path) -> None:
    flags_of(tmp_path, flagged=range(10), clean=range(10, 100))
    halves = split(tmp_path, make_metric(value=0.5, n=100), make_samples([0.0, 1.0] * 50))
    assert (
        halves.clean is not None and halves.flagged is not None and halves.low is not None and halves.high is not None
    )
    assert halves.clean.low is not None and halves.flagged.high is not None
    assert halves.low == pytest.approx(-math.hypot(0.5 - halves.clean.low, halves.flagged.high - 0.5))
    assert halves.high == pytest.approx(-halves.low)


def test_clusters_widen_the_interval_of_the_difference(tmp_path: Path) -> None:
    flags_of(tmp_path, flagged=range(50), clean=range(50, 100))
    scores = [float(number % 20 < 10) for number in range(100)]
    alone = make_samples(scores)
    together = [sample.model_copy(update={"cluster": f"c{int(sample.id) // 10}"}) for sample in alone]
    widths = []
    for place, samples in (("a", alone), ("b", together)):
        flags_of(tmp_path / place, flagged=range(50), clean=range(50, 100))
        halves = split(tmp_path / place, make_metric(value=0.5, n=100), samples)
        assert halves.low is not None and halves.high is not None
        widths.append(halves.high - halves.low)

    assert widths[1] > 1.5 * widths[0]


def test_perplexity_is_split_by_its_sums_and_not_by_a_mean(tmp_path: Path) -> None:
    flags_of(tmp_path, flagged=[0], clean=[1, 2])
    sums = [(-10.0, 10.0), (-40.0, 20.0), (-30.0, 10.0)]
    samples = [
        Sample(benchmark="demo_facts", id=str(number), prompt="p", output="", target=None, scores={},
               ratios={"word_perplexity": pair})
        for number, pair in enumerate(sums)
    ]  # fmt: skip
    halves = split(tmp_path, make_metric(name="word_perplexity", value=math.exp(2), n=3), samples)
    assert halves.clean is not None and halves.flagged is not None
    assert (halves.clean.value, halves.flagged.value) == (pytest.approx(math.exp(7 / 3)), pytest.approx(math.e))
    assert (halves.low, halves.reason) == (None, "too few questions for an interval")


def test_score_that_is_no_mean_over_questions_is_not_split_and_says_why(tmp_path: Path) -> None:
    flags_of(tmp_path, flagged=range(10), clean=range(10, 100))
    halves = split(tmp_path, make_metric(value=0.9, n=100), make_samples(RIGHT))
    assert (halves.clean, halves.flagged) == (None, None)
    assert halves.reason == "not split: its value is not the mean over single questions"


def test_group_of_which_a_part_has_no_flagged_question_is_compared_over_the_others(tmp_path: Path) -> None:
    flags_of(tmp_path, flagged=[0, 1], clean=range(2, 10), benchmark="g_a")
    whole = flags_of(tmp_path / "b", flagged=[], clean=range(10), benchmark="g_b")
    write_flags(str(tmp_path), whole.search.model_copy(update={"name": "b"}), whole.questions.values())
    samples = [*make_samples([1] * 4 + [0] * 6, benchmark="g_a"), *make_samples([1] * 8 + [0] * 2, benchmark="g_b")]
    group = make_metric("g", 0.6, n=20).model_copy(update={"parts": {"g_a": 0.5, "g_b": 0.5}})
    halves = split(tmp_path, group, samples, make_metric("g_a", 0.4, n=10), make_metric("g_b", 0.8, n=10))
    assert halves.clean is not None and halves.flagged is not None
    assert halves.clean.value == pytest.approx((2 / 8 + 0.8) / 2)
    assert halves.flagged.value == 1.0
    assert (halves.difference, halves.parts) == (pytest.approx(2 / 8 - 1.0), (1, 2))


def test_uneven_flags_of_parts_widen_the_difference(tmp_path: Path) -> None:
    few = flags_of(tmp_path, flagged=range(3), clean=range(3, 300), benchmark="g_a")
    half = flags_of(tmp_path / "b", flagged=range(150), clean=range(150, 300), benchmark="g_b")
    write_flags(str(tmp_path), half.search.model_copy(update={"name": "b"}), half.questions.values())
    assert (few.search.flagged, half.search.flagged) == (3, 150)
    samples = [s for name in ("g_a", "g_b") for s in make_samples([1.0, 1.0, 1.0, 1.0, 0.0] * 60, benchmark=name)]
    group = make_metric("g", 0.8, n=600).model_copy(update={"parts": {"g_a": 0.5, "g_b": 0.5}})
    halves = split(tmp_path, group, samples, *(make_metric(name, 0.8, n=300) for name in ("g_a", "g_b")))
    unseen = 0.5 * (1 - 0.025 ** (1 / 3))  # all three flagged questions of a part are right, which proves little
    assert halves.flagged is not None and halves.flagged.low is not None and halves.high is not None
    assert halves.flagged.value - halves.flagged.low > unseen
    assert halves.high - (halves.difference or 0.0) > unseen


def series(path: Path, *, text: str = "the words") -> list[Record]:
    for step in (100, 200):
        samples = make_samples(RIGHT)
        publish(path, make_record(step=step, metrics=(make_metric(value=0.3, n=100),), samples=100), samples)
    flags_of(path, flagged=range(10), clean=range(10, 90), text=text)
    return read_records(str(path))


def test_page_shows_scores_and_searches_escaped_and_is_written_again_when_flags_change(tmp_path: Path) -> None:
    records = series(tmp_path, text=HOSTILE)

    def page() -> str:
        return Path(write_report(records, str(tmp_path / "r.html"), title="t", records_at=str(tmp_path))).read_text()

    shown = page()
    assert "What the model had seen" in shown
    words = re.sub(r"<[^>]*>", " ", shown)
    assert re.search(r"0\.250 +\[0\.\d+, 0\.\d+\] +n = 80 +1\.000 +\[0\.\d+, 1\.000\] +n = 10 ", words)
    assert "10 questions not scanned" in shown and "10 questions flagged of 90 looked for" in shown
    assert HOSTILE not in shown and "<script" not in shown and shown.count("&lt;script&gt;") >= 3
    [flags] = read_flags(str(tmp_path))
    assert flags.digest[:16] in shown
    flags_of(tmp_path, flagged=range(20), clean=range(20, 90))
    assert "20 questions flagged of 90" in page()


def test_page_without_flags_says_nothing_of_them_and_flags_are_no_records(tmp_path: Path) -> None:
    publish(tmp_path, make_record(), make_samples(RIGHT))
    before = find_records(str(tmp_path))
    page = Path(write_report(read_records(str(tmp_path)), str(tmp_path / "r.html"), title="t",
                             records_at=str(tmp_path))).read_text()  # fmt: skip
    flags_of(tmp_path, flagged=[0], clean=[])
    assert "had seen" not in page
    assert find_records(str(tmp_path)) == before


def test_damaged_samples_leave_the_rest_of_the_page_and_are_named(tmp_path: Path) -> None:
    records = series(tmp_path)
    [file] = (tmp_path / "run-a" / "step-100").rglob("samples.jsonl.gz")
    file.write_bytes(b"no gzip")
    page = Path(write_report(records, str(tmp_path / "r.html"), title="t", records_at=str(tmp_path))).read_text()
    assert "not split: Not a gzipped file" in page and "n = 80" in page


def run(*arguments: str) -> Any:
    result = invoke(list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_records_shows_and_exports_splits(tmp_path: Path) -> None:
    series(tmp_path)
    rows = json.loads(run("records", str(tmp_path), "--contamination", "--json"))
    assert [(row["step"], row["clean_n"], row["flagged_value"], row["not_scanned_n"]) for row in rows] == [
        (100, 80, 1.0, 10),
        (200, 80, 1.0, 10),
    ]
    exported = [json.loads(line) for line in run("records", str(tmp_path), "--contamination", "--format", "jsonl",
                                                 "--steps", "200").splitlines()]  # fmt: skip
    [row] = [line for line in exported if line]
    assert (row["clean_less_flagged"], row["value"]) == (pytest.approx(-0.75), 0.3)
    plain = json.loads(run("records", str(tmp_path), "--format", "jsonl", "--steps", "200"))
    assert plain["clean_value"] is None


def test_scan_of_a_training_configuration_flags_questions_of_records(tmp_path: Path) -> None:
    question = "Which of the seven bridges of the old town was built before the river changed its bed?"
    samples = [
        Sample(benchmark="demo_facts", id=str(number), prompt=text, output="", target="Eden", scores={"acc": 1.0})
        for number, text in enumerate([question, " ".join(reversed(question.split()))])
    ]
    publish(tmp_path / "e", make_record(metrics=(make_metric(value=1.0, n=2),), samples=2), samples)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"body": f"{question} Eden."}))
    component = {"source": {"train_urls": [str(tmp_path / "{texts,texts}.jsonl")]}, "format": {"text_key": "body"}}
    data = {"components": {"here": component, "hub": {"source": {"id": "o/d"}}}}
    config = {"training": {"train_config": {"data": data}}}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    search = json.loads(
        run("contamination", str(tmp_path / "e"), "--train-config", str(tmp_path / "train.yaml"), "--json")
    )
    assert (search["questions"], search["flagged"], search["words"]) == (2, 1, 18)
    assert search["not_read"] == ["hub: data set o/d of a hub; scan its files with --texts"]
    [row, *_] = json.loads(run("records", str(tmp_path / "e"), "--contamination", "--json"))
    assert (row["clean_n"], row["flagged_n"]) == (1, 1)


def test_training_texts_are_those_trained_on_in_each_of_levanters_formats(tmp_path: Path) -> None:
    def source(name: str) -> dict[str, Any]:
        return {"train_urls": [f"gs://b/{name}.jsonl"], "validation_urls": ["gs://b/v.jsonl"]}

    data = {
        "components": {
            "plain": {"source": source("plain")},
            "chat": {"source": source("chat"), "format": {"type": "chat"}},
            "pairs": {"source": source("pairs"), "format": {"type": "supervised", "target_key": "out"}},
            "both": {"children": {"one": {"source": source("one")}, "cache": {"cache_dir": "gs://b/cache"}}},
            "validated": {"source": source("validated")},
        },
        "train_weights": [[0, {"plain": 1.0, "both": 0.0}], [10, {"chat": 1, "pairs": 1, "both": 1, "validated": 0}]],
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data": data}, sort_keys=False))
    sources, not_read = training_texts(str(tmp_path / "c.yaml"))
    assert sources == [
        TextSource("gs://b/plain.jsonl", "text"),
        TextSource("gs://b/chat.jsonl", "messages"),
        TextSource("gs://b/pairs.jsonl", "input"),
        TextSource("gs://b/pairs.jsonl", "out"),
        TextSource("gs://b/one.jsonl", "text"),
    ]
    assert not_read == ["both/cache: no texts are named, only what was made of them"]
