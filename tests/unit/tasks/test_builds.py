"""Versions in records, changes between them, and qualifications of such changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.records import make_metric, make_qualification, make_record, publish
from tasks.records.builds import (
    Build,
    Qualification,
    Verdict,
    build_of,
    is_qualified,
    qualifications_of,
    qualified_steps,
    qualified_words,
    read_qualifications,
    unqualified_changes,
    write_qualification,
)
from tasks.records.details import BenchmarkDetails
from tasks.records.provenance import versions
from tasks.records.record import FoundRecord

HARNESS = "lm_evaluation_harness"


def build(lm_eval: str = "0.4.9", *, vllm: str | None = "0.22.0") -> Build:
    return Build(engine={"vllm": vllm} if vllm else {}, harness={"lm_eval": lm_eval})


def qualification(*steps: tuple[Build, Build, Verdict]) -> Qualification:
    qualifications = [make_qualification(before, after, verdict=verdict) for before, after, verdict in steps]
    return qualifications[0].model_copy(
        update={"benchmarks": tuple(part for made in qualifications for part in made.benchmarks)}
    )


def test_build_of_a_record_names_engine_harness_and_data_of_the_benchmark() -> None:
    record = make_record(
        metrics=(make_metric("group").model_copy(update={"parts": {"part": 1.0}}), make_metric("other")),
        details={"part": BenchmarkDetails(questions=3, data="abc"), "other": BenchmarkDetails(questions=3, data="def")},
        versions={**versions(), "lm_eval": "0.4.9", "judge": "a-model", "win_rate of x": "not reported"},
    )

    group_build = build_of(record, "group")

    assert group_build.engine == {"vllm": "0.22.0"}
    assert group_build.harness == {"lm_eval": "0.4.9"}
    assert group_build.data == {"part": "abc"}
    assert build_of(record).data == {"part": "abc", "other": "def"}
    assert build_of(make_record(served={"by": "endpoint", "base_url": "http://elsewhere/v1"})).engine == {}


def test_changes_of_builds_are_named_and_what_is_unknown_is_none() -> None:
    before = Build(
        engine={"vllm": "0.22.0", "packages": "aaa"}, harness={"lm_eval": "0.4.9", "packages": "ccc"}, data={"x": "1"}
    )
    after = Build(
        engine={"vllm": "0.23.0", "packages": "bbb"}, harness={"lm_eval": "0.4.9", "packages": "ddd", "torch": "2"}
    )

    assert before.changes(after) == ("engine vllm 0.22.0 → 0.23.0", "harness packages ccc → ddd")
    assert before.changes(after.model_copy(update={"data": {"x": "2"}, "method": "2"}))[2:] == (
        "data of x 1 → 2",
        "Assay's method 1 → 2",
    )


@pytest.mark.parametrize(
    ("steps", "before", "after", "expected"),
    [
        ((), build(), build(), True),
        ((), build(), build("0.4.13"), False),
        (((build(), build("0.4.13"), "identical"),), build(), build("0.4.13"), True),
        (((build(), build("0.4.13"), "within noise"),), build("0.4.13"), build(), True),
        (((build(), build("0.4.13"), "different"),), build(), build("0.4.13"), False),
        (
            ((build(), build("0.4.11"), "identical"), (build("0.4.13"), build("0.4.11"), "identical")),
            build(),
            build("0.4.13"),
            True,
        ),
        (  # another checkpoint was found to differ
            ((build(), build("0.4.13"), "identical"), (build("0.4.13"), build(), "different")),
            build(),
            build("0.4.13"),
            False,
        ),
        (  # evaluated at an endpoint with an unknown engine: no evidence about engines
            ((build(vllm=None), build("0.4.13", vllm=None), "identical"),),
            build(),
            build("0.4.13", vllm="0.23.0"),
            False,
        ),
        (((build(vllm=None), build("0.4.13", vllm=None), "identical"),), build(), build("0.4.13"), True),
    ],
)  # fmt: skip
def test_change_is_qualified_along_steps_that_made_no_difference(
    steps: tuple[tuple[Build, Build, Verdict], ...], before: Build, after: Build, expected: bool
) -> None:
    known = [qualification(*steps)] if steps else []

    assert is_qualified(before, after, known, evaluator=HARNESS, benchmark="demo_facts") is expected
    assert is_qualified(after, before, known, evaluator=HARNESS, benchmark="demo_facts") is expected
    for other in ({"evaluator": HARNESS, "benchmark": "other"}, {"evaluator": "helm", "benchmark": "demo_facts"}):
        assert is_qualified(before, after, known, **other) is (before == after)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ((0.1,), "qualified within noise: acc may differ by 0.1 at most (95 %)"),
        ((0.1, 0.03), "qualified within noise: acc may differ by 0.13 at most (95 %, the sum of 2 steps)"),
        ((0.1, None), "qualified within noise, but nothing bounds how far acc may differ"),
        ((), "qualified as identical"),
    ],
)
def test_bounds_of_verdicts_add_up_along_their_steps(bounds: tuple[float | None, ...], expected: str) -> None:
    names = [f"0.4.{number}" for number in range(len(bounds) + 2)]
    known = [
        make_qualification(build(earlier), build(other), bound=bound)
        for earlier, other, bound in zip(names, names[1:], bounds, strict=False)
    ]
    known.append(make_qualification(build(names[-2]), build(names[-1]), verdict="identical"))

    steps = qualified_steps(build(names[0]), build(names[-1]), known, evaluator=HARNESS, benchmark="demo_facts")

    assert steps is not None and len(steps) == len(bounds) + 1
    assert qualified_words(steps, "acc") == expected


def test_qualifications_of_the_same_moment_are_both_kept(tmp_path: Path) -> None:
    first = qualification((build(), build("0.4.13"), "identical"))
    second = qualification((build(), build("0.4.13"), "different"))

    assert read_qualifications(str(tmp_path)) == ()
    places = {write_qualification(str(tmp_path), written) for written in (first, second)}
    (tmp_path / "qualifications" / "verdicts" / "newer.json").write_text('{"schema_version": 2}')

    assert len(places) == 2
    qualifications = read_qualifications(str(tmp_path))
    assert qualifications in ((first, second), (second, first))


def test_changes_between_records_are_unqualified_until_a_verdict_exists(tmp_path: Path) -> None:
    before, after = (make_record(step=step, versions={"lm_eval": lm}) for step, lm in ((1, "0.4.9"), (2, "0.4.13")))
    records = [
        FoundRecord(publish(tmp_path / place, record), record) for place, record in (("a", before), ("b", after))
    ]

    def changes() -> tuple[str, ...]:
        return unqualified_changes(before, after, qualifications_of(records), benchmark="demo_facts")

    assert changes() == ("harness lm_eval 0.4.9 → 0.4.13",)
    write_qualification(str(tmp_path / "b"), qualification((build(), build("0.4.13"), "within noise")))
    assert changes() == ()
