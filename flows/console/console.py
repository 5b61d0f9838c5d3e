"""The consoles of the command: tables for people, JSON for scripts.

Names, answers and logs come from models, benchmarks and other users. In terminal output their control characters are
shown, not interpreted, and markup is disabled.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

_DROPPED = re.compile(r"\x1b\[[0-9;:]*m|\r(?=\n)")  # colours, and the first half of a line break
_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SHOWN = {
    **{code: 0x2400 + code for code in range(0x20)},
    **dict.fromkeys((*range(0x80, 0xA0), *_BIDI, *range(0xD800, 0xE000)), 0xFFFD),  # C1, direction, half characters
    **{0x7F: 0x2421, 0x09: 0x09, 0x0A: 0x0A, 0x0D: 0x0A},
}


def printable(text: str) -> str:
    """Returns text that is safe for a terminal: control characters visible, colours removed."""
    return _DROPPED.sub("", text).translate(_SHOWN)


class PrintableConsole(Console):
    """A console without markup that prints only `printable` text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        # printable before its width is measured
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text) and (plain := printable(renderable.plain)) != renderable.plain:
            renderable = renderable.copy()
            renderable.plain = plain
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


OUT = PrintableConsole()
"""Console for results."""
ERR = PrintableConsole(stderr=True)
"""Console for progress and errors."""
Json = Annotated[bool, Parameter("--json", help="Print JSON for scripts.")]
_decoder = codecs.getincrementaldecoder("utf-8")("replace")


def write(content: str | bytes) -> None:
    """Writes data or a log to standard output: unchanged into a pipe or file, `printable` on a terminal."""
    if sys.stdout.isatty():
        sys.stdout.write(printable(_decoder.decode(content) if isinstance(content, bytes) else content))
    elif isinstance(content, bytes):
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
    else:
        sys.stdout.write(content)
    sys.stdout.flush()


def say(*lines: str, to: Console = OUT, style: str | None = None) -> None:
    """Prints lines of results as they are, without line breaks for the width of the terminal."""
    for line in lines:
        to.print(line, style=style, highlight=False, soft_wrap=True)


def note(*lines: str) -> None:
    """Prints lines about progress to standard error."""
    say(*lines, to=ERR, style="dim")


def print_json(content: Any) -> None:
    """Writes a value to standard output as JSON."""
    write(json.dumps(content, indent=2) + "\n")


def table_of(*headings: str | Column, rows: Iterable[Sequence[str | Text]]) -> Table:
    """Returns a table with rows of texts, which are shown as they are; without headings also without lines."""
    table = Table(*headings) if headings else Table(show_header=False, box=None)
    for row in rows:
        table.add_row(*row)
    return table


def say_rejected(rejected: Mapping[str, str]) -> None:
    """Prints the first excluded record with its reason, and the count of the remaining records."""
    for cell, why in list(rejected.items())[:1]:
        more = f", and {len(rejected) - 1:,} more" if len(rejected) > 1 else ""
        ERR.print(f"Not counted: {cell}: {why}{more}; see assay records --verify", style="yellow", soft_wrap=True)
