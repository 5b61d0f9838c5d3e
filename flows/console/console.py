"""The consoles that the command prints to: people read tables, scripts read JSON."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

OUT = Console()
"""Results."""
ERR = Console(stderr=True)
"""Progress and errors."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def print_json(content: Any) -> None:
    """Writes a value to standard output, and nothing else."""
    sys.stdout.write(json.dumps(content, indent=2) + "\n")
