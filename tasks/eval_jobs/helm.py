"""HELM's part of a job's files: arguments of `helm-run` as options of the HELM evaluator, and the run entries.

The run entries are read before a job is submitted; HELM itself reads them again in the container.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from resources.errors import BadInput, not_there
from resources.storage import storage

HELM_CONFIGURATION = "run_specs.conf"
"""Its name next to the job's file, and in the container."""


_COUNTS = {"--priority": "priority", "--num-train-trials": "num_train_trials"}
_SERVED = ("--enable-local-huggingface-models", "--enable-huggingface-models")
"""Arguments that name the model, which the pool serves."""


@dataclass(frozen=True)
class HelmArguments:
    """Parsed arguments of `helm-run`."""

    options: dict[str, Any]
    """Options of the HELM evaluator."""
    max_eval_instances: int | None


def helm_arguments(arguments: Sequence[str]) -> HelmArguments:
    """Parses arguments of `helm-run`; raises ValueError for the first unsupported argument."""
    parser = argparse.ArgumentParser("known", add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-m", "--max-eval-instances", type=int)
    parser.add_argument("-n", "--num-threads", type=int)
    for flag in _COUNTS:
        parser.add_argument(flag, type=int)
    parser.add_argument("--groups-to-run", nargs="+")
    parser.add_argument("--exit-on-error", action="store_true", default=None)
    for flag in _SERVED:
        parser.add_argument(flag, nargs="+")
    try:
        parsed, unknown = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ValueError(f"args: {error}") from None
    if unknown:
        known = " ".join(parser.format_usage().removeprefix("usage: ").split())
        raise ValueError(f"args: {unknown[0]} of helm-run has no meaning here; {known}")
    options = {
        "num_threads": parsed.num_threads,
        "groups": parsed.groups_to_run,
        "exit_on_error": parsed.exit_on_error,
        **{name: getattr(parsed, name) for name in _COUNTS.values()},
    }
    given = {name: value for name, value in options.items() if value is not None}
    return HelmArguments(given, parsed.max_eval_instances)


@dataclass(frozen=True)
class RunEntry:
    """A run entry of HELM."""

    name: str
    """The scenario, such as mmlu."""
    arguments: dict[str, str]
    """Its arguments except the model, which the pool serves."""
    priority: int | None


def read_run_entries(uri: str) -> tuple[RunEntry, ...]:
    """Returns the run entries of a file."""
    try:
        text = storage.read_bytes(uri).decode()
    except FileNotFoundError:
        remedy = "write the file, or name it with --helm-config"
        raise not_there("a file of HELM's run entries next to the job's file", uri, remedy) from None
    except UnicodeDecodeError as error:
        raise _no_hocon(uri, f"no text: {error.reason}") from error
    return entries_in(text, source=uri)


def entries_in(text: str, *, source: str) -> tuple[RunEntry, ...]:
    """Returns the run entries in a HOCON document."""
    from pyhocon import ConfigFactory, ConfigTree
    from pyhocon.exceptions import ConfigException
    from pyparsing import ParseBaseException

    try:
        parsed = ConfigFactory.parse_string(text)
    except ParseBaseException as error:
        raise _no_hocon(source, f"line {error.lineno}, column {error.column}: {error.msg}") from error
    except (ConfigException, RecursionError) as error:
        raise _no_hocon(source, str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    document = parsed.as_plain_ordered_dict() if isinstance(parsed, ConfigTree) else {}
    entries = document.get("entries")
    if not isinstance(entries, list) or not entries:
        raise BadInput(
            expected=f"entries: [{{description: …, priority: 1}}] in {source}",
            found=f"the keys {', '.join(document) or 'none'}" if not entries else f"entries: {type(entries).__name__}",
            remedy="write a run entry",
        )
    return tuple(_entry(entry, number, source) for number, entry in enumerate(entries, 1))


def _entry(content: Any, number: int, source: str) -> RunEntry:
    description = content.get("description") if isinstance(content, dict) else None
    priority = content.get("priority") if isinstance(content, dict) else None
    if not isinstance(description, str) or not description.strip() or not isinstance(priority, int | None):
        raise BadInput(
            expected=f'run entry {number} of {source} as {{description: "mmlu:subject=anatomy", priority: 1}}',
            found=repr(content),
            remedy="correct it",
        )
    name, _, arguments = description.strip().partition(":")
    pairs = [argument.partition("=") for argument in arguments.split(",") if argument]
    unnamed = [key for key, equals, _ in pairs if not equals or not key]
    if unnamed or not name:
        raise BadInput(
            expected=f"name:argument=value,… as the description of run entry {number} of {source}",
            found=description,
            remedy=f"give {unnamed[0]} a value" if unnamed else "name the scenario",
        )
    return RunEntry(name, {key: value for key, _, value in pairs if key != "model"}, priority)


def _no_hocon(uri: str, problem: str) -> BadInput:
    return BadInput(expected=f"HOCON with HELM's run entries in {uri}", found=problem, remedy="correct it there")
