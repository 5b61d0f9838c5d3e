"""Links in Prefect's UI: a browser opens https, and neither gs:// nor what is on another machine."""

from __future__ import annotations

import pytest

from tasks.reports.artifacts import browser_address


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
