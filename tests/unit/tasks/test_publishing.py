"""Artifacts in Prefect's UI: texts stay texts; links are addresses that a browser opens: https and not gs://."""

from __future__ import annotations

import pytest
from prefect.assets import Asset

from fakes.records import make_metric, make_record, merged_record
from tasks.reports.artifacts import asset_key, asset_keys, browser_address, table_rows


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


def test_results_with_any_names_are_shown_as_text():
    [row] = table_rows([make_record(metrics=(make_metric(name="acc ![](http://x/b.png) <b>\r*"),))])
    assert row["metric"] == r"acc \!\[](http://x/b.png) \<b><br>\*"
    assert (row["run"], row["step"]) == ("run-a", 100)


@pytest.mark.parametrize(
    "parts", [("records", "run-a", "step-7"), ("my run?#[x]", "../a/b%", "ä<b>'\""), ("é" * 300, "b" * 300, "c" * 300)]
)
def test_asset_key_is_valid_for_prefect_with_a_part_for_each(parts: tuple[str, ...]):
    key = Asset(key=asset_key(*parts)).key
    assert len(key.removeprefix("assay://").split("/")) == len(parts)


def test_asset_of_a_merged_record_hangs_on_the_merged_checkpoint_and_on_those_in_it():
    merged = merged_record([100, 200])
    inputs = [asset_keys(make_record(step=step))[1] for step in (100, 200)]
    [own, checkpoint, *above] = asset_keys(merged)
    assert above == inputs and checkpoint not in inputs
    assert own == f"assay://records/run-a/step-200/lm_evaluation_harness/{merged.cell}"
