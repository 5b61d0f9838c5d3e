"""Reports: content of the table, the rows, the curves and the page."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import date, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from pydantic import ValidationError
from rich.console import Console

from fakes.records import FIRST, REASONS, make_metric, make_qualification, make_record, of_every_evaluator, publish
from resources.errors import RecordStatus
from resources.storage import storage
from tasks.records.builds import build_of
from tasks.records.cost import Cost, Predicted, Spent
from tasks.records.details import Asking, BenchmarkDetails
from tasks.records.numbers import margin, measured
from tasks.records.record import Record
from tasks.records.samples import SAMPLES_NAME, Sample
from tasks.reports.charts import chart_of, wavering
from tasks.reports.page import curves_svg, render_report, results_rows, results_table, write_report
from tasks.reports.table import Results
from tasks.verdicts.alert_files import acknowledge
from tasks.verdicts.alerts import alerts_in

SVG = "{http://www.w3.org/2000/svg}"

HOSTILE = '_$x_1$"><img src=x onerror=alert(1)><script>alert(1)&amp;'


def both(step: int, status: RecordStatus = "succeeded", *, facts: float = 0.5, run: str = "run-a") -> Record:
    metrics = (
        make_metric("demo_facts", facts, stderr=0.03),
        make_metric("demo_backwards", 0.25, name="exact_match", stderr=0.02, n=100),
    )
    return make_record(step=step, status=status, metrics=metrics, run=run)


def point(step: int, value: float = 0.5, *, status: RecordStatus = "succeeded", stderr: float | None = 0.03) -> Record:
    return make_record(step=step, status=status, metrics=(make_metric(value=value, stderr=stderr),))


def in_terminal(records: Sequence[Record], **options: Any) -> list[str]:
    console = Console(width=80, file=io.StringIO())
    console.print(results_table(records, **options))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def verdicts(records: Sequence[Record]) -> list[str]:
    results = Results(records)
    return [change.verdict for column in results.columns for change in results.changes(column)]


def test_rows_of_a_succeeded_and_a_withheld_checkpoint_tell_numbers_and_reason() -> None:
    rows = results_rows([both(200, "withheld"), both(100, facts=0.75)])

    assert [(row["step"], row["benchmark"], row["metric"], row["value"], row["stderr"], row["n"]) for row in rows] == [
        (100, "demo_facts", "acc", 0.75, 0.03, 120),
        (100, "demo_backwards", "exact_match", 0.25, 0.02, 100),
        (200, "demo_facts", "acc", None, None, None),
        (200, "demo_backwards", "exact_match", None, None, None),
    ]
    assert [row["status"] for row in rows] == ["succeeded"] * 2 + ["withheld"] * 2
    assert rows[2]["reason"] == REASONS["withheld"]


def test_table_of_two_benchmarks_fits_eighty_characters_and_shows_statuses() -> None:
    lines = in_terminal([both(100), both(200, "withheld"), both(300, "failed"), both(400, "infra_failed")])

    row = {line.split()[0]: line for line in lines if line.split()}
    assert "0.500 ± 0.030" in row["100"] and "0.250 ± 0.020" in row["100"]
    assert row["200"].split() == ["200", "withheld", "withheld"]
    assert row["300"].split() == ["300", "failed", "failed"]
    assert row["400"].split() == ["400", "infra_failed", "infra_failed"]
    assert any("n = 120" in line and "n = 100" in line for line in lines)
    assert not any("…" in line for line in lines)


def test_table_of_many_metrics_lists_a_metric_per_line_uncut() -> None:
    names = ("mmlu", "arc_challenge", "hellaswag", "winogrande", "truthfulqa_mc2", "gsm8k")
    lines = in_terminal([make_record(metrics=tuple(make_metric(name, n=14_042) for name in names))])

    for name in names:
        assert any(name in line and "0.500 ± 0.040" in line and "14,042" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_table_of_several_runs_names_each_run() -> None:
    lines = in_terminal([both(100, run="one"), both(200, run="one"), both(100, run="two")])

    assert sum("one" in line for line in lines) == 1
    assert sum("two" in line for line in lines) == 1


def test_only_the_newest_record_of_a_cell_counts() -> None:
    old = make_record(metrics=(make_metric(value=0.1),), created=FIRST)
    new = make_record(metrics=(make_metric(value=0.9),), created=FIRST + timedelta(hours=1))

    assert [row["value"] for row in results_rows([new, old])] == [0.9]
    assert "1 older record of" in render_report([new, old], title="t")


def test_benchmark_in_two_cells_shows_the_successful_cell() -> None:
    alone = make_record(metrics=(make_metric(value=0.7),), created=FIRST)
    together = make_record(
        status="failed", metrics=(), benchmarks=("demo_facts", "other"), created=FIRST + timedelta(hours=1)
    )

    shown = {row["benchmark"]: (row["value"], row["status"]) for row in results_rows([alone, together])}

    assert shown == {"demo_facts": (0.7, "succeeded"), "other": (None, "failed")}


def test_parts_of_a_benchmark_stay_out_of_the_terminal_but_not_out_of_the_page() -> None:
    metrics = (make_metric("mmlu"), make_metric("mmlu_anatomy", 0.321))
    records = [
        make_record(metrics=metrics, benchmarks=("mmlu",)),
        make_record(step=200, status="failed", metrics=(), benchmarks=("mmlu",)),
    ]

    assert not any("mmlu_anatomy" in line for line in in_terminal(records))
    assert "mmlu_anatomy" in render_report(records, title="t")
    failed = [row for row in results_rows(records) if row["status"] == "failed"]
    assert [row["benchmark"] for row in failed] == ["mmlu", "mmlu_anatomy"]


@pytest.mark.parametrize(
    ("first", "last", "stderr", "higher_is_better", "verdict"),
    [
        (0.2, 0.6, 0.03, True, "better"),
        (0.6, 0.2, 0.03, True, "worse"),
        (9.0, 3.0, 0.03, False, "better"),
        (9.0, 3.0, 0.03, None, "changed"),
        (0.50, 0.55, 0.03, True, "no clear change"),
        (0.2, 0.6, None, True, "no standard error"),
    ],
)
def test_change_over_training_is_judged_by_its_uncertainty(
    first: float, last: float, stderr: float | None, higher_is_better: bool | None, verdict: str
) -> None:
    records = [
        make_record(step=step, metrics=(make_metric(value=value, stderr=stderr, higher_is_better=higher_is_better),))
        for step, value in ((100, first), (200, last))
    ]

    assert verdicts(records) == [verdict]


def test_change_skips_what_did_not_succeed_and_needs_two_numbers() -> None:
    assert verdicts([point(100)]) == []
    assert verdicts([point(100, 0.1), point(200, 0.9, status="withheld")]) == []
    assert verdicts([point(100, 0.1), point(200, status="failed"), point(300, 0.9)]) == ["better"]


def test_curves_of_the_same_records_are_the_same_bytes() -> None:
    records = [both(100), both(200, "withheld"), both(300)]

    pictures, pages = set[str](), set[str]()
    for given in (records, list(reversed(records))):
        pictures.add(curves_svg(given))
        pages.add(render_report(records, title="t"))
    assert len(pictures) == len(pages) == 1


def test_curves_say_what_the_bars_are() -> None:
    assert any("95 % interval" in text for text in "\n".join(texts(curves_svg([point(100), point(200)]))).splitlines())
    assert not any("95 %" in text for text in texts(curves_svg([point(100, stderr=None)])))


def strokes(svg: str) -> list[str]:
    """Returns the segments of the thick line of the first series."""
    lines = [
        element.get("d", "")
        for element in ElementTree.fromstring(svg).iter(f"{SVG}path")
        if "--series-0" in element.get("style", "") and "stroke-width: 2" in element.get("style", "")
    ]
    return [stretch for line in lines for stretch in line.split("M")[1:] if "L" in stretch and "z" not in stretch]


def test_curve_is_broken_where_a_checkpoint_has_no_number() -> None:
    whole = curves_svg([point(step) for step in (100, 200, 300, 400, 500)])
    broken = curves_svg(
        [point(step, status="withheld" if step == 300 else "succeeded") for step in range(100, 600, 100)]
    )

    assert len(strokes(whole)) == 1
    assert len(strokes(broken)) == 2
    assert not any("withheld" in text for text in texts(whole))
    assert any("withheld" in text for text in texts(broken))


@pytest.mark.parametrize(
    "records", [[], [point(0)], [point(300)], [point(100, status="failed")], [point(1, float("inf"))]]
)
def test_curves_of_hardly_anything_are_still_a_picture(records: list[Record]) -> None:
    assert texts(curves_svg(records))


def test_curve_of_zeros_has_an_axis_that_can_be_read() -> None:
    shown = texts(curves_svg([point(100, 0.0, stderr=None), point(200, 0.0, stderr=None)]))
    assert {"−0.04", "−0.02", "0.00", "0.02", "0.04"} <= set(shown)


def test_curves_over_growing_steps_label_every_true_step() -> None:
    shown = texts(curves_svg([point(1000 * 2**power) for power in range(9)]))

    assert [text for text in shown if text.endswith("k")] == [f"{2**power}k" for power in range(9)]
    assert any("log" in text for text in shown)
    assert not any("log" in text for text in texts(curves_svg([point(step) for step in range(1000, 51_000, 1000)])))


def test_curves_of_several_runs_share_a_chart_with_a_legend() -> None:
    shown = texts(curves_svg([both(step, run=run) for run in ("run-a", "run-b") for step in (100, 200)]))

    assert shown.count("demo_facts · acc") == 1
    assert shown.count("run-a") == shown.count("run-b") == 2  # once per chart, and there are two


def test_run_keeps_its_colour_in_a_chart_where_another_run_is_missing() -> None:
    records = [both(step, run="a") for step in (100, 200)]
    records += [make_record(step=step, run="b", metrics=(make_metric("only_b"),)) for step in (100, 200)]

    only_b = render_report(records, title="t").split('class="chart"')[-1]

    assert "var(--series-1" in only_b and "var(--series-0," not in only_b


def hostile_in_each_field(value: Any) -> Iterator[Any]:
    """Yields copies of the value, each with a different text replaced by markup that would run in a page."""
    if isinstance(value, str):
        yield HOSTILE
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from ({**value, key: other} for other in hostile_in_each_field(part))
            yield {**{name: each for name, each in value.items() if name != key}, f"{key}{HOSTILE}": part}
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from ([*value[:index], other, *value[index + 1 :]] for other in hostile_in_each_field(part))


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen |= {tag, *(name for name, _ in attrs)}


def runs_something(page: str) -> set[str]:
    """Returns tags and attributes of a page that would run a script."""
    tags = _Tags()
    tags.feed(page)
    return {name for name in tags.seen if name in ("script", "img") or name.startswith("on")}


def test_script_in_any_field_of_a_record_is_text() -> None:
    records: list[Record] = []
    for good in (both(0), both(0, "withheld")):
        for dumped in hostile_in_each_field(good.model_dump(mode="json")):
            with suppress(ValidationError):  # such a record is not read
                record = Record.model_validate(dumped)
                at_its_step = record.checkpoint.model_copy(update={"step": len(records)})
                records.append(record.model_copy(update={"checkpoint": at_its_step}))
    page = render_report(records, title=HOSTILE)
    assert len(records) > 80 and page.count("&lt;script&gt;") > 20
    assert not runs_something(page)
    assert runs_something(f"<p>{HOSTILE}") == {"script", "img", "onerror"}
    named = [make_record(step=step, run=run) for run in (HOSTILE, "b") for step in (100, 200)]
    assert HOSTILE[:21] in " ".join(texts(curves_svg(named)))


def test_page_refers_to_nothing_outside_and_has_no_id_twice() -> None:
    page = render_report([both(100), both(200, "withheld"), both(300)], title="t")

    assert not re.search(r"""(?:src|href|action|data)\s*=\s*["']?\s*(?:https?:|//|file:)""", page)
    assert not re.search(r"url\(\s*[\"']?(?!#)|@import|<script|<link (?!rel=\"icon\" href=\"data:,\")", page)
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', page)) <= set(ids)


def test_page_tells_where_numbers_come_from_and_what_did_not_succeed() -> None:
    page = render_report([both(100), both(200, "withheld"), both(300, "infra_failed")], title="Nightly")

    good = both(100)
    for expected in (
        "<h1>Nightly</h1>",
        "1 of 3 cells succeeded, 1 withheld, 1 infra_failed",
        good.checkpoint.digest,
        good.evaluation_hash,
        "4b825dc642cb with uncommitted changes",
        "vllm 0.22.0",
        "max_model_len 512",
        "device cpu",
        "reload in 0.31 s",
        "240 = 240 = 240",
        "240 ≠ 238 = 238",
        "118 answers",
        "out of memory",
        "Seconds by phase",
    ):
        assert expected in page, expected
    assert len(re.findall(r'<svg class="chart" role="img" aria-label="[^"]+"', page)) == 2


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"max_eval_instances": 20}, ("all questions", "limit 20")),
        ({"evals": [{"name": "demo_facts", "num_fewshot": 5, "task_alias": None}]}, ("its own shots", "5-shot")),
        ({"apply_chat_template": True}, ("no chat", "chat")),
        ({"seed": 7}, ("settings 5f0c2a7b", "settings another")),
    ],
)
def test_other_settings_are_a_series_of_their_own_named_after_what_differs(
    changed: dict[str, Any], names: tuple[str, str]
) -> None:
    # A single curve and a single row in either order: a newer record with other settings hides no older record.
    evaluation = {**make_record().evaluation, **changed}
    other = {"evaluation": evaluation, "evaluation_hash": "another"}
    older = make_record(step=200, metrics=(make_metric(value=0.9),), created=FIRST - timedelta(days=1), **other)
    records = [point(100), point(200), older]

    results = Results(records)

    assert [column.label for column in results.columns] == [f"demo_facts · acc ({name})" for name in names]
    assert [[metric.value for metric in results.metrics(column)] for column in results.columns] == [[0.5, 0.5], [0.9]]
    assert {(row["step"], row["settings"], row["value"]) for row in results_rows(records)} == {
        (100, names[0], 0.5),
        (200, names[0], 0.5),
        (200, names[1], 0.9),
    }
    assert {f"demo_facts · acc ({name})" for name in names} <= set(texts(curves_svg(records)))
    page = render_report(records, title="t")
    assert "asked with several settings" in page
    assert "asked with several settings" not in render_report([point(100), point(200)], title="t")
    assert all(names[1].split()[0] in "\n".join(in_terminal(given)) for given in (records, records[::-1]))


def test_failure_with_other_settings_is_left_out_once_there_is_a_number() -> None:
    failed = make_record(status="failed", evaluation_hash="too long a context", created=FIRST)
    assert [row["value"] for row in results_rows([failed, point(100)])] == [0.5]
    assert [row["status"] for row in results_rows([failed])] == ["failed"]


def test_benchmark_with_the_same_name_by_two_evaluators_has_two_columns() -> None:
    records = [
        make_record(step=step, evaluator=evaluator, metrics=(make_metric("shared", value),))
        for step in (100, 200)
        for evaluator, value in (("lm_evaluation_harness", 0.1), ("levanter_lm_evaluation_harness", 0.9))
    ]

    results = Results(records)
    values = {(row["evaluator"], row["step"]): row["value"] for row in results_rows(records)}
    lines = "\n".join(in_terminal(records))

    assert [[metric.value for metric in results.metrics(column)] for column in results.columns] == [
        [0.1] * 2,
        [0.9] * 2,
    ]
    assert values[("lm_evaluation_harness", 100)] == 0.1 and values[("levanter_lm_evaluation_harness", 100)] == 0.9
    assert "lm-eval" in lines and "Levanter" in lines
    assert {"lm-eval: shared · acc", "Levanter: shared · acc"} <= set(texts(curves_svg(records)))


def test_page_of_every_evaluator_groups_numbers_and_tells_judges_counts_and_sinks() -> None:
    page = render_report(of_every_evaluator(), title="All")

    for expected in (
        "by lm-eval, HELM, AlpacaEval, Levanter",
        '<th scope="colgroup" class="group" colspan="2">HELM</th>',
        "judge-70b at http://127.0.0.1:8123/v1, asked as demo_judge",
        "the checkpoint itself in the same pool",
        "4 without a usable verdict of the judge",
        "8 left out, since their prompts are too long",
        "20 asked with prompts that were cut to fit",
        "± 6.10",
        "wandb:team/evaluations",
        "storage.objects.create is missing",
        "no engine and no proxy in between",
    ):
        assert expected in page, expected
    assert "How to read" in page and not re.search(r"""href=["'](?:https?:|file:|//)""", page)


def test_page_warns_of_other_hashes_of_a_metric_not_between_evaluators() -> None:
    page = render_report(of_every_evaluator(), title="All")
    warning = page[page.index('class="warning"') :].split("</p>")[0]

    assert "demo_instructions · win_rate" in warning
    assert "demo_mcqa" not in warning and "demo_facts" not in warning


@pytest.mark.parametrize("page", ["evaluations/run-a/report.html", "report.html", "elsewhere/deep/report.html"])
def test_page_links_to_harness_files_in_any_place(tmp_path: Path, page: str) -> None:
    record = make_record(evaluator="helm", cell="demo_mcqa-5%-a b", links={"Site": "attempt-1/site/index.html"})
    cell = Path(publish(tmp_path / "evaluations", record))
    (cell / "attempt-1" / "site").mkdir(parents=True)
    (cell / "attempt-1" / "site" / "index.html").write_text("the site")

    uri = write_report([record], str(tmp_path / page), title="t", records_at=str(tmp_path / "evaluations"))

    [address] = re.findall(r'<a href="([^"#]+)">run-a-100: Site</a>', Path(uri).read_text())
    assert (Path(uri).parent / unquote(address)).read_text() == "the site"


def test_page_links_within_a_single_store_only(tmp_path: Path) -> None:
    record = make_record(evaluator="helm", links={"Site": "attempt-1/index.html"})
    below = f"run-a/step-100/helm/{record.cell}/attempt-1/index.html"

    def page(at: str, records_at: str | None) -> str:
        return render_report([record], title="t", page=at, records_at=records_at)

    assert f'href="../e/{below}"' in page("gs://bucket/pages/report.html", "gs://bucket/e")
    for at, records_at in ((str(tmp_path / "r.html"), "gs://bucket/e"), ("gs://other/r.html", "gs://bucket/e")):
        assert (
            "index.html</code>" in page(at, records_at) and "<a href=" not in page(at, records_at).split("<footer")[0]
        )
    assert "index.html</code>" in page("report.html", None)


def test_results_of_ten_thousand_records_are_not_looked_up_singly() -> None:
    first = make_record()
    records = [
        first.model_copy(
            update={"checkpoint": first.checkpoint.model_copy(update={"step": step, "name": f"run-a-{step}"})}
        )
        for step in range(10_000)
    ]

    assert len(results_rows(records)) == 10_000


def test_page_and_table_without_records_say_so() -> None:
    assert "no records yet" in render_report([], title="t")
    assert "No records yet" in "\n".join(in_terminal([]))


def test_report_is_left_alone_only_while_it_is_what_its_records_make(tmp_path: Path) -> None:
    page = tmp_path / "deeper" / "report.html"

    def written(*records: Record, title: str = "t") -> bool:
        os.utime(page, (0, 0)) if page.exists() else None
        write_report(records, str(page), title=title)
        return page.stat().st_mtime > 0

    first, changed = make_record(step=100), make_record(step=100, status="withheld")
    assert written(first) and not written(first)
    assert page.read_text() == render_report([first], title="t")
    assert written(changed), "a record has changed"
    assert written(first) and written(first, title="another")
    whole = page.read_bytes()
    for damaged in (whole[:-300], whole + b" ", b""):
        page.write_bytes(damaged)
        assert written(first, title="another"), "it is not what was written"
        assert page.read_bytes() == whole


def test_checkpoints_with_the_same_name_elsewhere_are_shown_apart() -> None:
    places = {"/runs/exp1": 0.25, "/runs/exp2": 0.75}
    records = [
        make_record(run="final", step=0, place=place, metrics=(make_metric(value=value),))
        for place, value in places.items()
    ]
    rows = results_rows(records)
    assert [(row["run"], row["value"]) for row in rows] == [("final (exp1/final)", 0.25), ("final (exp2/final)", 0.75)]
    assert [row["checkpoint"] for row in rows] == ["final (exp1/final)-0", "final (exp2/final)-0"]
    page = render_report(records, title="t")
    assert "0.250" in page and "0.750" in page and "final (exp1/final)" in page
    assert any("exp1/final" in line for line in in_terminal(records))


def shared(value: float, *, low: float, high: float, n: int = 100, **fields: Any) -> Record:
    metric = make_metric(value=value, stderr=0.0, n=n).model_copy(update={"low": low, "high": high})
    return make_record(metrics=(metric,), **fields)


def test_none_of_a_hundred_is_shown_with_its_interval_everywhere() -> None:
    records = [shared(0.0, low=0.0, high=0.0362, step=100), shared(0.02, low=0.0055, high=0.07, step=200)]

    lines = "\n".join(in_terminal(records))
    page = render_report(records, title="t")
    [chart] = [chart_of(Results(records), column) for column in Results(records).columns]

    assert "0.000 [0.000, 0.036]" in lines and "value [95 % interval]" in lines
    assert "0.000 ± 0.000" not in lines + page and "[0.000, 0.036]" in page
    assert [point.interval for point in chart.curves[0].points] == [(0.0, 0.0362), (0.0055, 0.07)]
    assert {(row["low"], row["high"]) for row in results_rows(records)} == {(0.0, 0.0362), (0.0055, 0.07)}


def test_older_record_without_an_interval_claims_no_certainty() -> None:
    # A standard error of zero over few questions is no evidence, nor is it for a change.
    records = [point(100, 1.0, stderr=0.0), point(200, 0.0, stderr=0.0)]
    assert "± 0.000" not in "\n".join(in_terminal(records)) + render_report(records, title="t")
    assert verdicts(records) == ["no standard error"]


def test_change_of_two_shares_is_judged_by_both_intervals() -> None:
    far = [shared(1.0, low=0.96, high=1.0, step=100), shared(0.0, low=0.0, high=0.04, step=200)]
    near = [shared(1.0, low=0.57, high=1.0, n=5, step=100), shared(0.8, low=0.38, high=0.96, n=5, step=200)]
    assert verdicts(far) == ["worse"]
    assert verdicts(near) == ["no clear change"]


NOTICED = BenchmarkDetails(
    questions=120, truncated=12, at_limit=37, completed={"acc": 0.956}, notes=("a question \\b less",)
)


def test_table_and_page_say_what_was_cut_at_the_limit_and_completed() -> None:
    few = NOTICED.model_copy(update={"truncated": 3, "at_limit": 0, "completed": {}, "notes": ()})
    records = [
        make_record(step=100, metrics=(make_metric(value=0.693),), details={"demo_facts": NOTICED}),
        make_record(step=200, metrics=(make_metric(value=0.9),), details={"demo_facts": few}),
        make_record(step=300, metrics=(make_metric(value=0.9),)),
    ]

    lines = in_terminal(records)
    row = {line.split()[0]: line for line in lines if line.split()}
    notes = " ".join(" ".join(lines).split())

    assert max(map(len, lines)) <= 80
    assert row["100"].endswith("*") and row["200"].endswith("*") and not row["300"].endswith("*")
    assert "* demo_facts: 12 prompts cut of 120 at run-a-100, fewer at 1 other checkpoint" in notes
    assert "* demo_facts: 37 at the length limit of 120 at run-a-100" in notes
    assert "* demo_facts · acc: over completed answers 0.956, over all 0.693 at run-a-100" in notes
    assert "* demo_facts: a question \\b less" in notes
    page = render_report(records, title="t")
    assert "37 at the length limit" in page and "0.956 over the completed" in page and "12 prompts cut" in page
    assert results_rows(records)[0]["remarks"] == [
        "12 prompts cut",
        "37 at the length limit",
        "0.956 over the completed",
    ]


def test_number_of_a_group_is_marked_for_its_parts() -> None:
    group = make_metric("mmlu", 0.5).model_copy(update={"parts": {"x": 0.5, "y": 0.5}})
    records = [make_record(metrics=(group,), benchmarks=("mmlu",), details={"x": NOTICED, "y": NOTICED})]
    assert results_rows(records)[0]["remarks"][:2] == ["24 prompts cut", "74 at the length limit"]


def test_record_that_was_changed_is_marked_in_table_page_and_rows() -> None:
    records = [point(100), point(200)]
    records[1] = records[1].model_copy(update={"metrics": (make_metric(value=0.965),)})

    lines = in_terminal(records)

    assert any("0.965" in line and line.endswith("!") for line in lines)
    assert "! run-a-200, demo_facts: record.json was changed" in " ".join(" ".join(lines).split())
    page = render_report(records, title="t")
    assert '<span class="badge failed" title="see the notes below">changed</span>' in page
    assert [row["integrity"] for row in results_rows(records)] == ["intact", "changed"]


def versioned(step: int, lm_eval: str, value: float = 0.5) -> Record:
    metrics = (make_metric(value=value),)
    return make_record(step=step, metrics=metrics, versions={**make_record().versions, "lm_eval": lm_eval})


@pytest.mark.parametrize("qualified", [False, True])
def test_change_of_versions_inside_a_series_is_marked_and_breaks_the_line_unless_qualified(qualified: bool) -> None:
    records = [*(versioned(step, "0.4.9") for step in (100, 200)), *(versioned(s, "0.4.13", 0.9) for s in (300, 400))]
    qualification = make_qualification(build_of(records[0]), build_of(records[-1]), verdict="identical")
    given = [qualification] if qualified else []

    lines = in_terminal(records, qualifications=given)
    notes = " ".join(" ".join(lines).split())
    picture = curves_svg(records, qualifications=given)
    page = render_report(records, title="t", qualifications=given)
    results = Results(records, qualifications=given)

    assert [line.endswith("*") for line in lines if "±" in line and "[" not in line and "value" not in line] == [
        False,
        False,
        True,
        False,
    ]
    words = "demo_facts from run-a step 300: harness lm_eval 0.4.9 → 0.4.13"
    assert f"{words} ({'qualified as identical' if qualified else 'not qualified, so the line is broken'}" in notes
    assert words in page and any("other versions from here" in text for text in texts(picture))
    assert len(strokes(picture)) == (1 if qualified else 2)
    assert [c.verdict for c in results.changes(results.columns[0])] == ["better" if qualified else "other versions"]


def test_page_tells_how_questions_were_put_and_on_which_device() -> None:
    asking = Asking(seeds={"few-shot": 1234}, bos="the tokenizer's own rule: none", chat_template="c0ffee" * 8)
    details = {"demo_facts": BenchmarkDetails(questions=120, data="abcdef0123456789", control="passed")}
    good = make_record()
    record = make_record(asking=asking, details=details, served={**good.served, "device": "NVIDIA H100 80GB HBM3"})
    page = render_report([record], title="t")
    for expected in (
        "seeds few-shot 1234",
        "first token the tokenizer&#39;s own rule: none",
        "chat template c0ffeec0ffee",
        "data demo_facts abcdef012345",
        "known answers demo_facts passed",
        "engine on NVIDIA H100 80GB HBM3",
        "as written",
    ):
        assert expected in page, expected


# Both noises, and alerts


def wavering_run(*, checkpoints: int = 20, fallen: int = 0, run: str = "run-a") -> list[tuple[Record, list[Sample]]]:
    """Returns a run with 60 % of 200 questions right, fewer at the last checkpoints; each question has its own text."""
    evaluated = []
    for number in range(checkpoints):
        lost = 60 if number >= checkpoints - fallen else number % 3
        right = [float(question < 120 - lost) for question in range(200)]
        metric = make_metric(value=sum(right) / 200, stderr=0.035, n=200)
        samples = [
            Sample(
                benchmark="demo_facts",
                id=f"q{question:03}",
                prompt=f"Examples\n\n{HOSTILE} {question}?\nAnswer:",
                output="A",
                target="B",
                scores={"acc": score},
            )
            for question, score in enumerate(right)
        ]
        evaluated.append((make_record(step=100 * (number + 1), metrics=(metric,), run=run), samples))
    return evaluated


def published(folder: Path, run: list[tuple[Record, list[Sample]]]) -> str:
    for record, samples in run:
        publish(folder, record, samples)
    return render_report([record for record, _ in run], title="run-a", records_at=str(folder))


def test_page_shows_an_alert_with_what_was_expected_and_the_questions_that_were_lost(tmp_path: Path) -> None:
    page = published(tmp_path, wavering_run(fallen=2))

    section = page[page.index('id="alerts"') : page.index('id="curves"')]
    assert "Expected 0.5" in section and "found 0.300" in section and ">open<" in section
    assert "step 1,900" in section and "of questions ± 0.035 (standard error), of training ± 0.00" in section
    lost = re.search(r"(\d+) questions of 200 lost since step 1,800, 0 won", section)
    assert lost is not None and 58 <= int(lost[1]) <= 60
    assert len(re.findall(r"<code>q\d{3}</code>", section)) == 20 and f"And {int(lost[1]) - 20} more" in section
    assert "<script>" not in section and "&lt;script&gt;alert(1)" in section and "Examples" not in section
    assert ">alert</text>" in page


@pytest.mark.parametrize("fallen", [0, 2])
def test_page_reads_samples_only_for_an_alert_and_tells_if_they_are_damaged(tmp_path: Path, fallen: int) -> None:
    run = wavering_run(fallen=fallen)
    for record, _ in run:
        folder = Path(publish(tmp_path, record)) / record.attempt
        folder.mkdir(exist_ok=True)
        (folder / SAMPLES_NAME).write_bytes(b"damaged")

    page = render_report([record for record, _ in run], title="run-a", records_at=str(tmp_path))

    for words in ('id="alerts"', ">alert</text>", "Which questions were lost is not known"):
        assert (words in page) is bool(fallen)


def test_curves_have_both_bars_and_the_mean_of_the_last_checkpoints() -> None:
    records = [record for record, _ in wavering_run()]
    [chart] = [chart_of(Results(records), column) for column in Results(records).columns]

    [curve] = chart.curves
    assert "thin: of questions and training" in chart.note
    for point in curve.points:
        assert point.interval is not None and point.outer is not None
        assert point.outer[0] < point.interval[0] < point.interval[1] < point.outer[1]
    assert [point.mean is not None for point in curve.points] == [False] * 4 + [True] * 16
    assert "mean score of the last 5 checkpoints, 95 %" in texts(curves_svg(records))


def test_noise_of_a_run_with_few_checkpoints_is_that_of_its_siblings() -> None:
    long, short = wavering_run(), wavering_run(checkpoints=3, run="run-b")
    records = [record for record, _ in long + short]
    [column] = Results(records).columns

    by_run = wavering(Results(records), column)

    assert (by_run["run-a"].siblings, by_run["run-b"].siblings) == (False, True)
    assert by_run["run-a"].noise == by_run["run-b"].noise
    assert not wavering(Results([record for record, _ in short]), column)


def test_table_names_alerts_and_the_noise_of_training() -> None:
    lines = " ".join(in_terminal([record for record, _ in wavering_run(fallen=2)]))

    assert "Alert: demo_facts · acc of run-a at step 1,900: expected 0.5" in lines
    assert "From checkpoint to checkpoint" not in lines and "mean of the last 5" not in lines, "it falls"
    lines = " ".join(in_terminal([record for record, _ in wavering_run()]))
    assert "(means: ± standard error): demo_facts · acc ± 0.0" in lines and "mean of the last 5 0.59" in lines


def test_written_page_names_the_person_that_acknowledged_an_alert(tmp_path: Path) -> None:
    records = [record for record, _ in wavering_run(fallen=2)]
    place, page = str(tmp_path / "evaluations"), tmp_path / "report.html"
    write_report(records, str(page), title="t", records_at=place)
    before = page.read_text()
    [alert] = alerts_in(records)

    acknowledge(storage.join(place, "run-a"), alert, note="<b>known</b>")
    write_report(records, str(page), title="t", records_at=place)

    assert ">open<" in before and ">open<" not in page.read_text()
    assert re.search(r"acknowledged by [^<]*: &lt;b&gt;known&lt;/b&gt;", page.read_text())
    assert ">alert, acknowledged</text>" in page.read_text()
    assert "it is not known where their samples lie" in render_report(records, title="t")


def test_report_says_what_it_cost_against_what_was_expected_and_what_is_unknown():
    predicted = Predicted(how="guess", basis="a record", seconds=9.0, chip_seconds=72.0, usd=1.0)
    priced = Cost(
        usd=1.25, replica_seconds=900.0, usd_per_hour=5.0, as_of=date(2026, 3, 1), source="the contract of March",
        region="us-east5", preemptible=True, predicted=predicted, earlier=Spent(attempts=2, usd=0.5),
    )  # fmt: skip
    records = [
        make_record(step=100, cost=priced, chip_seconds=7200.0, seconds={"evaluate": 18.0}, tags=("suite=demo",)),
        make_record(step=200, cost=Cost(why_unknown="it has no price"), served={"by": "endpoint"}),
    ]
    text = " ".join(re.sub(r"<[^>]*>", " ", render_report(records, title="run-a")).split())
    part = text[text.index("Cost at least") if "Cost at least" in text else text.index(" Cost ") :]
    assert "at least 2.000, 1 unknown chip-hours, at least 1.75 USD, 1 unknown , for 4 attempts, failed ones" in part
    assert "Expected were 9.0 s, 1 USD, 1 of 1 cell a guess; it took 18.0 s, 1.25 USD, 2.00 times as long." in part
    assert "demo · lm-eval: demo_facts" in part
    assert "5.00 USD an hour of a replica in us-east5, preemptible: the contract of March, 2026-03-01" in part
    assert "Price unknown, 1 cell: it has no price" in part


@pytest.mark.parametrize(
    ("value", "low", "high", "shown"),
    [
        (49_998 / 50_000, 0.999856, 0.999989, "0.99996 [0.99986, 0.99999]"),
        (1.0, 0.999926, 1.0, "1.000 [0.9999, 1.0000]"),
        (0.00002, 0.0000024, 0.0000722, "0.00002 [0.000002, 0.000072]"),
        (0.5, 0.4, 0.6, "0.500 [0.400, 0.600]"),
        (0.9999999999, 0.98, 1.0, "1.000 [0.980, 1.000]"),
    ],
)
def test_share_is_shown_as_all_only_where_it_is(value: float, low: float, high: float, shown: str):
    metric = make_metric(value=value).model_copy(update={"low": low, "high": high})
    assert f"{measured(value)} {margin(metric)}" == shown
