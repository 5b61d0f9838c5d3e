"""The command line as a whole: spellings that were replaced, arguments of programs, and modules that are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fakes.cli import invoke
from flows.cli.app import COMMANDS, REMOVED, command_line, with_program_apart
from resources.errors import BadInput

NAMES = [name for panel in COMMANDS.values() for name in panel]


@pytest.mark.parametrize("earlier", REMOVED)
def test_earlier_spelling_names_the_command_that_replaces_it(earlier: str):
    refused = invoke([*earlier.split(), "policy.yaml", "--json"])
    assert isinstance(refused.exception, BadInput)
    assert refused.exception.remedy == f"assay {REMOVED[earlier]}"
    assert any(REMOVED[earlier].startswith(name) for name in NAMES)


def test_command_that_cannot_be_read_is_bad_input():
    for line in (["evaluat"], ["evaluate", "--modle", "a"], ["gate"], ["pool", "up", "--replicas", "many"]):
        assert invoke(line).exit_code == BadInput.exit_code, line


def test_last_value_of_a_repeated_option_counts():
    _, bound, _ = command_line().parse_args(["compare", "a", "b", "--path", "x", "--path", "y"], exit_on_error=False)
    assert bound.arguments["path"] == "y"


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("submit python a.py --cpu 3", "python a.py --cpu 3"),
        ("submit --cpu 3 --no-wait -e A=1 --gpu=8 python a.py -e B", "python a.py -e B"),
        ("submit --cpu 3 -- --odd -- b", "--odd -- b"),
    ],
)
def test_arguments_after_the_program_belong_to_it(line: str, program: str):
    app = command_line()
    _, bound, _ = app.parse_args(with_program_apart(app, line.split()), exit_on_error=False)
    assert " ".join(bound.args[0]) == program


def test_help_lists_every_command_and_imports_none():
    code = "import sys; from flows.cli.app import main; sys.argv[1:] = ['--help']\nmain()\n"
    code += "print(*(name for name in sys.modules if name.startswith(('flows.', 'tasks.'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.splitlines()[-1].split())
    assert imported == {"flows.cli", "flows.cli.app", "flows.console", "flows.console.console"}
    assert not [name for name in NAMES if f" {name.split()[0]} " not in done.stdout]
