"""Makes the pictures of the README from the pages of `make demo`, with a Chromium that is on PATH: make pictures."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HEIGHTS = {"report": 1190, "report-questions": 840}
"""Pixels of each picture; both are 1200 wide."""


def main() -> int:
    """Writes a picture of each page to docs/; returns the exit code."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    pages = {name: ROOT / "demo" / f"{name}.html" for name in HEIGHTS}
    if browser is None or not all(page.exists() for page in pages.values()):
        sys.stderr.write(f"expected one of {', '.join(BROWSERS)} on PATH, and the pages of `make demo` in demo/\n")
        return 3
    flags = ("--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=8000")
    for name, page in pages.items():
        size, picture = f"--window-size=1200,{HEIGHTS[name]}", f"--screenshot={ROOT / 'docs' / name}.png"
        subprocess.run([browser, *flags, size, picture, page.as_uri()], check=True, capture_output=True, timeout=60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
