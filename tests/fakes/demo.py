"""The `assay demo` command, run as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from resources.settings import process_environment

ASSAY = Path(sys.executable).with_name("assay")


@dataclass(frozen=True)
class Demo:
    folder: Path
    cache: Path
    output: str

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs `assay` in the demo's parent folder, with its cache, without a time limit."""
        environment = process_environment(
            {"PREFECT_HOME": str(self.folder / "prefect"), "ASSAY_CACHE_DIR": str(self.cache)}
        )
        return subprocess.run(
            [str(ASSAY), *arguments],
            cwd=self.folder.parent,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
