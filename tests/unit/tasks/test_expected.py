"""Expected cost of evaluations before their start: measured, guessed or unknown, and refused above a limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes.records import make_metric, make_record, publish
from resources.regions.regions import Tariff
from tasks.errors import OverBudget
from tasks.evaluators.reading import TokensToAsk
from tasks.records.cost import Cost, Predicted, Spent, sum_of
from tasks.records.details import BenchmarkDetails
from tasks.records.index import indexed_records, note_record
from tasks.records.record import Counts, Record
from tasks.running.expected import Expectations, check_budget, together
from tasks.spec.evaluation import EvaluationConfig

SLICE = {"kind": "tpu", "variant": "v5litepod-8", "topology": None, "alternatives": ()}
TARIFF = Tariff(usd_per_hour=4.0, region="us-east5")


def evaluation_of(
    *names: str, limit: int | None = None, variant: str = "v5litepod-8", **others: Any
) -> EvaluationConfig:
    pool = {"model": {"name": "run-b"}, "resource_config": {"device": {"kind": "tpu", "variant": variant}}}
    evals = [{"name": name.partition(":")[0], "num_fewshot": int(name[-1]) if ":" in name else None} for name in names]
    content = {"model_path": "/runs/run-b", "evals": evals, "max_eval_instances": limit, "pool_config": pool}
    return EvaluationConfig.model_validate(content | others)


def measured(
    *names: str,
    questions: int = 100,
    tokens: tuple[int, int] = (50_000, 0),
    seconds: float = 100.0,
    device: dict[str, Any] = SLICE,
    limit: int | None = None,
    replayed: int = 0,
    **others: Any,
) -> Record:
    evals = [{"name": name.partition(":")[0], "num_fewshot": int(name[-1]) if ":" in name else None} for name in names]
    answered = questions * len(names)
    fresh = (answered - replayed) / answered
    return make_record(
        metrics=tuple(make_metric(name.partition(":")[0]) for name in names),
        evaluation={"evals": evals, "max_eval_instances": limit},
        details={name.partition(":")[0]: BenchmarkDetails(questions=questions) for name in names},
        counts=Counts(requested=answered, answered=answered, scored=answered),
        hardware={"device": device, "replicas": 2, "cpu": 32},
        cost=Cost(replica_seconds=seconds),
        chip_seconds=8 * seconds,
        seconds={"open": 5.0, "evaluate": seconds},
        requests={
            "answered": answered,
            "journal_hits": replayed,
            "prompt_tokens": int(tokens[0] * fresh),
            "completion_tokens": int(tokens[1] * fresh),
        },
        **others,
    )


def expectations(path: Path, *records: Record) -> Expectations:
    for record in records:
        note_record(str(path / record.checkpoint.run), publish(path, record), record)
    runs = {record.checkpoint.run for record in records if record.checkpoint.run == "run-b"}
    return Expectations(str(path), {run: indexed_records(str(path / run)) for run in runs})


def test_evaluation_that_was_measured_is_expected_to_take_its_median_at_the_price_of_now(tmp_path: Path):
    records = [
        measured("mmlu", seconds=seconds, run="run-b", step=step, evaluation_hash="h")
        for step, seconds in ((100, 80.0), (200, 90.0), (300, 500.0))
    ]
    expectation = expectations(tmp_path, *records).of(evaluation_of("mmlu"), ["h"], TARIFF)
    assert expectation is not None
    assert (expectation.how, expectation.seconds, expectation.chip_seconds) == ("measured", 95.0, 8 * 90.0)
    assert expectation.usd == pytest.approx(4.0 * 90 / 3600) and "3 records" in expectation.basis
    unpriced = expectations(tmp_path).of(evaluation_of("mmlu"), ["other"], Tariff(why_unknown="it has no price"))
    assert unpriced is None or unpriced.usd is None


def test_price_of_what_a_judge_elsewhere_compares_is_not_expected(tmp_path: Path):
    judge = {"base_url": "http://judge.test/v1", "model": "judge-70b"}
    record = measured("demo_facts", run="run-b", step=100, evaluation_hash="h")
    config = evaluation_of("demo_facts", evaluator={"name": "alpaca_eval", "judge": judge})
    expectation = expectations(tmp_path, record).of(config, ["h"], TARIFF)
    assert expectation is not None and expectation.usd is None and expectation.how == "measured"
    with pytest.raises(OverBudget, match="a judge elsewhere"):
        check_budget(together([expectation]), 100.0)


def test_evaluation_that_never_was_is_guessed_by_tokens_of_its_benchmark_and_the_rate_of_its_engine(tmp_path: Path):
    # Another model was evaluated with 100 questions of 500 tokens each on another slice; this slice processes 1,000
    # tokens a second.
    elsewhere = measured("mmlu", tokens=(50_000, 0), device={**SLICE, "variant": "v4-8"}, run="run-a")
    rate = measured("arc", tokens=(200_000, 0), seconds=200.0, run="run-c")
    slow = measured("gsm8k", tokens=(1_000, 20_000), seconds=900.0, run="run-c", step=200)  # answers are slow
    expectation = expectations(tmp_path, elsewhere, rate, slow).of(evaluation_of("mmlu", limit=40), ["new"], TARIFF)
    assert expectation is not None
    assert expectation.how == "guess" and expectation.seconds == pytest.approx(40 * 500 / 1000)
    assert expectation.chip_seconds == pytest.approx(8 * 20.0) and expectation.usd == pytest.approx(4.0 * 20 / 3600)
    assert expectation.basis == (
        "40 questions × 500 tokens (1 record of mmlu) ÷ 1,000 tokens/s (1 record on pool on v5litepod-8)"
    )


def test_guess_takes_the_rate_of_the_same_benchmark_where_it_was_asked_on_the_same_engine(tmp_path: Path):
    same = measured("mmlu:5", seconds=25.0, run="run-a")  # 2,000 tokens a second
    other = measured("arc", tokens=(200_000, 0), seconds=200.0, run="run-c")
    expectation = expectations(tmp_path, same, other).of(evaluation_of("mmlu:0"), ["new"], TARIFF)
    assert expectation is not None and expectation.seconds == pytest.approx(100 * 500 / 2000)


def test_guess_counts_tokens_that_the_journal_answered_and_no_rate_of_such_a_record(tmp_path: Path):
    replayed = measured("mmlu", seconds=1.0, replayed=80, run="run-a")
    rate = measured("arc", tokens=(200_000, 0), seconds=200.0, run="run-c")
    expectation = expectations(tmp_path, replayed, rate).of(evaluation_of("mmlu"), ["new"], TARIFF)
    assert expectation is not None and expectation.seconds == pytest.approx(100 * 500 / 1000)
    alone = expectations(tmp_path / "alone", replayed).of(evaluation_of("mmlu"), ["new"], TARIFF)
    assert alone is not None and alone.seconds == pytest.approx(100 * 500 / 10_000), "better than none"


def test_guess_of_several_benchmarks_is_their_sum_or_unknown(tmp_path: Path):
    known = expectations(tmp_path, measured("mmlu", run="run-a"), measured("arc", run="run-a", step=200))
    both = known.of(evaluation_of("mmlu", "arc"), ["new"], TARIFF)
    assert both is not None and both.seconds == pytest.approx(200.0)
    assert known.of(evaluation_of("mmlu", "never"), ["new"], TARIFF) is None


@pytest.mark.parametrize(
    ("config", "record"),
    [
        (evaluation_of("mmlu"), measured("arc")),
        (evaluation_of("mmlu", variant="v5p-8"), measured("mmlu")),
        (evaluation_of("mmlu"), measured("mmlu", limit=100)),
        (evaluation_of("mmlu", evaluator="helm"), measured("mmlu")),
        (evaluation_of("mmlu", pool_config=None, base_url="http://there/v1"), measured("mmlu")),
    ],
    ids=["benchmark", "engine", "number of questions", "harness", "endpoint of another owner"],
)
def test_nothing_is_expected_where_tokens_or_rate_were_never_measured(
    tmp_path: Path, config: EvaluationConfig, record: Record
):
    expectation = expectations(tmp_path, record).of(config, ["new"], TARIFF)
    assert expectation is None
    assert together([expectation]).lines() == ["expected for 1 cell: unknown: never measured"]


def test_benchmark_that_was_never_asked_is_guessed_by_its_plan_each_kind_at_its_own_rate(tmp_path: Path):
    # Prompts are scored at 1,000 tokens a second; answers are generated at 50, with 200 tokens each.
    weighed = measured("arc", tokens=(200_000, 0), seconds=200.0, run="run-a")
    written = measured("gsm8k", tokens=(30_000, 20_000), seconds=1000.0, run="run-a", step=200)
    known = expectations(tmp_path, weighed, written)
    choices = TokensToAsk(questions=50, generates=False, prompt_tokens=9_800, answer_tokens=200)
    texts = TokensToAsk(questions=10, generates=True, prompt_tokens=500, answer_tokens=10 * 512)
    config = evaluation_of("never", "neither")
    assert known.of(config, ["new"], TARIFF) is None
    expectation = known.of_tokens(config, [choices, texts], TARIFF)
    assert expectation is not None and expectation.how == "guess"
    assert expectation.seconds == pytest.approx(10_000 / 1000 + (500 + 10 * 200) / 50)
    assert expectation.chip_seconds == pytest.approx(8 * 60.0) and expectation.usd == pytest.approx(4.0 * 60 / 3600)
    assert expectation.basis == (
        "the plan's 9,800 tokens of prompts and 200 of answers ÷ 1,000 tokens/s (1 record on pool on v5litepod-8); "
        "the plan's 500 tokens of prompts and 2,000 of answers, 200 a question as there ÷ 50 tokens/s "
        "(1 record on pool on v5litepod-8)"
    )
    short = known.of_tokens(config, [texts.model_copy(update={"answer_tokens": 10 * 8})], TARIFF)
    assert (
        short is not None
        and short.seconds == pytest.approx((500 + 80) / 50)
        and "80 of answers, their limit" in short.basis
    )


def test_plan_gives_no_guess_where_the_engine_was_never_measured_at_such_a_benchmark(tmp_path: Path):
    known = expectations(tmp_path, measured("arc", run="run-a"))
    texts = TokensToAsk(questions=10, generates=True, prompt_tokens=500, answer_tokens=80)
    choices = texts.model_copy(update={"generates": False})
    assert known.of_tokens(evaluation_of("never"), [choices], TARIFF) is not None
    assert known.of_tokens(evaluation_of("never"), [choices, texts], TARIFF) is None
    assert known.of_tokens(evaluation_of("never", variant="v5p-8"), [choices], TARIFF) is None
    others = evaluation_of("never", pool_config=None, base_url="http://there/v1")
    assert known.of_tokens(others, [choices], TARIFF) is None


def test_limited_benchmark_is_guessed_for_more_questions_than_it_was_asked(tmp_path: Path):
    asked = expectations(tmp_path, measured("mmlu", limit=100))
    more, all_of_it = (asked.of(evaluation_of("mmlu", limit=limit), ["new"], TARIFF) for limit in (300, None))
    assert more is not None and more.seconds == pytest.approx(300.0)
    assert all_of_it is None, "the number of questions is unknown"
    whole = expectations(tmp_path / "whole", measured("mmlu", limit=200)).of(
        evaluation_of("mmlu", limit=300), ["new"], TARIFF
    )
    assert whole is not None and whole.seconds == pytest.approx(100.0), "there are no more than these"


def test_evaluator_that_counts_no_tokens_is_guessed_by_its_own_questions(tmp_path: Path):
    itself = {"by": "the evaluator itself"}
    record = measured("mmlu", tokens=(0, 0), evaluator="levanter_lm_evaluation_harness", served=itself)
    config = evaluation_of(
        "mmlu",
        limit=10,
        pool_config=None,
        evaluator="levanter_lm_evaluation_harness",
        resource_config={"device": {"kind": "tpu", "variant": "v5litepod-8"}},
    )
    expectation = expectations(tmp_path, record).of(config, ["new"], TARIFF)
    assert expectation is not None and (expectation.how, expectation.seconds) == ("guess", pytest.approx(10.0))


def guessed(usd: float | None, seconds: float = 60.0) -> Predicted:
    return Predicted(how="guess", basis="a record", seconds=seconds, chip_seconds=8 * seconds, usd=usd)


def test_expectation_of_several_cells_says_what_is_unknown_of_it_and_is_no_plain_sum():
    cells = [guessed(1.5), guessed(None), None]
    expected = together(cells, why_unpriced="this machine is in no region")
    assert expected.price == "at least 1.50 USD, 2 unknown"
    [line, basis] = expected.lines()
    assert "a guess (2 guess, 1 never measured)" in line and "this machine is in no region" in line
    assert basis == "  guess: a record"
    assert together([guessed(1.5), guessed(2.0)]).price == "3.50 USD"
    assert together([None, None]).as_dict()["usd"] is None and together([None]).price == "unknown"


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([guessed(1.5), guessed(1.0)], "2.50 USD expected for 2 cells"),
        ([guessed(2.5), None], "at least 2.50 USD, 1 unknown expected"),
        ([guessed(0.5), None], "at least 0.5 USD, 1 unknown for 2 cells: never measured; no cell was started"),
        ([guessed(None)], "unknown for 1 cell: a laptop"),
    ],
)
def test_evaluation_above_its_bound_or_of_unknown_price_is_refused(cells: list[Predicted | None], words: str):
    why = "a laptop" if len(cells) == 1 else None
    with pytest.raises(OverBudget) as refused:
        check_budget(together(cells, why_unpriced=why), 2.0)
    assert words in refused.value.found and refused.value.exit_code == 3
    check_budget(together(cells, why_unpriced=why), None)


def test_evaluation_within_its_bound_or_without_cells_passes():
    check_budget(together([guessed(1.0), guessed(1.0)]), 2.0)
    check_budget(together([]), 0.0)


def test_costs_with_unknown_parts_add_up_to_at_least_what_is_known():
    known, unknown = Cost(usd=1.25, replica_seconds=10.0), Cost(replica_seconds=10.0)
    judged = Cost(known_usd=0.5, replica_seconds=10.0)
    records = [make_record(cost=cost, chip_seconds=7200.0) for cost in (known, unknown, judged)]
    total = sum_of(record.spent for record in records)
    assert total.price == "at least 1.75 USD, 2 unknown" and total.chip_hours == "6.000"
    assert sum_of([records[0].spent] * 2).price == "2.50 USD"
    assert records[1].spent.price == make_record().spent.price == "unknown" and Spent().price == "0.00 USD"
    at_endpoint = make_record(served={"by": "endpoint"})
    assert (records[0].spent + at_endpoint.spent).chip_hours == "at least 2.000, 1 unknown"
