"""Samples are written completely for any output of a model, and add to the harness's own files."""

from __future__ import annotations

import gzip
import hashlib
import math
from pathlib import Path

import pytest

from fakes.records import make_metric
from tasks.evaluators.evaluator import Parsed, with_samples
from tasks.records.details import BenchmarkDetails
from tasks.records.record import Counts, Metric
from tasks.records.samples import Sample, question_of, read_samples, write_samples


def test_sample_with_half_a_character_is_written_without_it(tmp_path: Path) -> None:
    # JSON from an endpoint can contain half a character, which would otherwise cost the record of the cell.
    sample = Sample(benchmark="b", id="1", prompt="?", output="so \ud83d", target=None, scores={"acc": 0.0})
    assert write_samples(tmp_path / "samples.jsonl.gz", [sample]) == 1
    [read] = read_samples(str(tmp_path / "samples.jsonl.gz"))
    assert (read.output, read.target) == ("so ?", None)


def test_sample_of_an_older_file_is_read_and_its_whole_prompt_is_what_was_asked(tmp_path: Path) -> None:
    old = '{"benchmark":"b","id":"1","prompt":"2 = 2. 1 =","output":"1","target":"1","scores":{}}\n'
    path = tmp_path / "samples.jsonl.gz"
    path.write_bytes(gzip.compress(old.encode()))
    [read] = read_samples(str(path))
    assert (read.choices, read.context, read.tokens, read.asked) == ((), "", None, "2 = 2. 1 =")
    now = read.model_copy(update={"context": "2 = 2. ", "prompt": "1 ="})
    assert question_of(now) == question_of(read)  # its prompt has the same digest, before and after


def _answer(number: int, score: float, *, finish: str | None = "stop", prompt: str = "?", **fields: object) -> Sample:
    known = {"benchmark": "b", "id": str(number), "prompt": prompt, "output": "!", "target": None}
    return Sample.model_validate({**known, "scores": {"acc": score}, "finish": finish, **fields})


def _outcome(folder: Path, samples: list[Sample], *metrics: Metric, **details: BenchmarkDetails) -> Parsed:
    folder.mkdir()
    counts = Counts(requested=len(samples), answered=len(samples), scored=len(samples))
    parsed = Parsed(metrics=metrics, counts=counts, versions={}, details=details)
    return with_samples(parsed, samples, folder / "samples.jsonl.gz")


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_score_over_completed_answers_is_given_next_to_the_full_score(tmp_path: Path, scale: float) -> None:
    samples = [_answer(n, float(n < 6), finish="length" if n >= 7 else "stop", truncated=n == 0) for n in range(10)]
    outcome = _outcome(tmp_path / "o", samples, make_metric("b", 0.6 * scale), make_metric("b", 0.9, name="f1"))
    details = outcome.details["b"]
    assert (details.questions, details.truncated, details.at_limit) == (10, 1, 3)
    assert details.finish_reasons == {"stop": 7, "length": 3}
    assert details.completed == {"acc": pytest.approx(scale * 6 / 7)}
    assert [metric.recomputed for metric in outcome.metrics] == [True, False]


def test_details_of_an_evaluator_are_kept_and_only_gaps_filled(tmp_path: Path) -> None:
    given = BenchmarkDetails(questions=4, truncated=2, finish_reasons={"stop": 8}, at_limit=0, prompts="d")
    outcome = _outcome(tmp_path / "o", [_answer(1, 1.0)], b=given)
    assert outcome.details == {"b": given}
    details = _outcome(tmp_path / "none", [_answer(1, 1.0, finish=None)]).details["b"]
    assert (details.finish_reasons, details.at_limit) == ({}, None), "no answer has an end"


def test_prompts_have_a_digest_that_changes_with_a_prompt_and_not_with_the_order(tmp_path: Path) -> None:
    asked = {
        name: _outcome(tmp_path / name, samples).details["b"]
        for name, samples in {
            "one": [_answer(1, 1.0, prompt="a"), _answer(2, 0.0, prompt="b")],
            "turned": [_answer(2, 1.0, prompt="b"), _answer(1, 1.0, prompt="a")],
            "other": [_answer(1, 1.0, prompt="a"), _answer(2, 0.0, prompt="c")],
        }.items()
    }
    assert asked["one"].prompts == asked["turned"].prompts != asked["other"].prompts
    assert asked["one"].completed == {}
    assert asked["one"].at_limit == 0


def test_values_that_follow_from_samples_or_parts_are_known_as_such(tmp_path: Path) -> None:
    # An edited value is then noticed, and a value that is not a mean is not taken for edited.
    texts = [
        _answer(n, 0.0, benchmark="t", ratios={"word_perplexity": (-20.0 * n, 10), "bits_per_byte": (-7.0, 40)})
        for n in (1, 2)
    ]
    outcome = _outcome(
        tmp_path / "o",
        [*texts, _answer(1, 1.0, benchmark="x"), _answer(1, 0.0, benchmark="y")],
        make_metric("t", math.exp(3.0), name="word_perplexity"),
        make_metric("t", 7 / 40 / math.log(2), name="bits_per_byte"),
        make_metric("x", 1.0),
        make_metric("y", 0.5),
        make_metric("g", 0.9).model_copy(update={"parts": {"x": 0.8, "y": 0.2}}),
        make_metric("h", 0.8).model_copy(update={"parts": {"x": 0.8, "y": 0.2}}),
    )
    assert [metric.recomputed for metric in outcome.metrics] == [True, True, True, False, True, False]
    content = (tmp_path / "o" / "samples.jsonl.gz").read_bytes()
    assert (outcome.samples, outcome.samples_digest) == (4, hashlib.sha256(content).hexdigest())
