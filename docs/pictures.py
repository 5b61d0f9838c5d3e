"""Makes the pictures of the README from the pages of `make demo`: make pictures."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from fakes.browser import browser

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 1200
PICTURES = {
    "report": (1190, "document.readyState === 'complete'"),
    "report-questions": (700, "performance.getEntriesByName('first picture').length"),
}
"""Height in pixels by page, and the JavaScript condition of a drawn page."""


def main() -> int:
    """Writes a picture of each page to docs/; returns the exit code."""
    for name, (height, drawn) in PICTURES.items():
        file = ROOT / "demo" / f"{name}.html"
        if not file.is_file():
            sys.stderr.write(f"expected {file}, found none: run `make demo` first\n")
            return 3
        with TemporaryDirectory() as folder, browser(Path(folder), width=WIDTH, height=height) as page:
            size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
            page.call("Emulation.setDeviceMetricsOverride", **size)
            page.call("Emulation.setScrollbarsHidden", hidden=True)
            page.go(file.as_uri())
            page.until(f"location.href === {file.as_uri()!r} && {drawn}")
            page.screenshot(ROOT / "docs" / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
