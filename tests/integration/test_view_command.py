"""The command `assay view`, used as a person does: its address opened in Chromium, a question, Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from fakes.browser import browser
from fakes.records import make_metric, make_record, make_samples, publish
from resources.settings import process_environment
from tasks.records.record import find_records
from tasks.records.samples import SAMPLES_NAME
from tasks.reports.viewer.page import write_page

pytestmark = pytest.mark.chromium

ASSAY = Path(sys.executable).parent / "assay"
DRAWN = "performance.getEntriesByName('first picture').length > 0"
ANSWERS = "document.querySelector('.question')?.textContent"
HOSTILE = "<img src=x onerror=\"document.title = 'taken'\">"


@pytest.fixture
def evaluations(tmp_path: Path) -> Path:
    """Three checkpoints: the second answers in HTML, the samples of the third are damaged."""
    for step, scores in ((100, [1, 0, 0]), (200, [1, 1, 0]), (300, [1, 1, 1])):
        samples = [
            sample.model_copy(update={"output": HOSTILE if step == 200 else "b", "target": f"{HOSTILE}."})
            for sample in make_samples(scores)
        ]
        metric = make_metric(value=sum(scores) / 3, n=3)
        cell = publish(tmp_path / "evaluations", make_record(step=step, metrics=(metric,), samples=3), samples)
    Path(cell, "attempt-1", SAMPLES_NAME).write_bytes(b"damaged")
    return tmp_path / "evaluations"


@contextmanager
def viewed(evaluations: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Starts the command; yields the address that it prints, and its process."""
    argv = [ASSAY, "view", evaluations]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=process_environment()) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def test_command_shows_records_in_a_browser_to_its_address_alone_and_ends_on_ctrl_c(evaluations: Path, tmp_path: Path):
    with viewed(evaluations) as (address, process), browser(tmp_path) as page:
        assert urlsplit(address).hostname == "127.0.0.1"
        page.go(f"{address}#q=1")
        page.until(DRAWN)
        page.until(f"{ANSWERS}?.includes('Question 1?') && {ANSWERS}?.includes('onerror')")
        assert page.value("document.title") != "taken" and page.value("document.querySelector('img')") is None
        page.go(f"{address}#q=1&c=run-a/run-a-300")
        page.until(f"{ANSWERS}?.includes('delete its record.json')")
        with pytest.raises(HTTPError, match="403"):
            urlopen(address.rsplit("/", 2)[0] + "/another/index.json")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        with pytest.raises(URLError):
            urlopen(address)


def test_single_file_shows_records_in_a_browser_without_a_server(evaluations: Path, tmp_path: Path):
    file = tmp_path / "questions.html"
    write_page(find_records(str(evaluations)), str(file), title="made", location=str(evaluations))
    with browser(tmp_path) as page:
        page.go(f"{file.as_uri()}#q=1")
        page.until(DRAWN)
        page.until(f"{ANSWERS}?.includes('Question 1?') && {ANSWERS}?.includes('onerror')")
        assert page.value("document.title") != "taken" and page.value("document.querySelector('img')") is None
