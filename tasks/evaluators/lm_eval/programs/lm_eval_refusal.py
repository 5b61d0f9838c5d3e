"""Refusals of `run_lm_eval.py`: a file that the orchestrator reads. Needs the standard library only."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

REFUSAL_NAME = "refused.json"


def refuse(output: Path, *, kind: str, expected: str, found: str, remedy: str) -> NoReturn:
    """Ends the program, with the reason in a file for the orchestrator and on standard error for people."""
    write_json(output / REFUSAL_NAME, {"kind": kind, "expected": expected, "found": found, "remedy": remedy})
    sys.exit(f"refused: expected {expected}, found {found}")


def refuse_environment(arguments: list[str], error: BaseException) -> None:
    """Says that the environment is broken, if these are the arguments of a run that was given a job.

    Returns only if they are not.
    """
    if not arguments or arguments[-1].startswith("-"):
        return
    refuse(
        Path(json.loads(Path(arguments[-1]).read_text())["output"]),
        kind="EnvironmentBuildFailed",
        expected=f"an environment with all that lm-eval imports in {sys.prefix}",
        found=f"{type(error).__name__}: {error}",
        remedy=f"Delete the folder {sys.prefix} and run again: it is built anew",
    )


def write_json(path: Path, content: Any) -> None:
    """Writes a file that another program reads."""
    path.write_text(json.dumps(content, indent=2))
