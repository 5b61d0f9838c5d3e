"""Artifacts in Prefect's UI: texts stay texts; a link is what a browser opens, which is https and not gs://."""

from __future__ import annotations

import pytest

from fakes.records import make_metric, make_record
from tasks.reports.artifacts import browser_address, table_rows


@pytest.mark.parametrize(
    ("place", "address"),
    [
        ("gs://b/runs/a b/report.html", "https://storage.cloud.google.com/b/runs/a%20b/report.html"),
        ("gs://b/runs/a", "https://console.cloud.google.com/storage/browser/b/runs/a"),
        ("s3://b/runs/a", "s3://b/runs/a"),
        ("/data/a b/report.html", "file:///data/a%20b/report.html"),
    ],
)
def test_link_to_a_report_or_records_is_what_a_browser_can_open(place: str, address: str):
    assert browser_address(place) == address


def test_results_are_shown_as_text_whatever_their_names_hold():
    [row] = table_rows([make_record(metrics=(make_metric(name="acc ![](http://x/b.png) <b>\r*"),))])
    assert row["metric"] == r"acc \!\[](http://x/b.png) \<b><br>\*"
    assert (row["run"], row["step"]) == ("run-a", 100)
