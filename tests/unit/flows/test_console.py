"""Text of models, benchmarks and logs reaches a terminal without control sequences and is not read as markup."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fakes.records import make_metric, make_record, publish
from flows.console.console import PrintableConsole, printable
from resources.settings import process_environment

OSC52, TITLE, CLEAR = "\x1b]52;c;aGk=\x07", "\x1b]0;title\x07", "\x1b[2J"
HOSTILE = f"{OSC52}{TITLE}{CLEAR}\x9b2J\x9d0;t\x9c\u202eevil\u2066\x08\x7f[link=http://x]a[/link]:smile:"
FORBIDDEN = (OSC52, TITLE, CLEAR, "\x1b]", "\x9b", "\x9d", "\u202e", "\u2066", "\x07", "\x08", "\x7f", "]8;")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Größe\t漢字\n", "Größe\t漢字\n"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("one\r\ntwo\rthree", "one\ntwo\nthree"),
        ("\x00\x07\x1b]0;t\x7f", "␀␇␛]0;t␡"),
        ("\x85\x9b\u202a\u2069\ud800", "\ufffd" * 5),
    ],
)
def test_printable_shows_control_characters(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_console_prints_text_in_every_form_as_it_is() -> None:
    output = io.StringIO()
    console = PrintableConsole(file=output, width=400, force_terminal=True, highlight=False)
    table = Table(HOSTILE, title=HOSTILE, caption=HOSTILE)
    table.add_row(Text(HOSTILE, "red"))
    console.print(HOSTILE, Text(HOSTILE), table, style="dim")
    console.print(Text("seen", "red"))
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        console.print_exception()
    shown = output.getvalue()
    assert not [sequence for sequence in FORBIDDEN if sequence in shown]
    assert shown.count("[link=http://x]a[/link]:smile:") >= 6 and "\x1b[31mseen\x1b[0m" in shown
    plain = PrintableConsole(file=io.StringIO(), width=400)
    plain.print(table)
    lines = [line for line in plain.file.getvalue().splitlines() if line.startswith(("┏", "┃", "│"))]  # pyright: ignore
    assert len({cell_len(line) for line in lines}) == 1, "the table is straight"


def terminal_output(*arguments: str) -> str:
    ours, theirs = pty.openpty()
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=process_environment({})) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 1 << 16):
                shown += part
        except OSError:  # the other end is closed
            pass
        process.wait()
    os.close(ours)
    return shown.decode(errors="replace")


@pytest.mark.parametrize(
    "arguments",
    [("records",), ("records", "--format", "csv"), ("records", "--format", "jsonl"), ("records", "--json"),
     ("compare", "run-a-100", "run-a-200", "--path"), ("compare", "x", "run-a-200", "--path")],
    ids=" ".join,
)  # fmt: skip
def test_command_shows_no_control_sequence_of_a_record(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    metrics = (make_metric(HOSTILE, name="acc\x1b[2J"),)
    for step in (100, 200):
        publish(tmp_path, make_record(step=step, metrics=metrics, cell="c", tags=(HOSTILE,)))
    publish(tmp_path, make_record(step=300, status="failed", reason=HOSTILE))
    shown = terminal_output("-m", "flows.cli.app", *arguments, str(tmp_path))
    assert "evil" in shown or "run-a-100" in shown, shown
    assert not [sequence for sequence in FORBIDDEN if sequence in shown]


def test_traceback_of_an_unforeseen_error_shows_no_control_sequence() -> None:
    failing = f"def failing(arguments): raise RuntimeError({HOSTILE!r})"
    shown = terminal_output("-c", f"from flows.cli import app\n{failing}\napp.run = failing\napp.main()")
    assert "Traceback" in shown and "RuntimeError" in shown and "evil" in shown
    assert not [sequence for sequence in FORBIDDEN if sequence in shown]


def test_log_in_pieces_is_whole_text_on_a_terminal() -> None:
    script = f"from flows.console.console import write; write(b'ok \\xe2\\x9c'); write(b'\\x93' + {OSC52.encode()!r})"
    assert "ok ✓␛]52;c;aGk=␇" in terminal_output("-c", script)


def test_data_in_a_pipe_is_as_it_is(tmp_path: Path) -> None:
    publish(tmp_path, make_record(tags=(HOSTILE,)))
    command = [sys.executable, "-m", "flows.cli.app", "records", "--format", "csv", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=True, env=process_environment({}))
    assert HOSTILE in done.stdout.decode()
