"""A command line of `assay` run in the process of the test, with its output and its error."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from cyclopts import CycloptsError

from flows.cli.app import run
from resources.errors import AssayError, BadInput


@dataclass(frozen=True)
class Result:
    """The end of a command."""

    exit_code: int
    stdout: str
    stderr: str
    exception: BaseException | None

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def invoke(
    arguments: Sequence[str | Path], *, env: Mapping[str, str] | None = None, catch_exceptions: bool = True
) -> Result:
    """Runs a command line; without `catch_exceptions` errors of Assay are raised."""
    out, errors = io.TextIOWrapper(io.BytesIO(), write_through=True), io.StringIO()
    code, error = 0, None
    with _variables(env or {}), redirect_stdout(out), redirect_stderr(errors):
        try:
            run(list(map(str, arguments)))
        except SystemExit as ended:
            code, error = ended.code if isinstance(ended.code, int) else 0, ended
        except CycloptsError as unreadable:
            code, error = BadInput.exit_code, unreadable
        except Exception as raised:
            if not catch_exceptions:
                raise
            code, error = raised.exit_code if isinstance(raised, AssayError) else 1, raised
    assert isinstance(out.buffer, io.BytesIO)
    return Result(code, out.buffer.getvalue().decode(), errors.getvalue(), error)


@contextmanager
def _variables(added: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
