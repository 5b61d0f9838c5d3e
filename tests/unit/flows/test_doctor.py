"""Findings of `assay doctor` that do not depend on the machine: images compared with the code."""

from __future__ import annotations

import subprocess
from datetime import date, timedelta
from pathlib import Path

import pytest

from flows.cli.doctor import commits_since, examine, image_finding, price_list_finding
from resources.regions.regions import STALE_DAYS
from resources.settings import settings
from tasks.records.provenance import versions

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEWER = {"aaaaaaa": 3, "bbbbbbb": 1, "ccccccc": 0}


@pytest.mark.parametrize(
    ("image", "changed", "level", "seen"),
    [
        (f"r.example:5000/team/assay-cpu:{COMMIT}", False, "ok", "no older"),
        (f"assay-cpu:{COMMIT[:12]}@sha256:{'e' * 64}", False, "ok", "no older"),
        (f"assay-cpu:{COMMIT[:7]}", True, "note", "lacks changes that are not committed"),
        ("assay-cpu:aaaaaaa", False, "note", "3 commits older than this code"),
        ("assay-cpu:bbbbbbb", False, "note", "1 commit older than this code"),
        ("assay-cpu:ccccccc", False, "ok", "no older"),
        ("assay-cpu:ddddddd", False, "note", "of another commit than this code's (0123456789ab)"),
        (f"assay-cpu:v{versions()['assay']}", False, "ok", "this code's"),
        ("assay-cpu:0.0.1", False, "note", "another version than this code's"),
        ("r.example:5000/assay-cpu", False, "note", "its tag does not say"),
        ("assay-cpu:latest", False, "note", "its tag does not say"),
        (f"assay-cpu@sha256:{'a' * 64}", False, "note", "its tag does not say"),
    ],
)
def test_image_is_as_old_as_its_tag_says(image: str, changed: bool, level: str, seen: str) -> None:
    finding = image_finding(image, COMMIT, changed=changed, since=NEWER.get)
    assert (finding.subject, finding.level) == (f"Image {image}", level)
    assert seen in finding.seen
    assert bool(finding.remedy) == (level == "note")


def test_commits_are_counted_from_a_commit_of_this_clone() -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert commits_since(head.stdout.strip()) == 0
    assert commits_since("d" * 40) is None


def test_images_of_settings_and_regions_are_examined_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    regions = tmp_path / "regions.yaml"
    regions.write_text(
        """
        prices: {as_of: 2026-11-01, vcpu_hour: {on_demand: 1}, memory_gb_hour: {on_demand: 1},
                 egress_gb: {same_continent: 0, other_continent: 0}}
        regions:
          - {name: a, continent: europe, work_pool: a, images: {cpu: "cpu:1.2", tpu: "tpu:1.2"}}
          - {name: b, continent: europe, work_pool: b, work_pool_variables: {image: "cpu:1.2"}}
        """
    )
    monkeypatch.setenv("ASSAY_REGIONS", str(regions))
    monkeypatch.setenv("ASSAY_JOB_IMAGE", "jobs:1.2")
    settings.cache_clear()
    subjects = [each.subject for each in examine() if each.subject.startswith("Image ")]
    assert subjects == ["Image jobs:1.2", "Image cpu:1.2", "Image tpu:1.2"]
    settings.cache_clear()


def test_price_list_that_is_old_is_to_be_looked_up_again() -> None:
    written = date(2026, 1, 1)
    assert price_list_finding(written, today=written + timedelta(days=STALE_DAYS)).level == "ok"
    old = price_list_finding(written, today=written + timedelta(days=STALE_DAYS + 1))
    assert (old.level, old.seen) == ("note", "of 2026-01-01, 181 days old, more than 180")
    assert "as_of and source" in old.remedy
