"""Unreadable inputs end in a sentence, without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.cells import make_cell
from fakes.cli import invoke
from resources.errors import BadInput
from tasks.spec.names import step_of


@pytest.mark.parametrize(("name", "step"), [("step-2000", 2000), ("step-" + "9" * 5000, None)], ids=["short", "long"])
def test_step_of_a_name_with_too_many_digits_is_none(name: str, step: int | None) -> None:
    assert step_of(name) == step


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["records", "PATH", "--steps", "9" * 5000], "FIRST:LAST"),
        (["compare", "run-a@²", "run-a@100", "--path", "PATH"], "run-a@²"),
        (["evaluate", "--model", "PATH", "--eval", "demo_facts:²"], "number of shots"),
    ],
    ids=["steps", "step", "shots"],
)
def test_number_that_is_none_in_an_argument_ends_in_a_sentence(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    make_cell(tmp_path, step=100)
    with pytest.raises(BadInput, match=words):
        invoke([str(tmp_path) if text == "PATH" else text for text in arguments], catch_exceptions=False)


def test_command_on_a_store_without_credentials_ends_in_a_sentence() -> None:
    none = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    done = subprocess.run(
        [sys.executable, "-c", "from flows.cli.app import main; main()", "records", "s3://assay-of-nobody/evaluations"],
        env={**kept, **none, "AWS_EC2_METADATA_DISABLED": "true"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "credentials" in done.stderr and "Traceback" not in done.stderr
