"""The report page as Chromium lays it out, at the width of a phone and of a desktop, in light and dark."""

from __future__ import annotations

import html
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fakes.browser import chromium_binary
from fakes.records import make_metric, make_record, of_every_evaluator
from resources.errors import RecordStatus
from tasks.records.record import Record
from tasks.reports.page import render_report

pytestmark = pytest.mark.chromium

PHONE, DESKTOP = 390, 1280
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=4000",
    "--window-size=1500,1200",
)

# Measures a page inside a frame of a given width, because a headless window cannot be as narrow as a phone.
OBSERVE = """
const box = (element) => element.getBoundingClientRect();
const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
function observe(frame) {
  const page = frame.contentDocument;
  page.querySelectorAll("details").forEach((part) => { part.open = true; });
  const charts = [...page.querySelectorAll("svg.chart")];
  let overlaps = [], outside = [];
  for (const chart of charts) {
    const labels = [...chart.querySelectorAll("text")];
    labels.forEach((label, i) => {
      const cut = box(label).right > box(chart).right + 1 || box(label).left < box(chart).left - 1;
      if (cut) outside.push(label.textContent);
      labels.slice(i + 1).forEach((other) => {
        if (!apart(box(label), box(other))) overlaps.push([label.textContent, other.textContent]);
      });
    });
  }
  const numbers = page.querySelector(".scroll"), first = numbers && numbers.querySelector("tbody th[scope=row]");
  if (numbers) numbers.scrollLeft = 10000;
  const text = charts[0] && charts[0].querySelector("text");
  return {
    title: page.title,
    scrollWidth: page.scrollingElement.scrollWidth,
    loaded: frame.contentWindow.performance.getEntriesByType("resource").map((entry) => entry.name),
    chartTops: charts.map((chart) => Math.round(box(chart).top)),
    chartWidths: charts.map((chart) => box(chart).width),
    textHeights: charts.flatMap((chart) => [...chart.querySelectorAll("text")].map((label) => box(label).height)),
    overlaps, outside,
    cardHeights: [...page.querySelectorAll("li.card")].map((card) => box(card).height),
    numbersScroll: numbers ? numbers.scrollWidth - numbers.clientWidth : 0,
    firstColumnStays: first ? box(first).left - box(numbers).left : 0,
    pageColour: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    textColour: text ? frame.contentWindow.getComputedStyle(text).fill : "",
  };
}
addEventListener("load", () => {
  const seen = [...document.querySelectorAll("iframe")].map(observe);
  document.querySelector("pre").textContent = JSON.stringify(seen);
});
"""


Looks = tuple[dict[str, Any], dict[str, Any]]
"""Observations of a page in Chromium, in a phone-wide and in a desktop-wide frame."""


def observed(folder: Path, pages: Mapping[str, str], *, dark: bool = False) -> dict[str, Looks]:
    frames = "".join(
        f'<iframe style="border: 0; width: {width}px; height: 900px" srcdoc="{html.escape(page)}"></iframe>'
        for page in pages.values()
        for width in (PHONE, DESKTOP)
    )
    harness = folder / "harness.html"
    harness.write_text(f"<!DOCTYPE html><meta charset=utf-8><pre></pre>{frames}<script>{OBSERVE}</script>")
    done = subprocess.run(
        [
            chromium_binary(),
            *FLAGS,
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--user-data-dir={folder / 'profile'}",
            "--dump-dom",
            harness.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer = re.search(r"<pre>(.+?)</pre>", done.stdout, flags=re.DOTALL)
    assert answer, done.stderr[-2000:]
    seen = json.loads(html.unescape(answer[1]))
    return dict(zip(pages, zip(seen[::2], seen[1::2], strict=True), strict=True))


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Looks]:
    """All tested pages in a light color scheme."""
    long_name = "another-run-with-a-rather-long-name-that-goes-on-and-on-2026-01-02"
    growing = [make_record(step=step) for step in (0, *(2**power for power in range(0, 18)))]
    pages = {
        "two runs": render_report(series() + series(run=long_name), title="Demo"),
        "every evaluator": render_report(
            of_every_evaluator(), title="All", records_at="evaluations", page="report.html"
        ),
        "growing steps": render_report(growing, title="Demo"),
        "nothing": render_report([], title="Nothing yet"),
    }
    return observed(tmp_path_factory.mktemp("light"), pages)


def brightness(colour: str) -> float:
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def series(*, run: str = "demo", steps: range = range(100, 700, 100)) -> list[Record]:
    statuses: dict[int, RecordStatus] = {300: "withheld", 500: "failed"}
    return [
        make_record(
            step=step,
            run=run,
            status=statuses.get(step, "succeeded"),
            metrics=(
                make_metric("demo_facts", 0.2 + step / 1000, stderr=0.04),
                make_metric("demo_backwards", step / 700, name="exact_match", n=100),
                make_metric(
                    "a_benchmark_with_a_long_name", 1000 / step, name="word_perplexity", higher_is_better=False
                ),
            ),
        )
        for step in steps
    ]


def test_page_on_phone_and_desktop_is_laid_out_without_overlaps_or_sideways_scrolling(light: dict[str, Looks]) -> None:
    phone, desktop = light["two runs"]

    assert phone["title"] == desktop["title"] == "Demo"
    assert phone["loaded"] == desktop["loaded"] == []
    assert phone["scrollWidth"] <= PHONE
    assert desktop["scrollWidth"] <= DESKTOP
    assert phone["overlaps"] == desktop["overlaps"] == []
    assert phone["outside"] == desktop["outside"] == []
    assert len(set(phone["chartTops"])) == 3, "below each other"
    assert len(set(desktop["chartTops"])) == 1, "side by side"
    assert min(phone["chartWidths"]) > 320
    assert min(phone["textHeights"]) > 10, "legible: a line of text is higher than its font size"
    assert phone["numbersScroll"] > 0, "the table of numbers scrolls inside its own box"
    assert phone["firstColumnStays"] < 3


def test_page_of_every_evaluator_is_laid_out_without_overlaps_or_sideways_scrolling(light: dict[str, Looks]) -> None:
    phone, desktop = light["every evaluator"]

    assert phone["loaded"] == desktop["loaded"] == []
    assert phone["scrollWidth"] <= PHONE
    assert desktop["scrollWidth"] <= DESKTOP
    assert phone["overlaps"] == desktop["overlaps"] == phone["outside"] == desktop["outside"] == []
    assert max(phone["cardHeights"]) < 600, "no card is stretched by a column too narrow for its words"
    assert phone["firstColumnStays"] < 3


def test_page_in_a_dark_scheme_has_light_text_on_dark_also_in_charts(light: dict[str, Looks], tmp_path: Path) -> None:
    in_dark = observed(tmp_path, {"series": render_report(series(), title="Demo")}, dark=True)
    for (phone, _), dark in ((light["two runs"], False), (in_dark["series"], True)):
        assert (brightness(phone["pageColour"]) < 60) == dark
        assert (brightness(phone["textColour"]) > 200) == dark


def test_page_with_growing_steps_has_tick_labels_apart(light: dict[str, Looks]) -> None:
    phone, desktop = light["growing steps"]

    assert phone["overlaps"] == desktop["overlaps"] == []
    assert phone["outside"] == desktop["outside"] == []


def test_page_without_records_is_still_a_page(light: dict[str, Looks]) -> None:
    phone, _ = light["nothing"]

    assert phone["title"] == "Nothing yet"
    assert phone["scrollWidth"] <= PHONE
