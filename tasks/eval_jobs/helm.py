"""HELM's part of a job's files: arguments of `helm-run` as options of the HELM evaluator, and the run entries.

The run entries are read before a job is submitted; HELM itself reads them again in the container.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from resources.errors import BadInput, not_there
from resources.storage import storage
from tasks.spec.loading import build_config

HELM_CONFIGURATION = "run_specs.conf"
"""Its name next to the job's file, and in the container."""
_SERVED = ("--enable-local-huggingface-models", "--enable-huggingface-models")
"""Arguments that name the model, which the pool serves."""


class HelmArguments(NamedTuple):
    """Parsed arguments of `helm-run`."""

    options: dict[str, Any]
    """Options of the HELM evaluator."""
    max_eval_instances: int | None


def helm_arguments(arguments: Sequence[str]) -> HelmArguments:
    """Parses arguments of `helm-run`; raises ValueError for the first unsupported argument."""
    parser = argparse.ArgumentParser("known", add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-m", "--max-eval-instances", type=int)
    parser.add_argument("-n", "--num-threads", type=int)
    parser.add_argument("--priority", type=int)
    parser.add_argument("--num-train-trials", type=int)
    parser.add_argument("--groups-to-run", nargs="+", dest="groups")
    parser.add_argument("--exit-on-error", action="store_true", default=None)
    for flag in _SERVED:
        parser.add_argument(flag, nargs="+", dest="served")
    try:
        parsed, unknown = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ValueError(f"args: {error}") from None
    if unknown:
        known = " ".join(parser.format_usage().removeprefix("usage: ").split())
        raise ValueError(f"args: {unknown[0]} of helm-run has no meaning here; {known}")
    options = {name: value for name, value in vars(parsed).items() if value is not None and name != "served"}
    return HelmArguments(options, options.pop("max_eval_instances", None))


class RunEntry(BaseModel):
    """A run entry of HELM."""

    model_config = ConfigDict(strict=True, frozen=True)

    description: str
    """The scenario and its arguments, such as mmlu:subject=anatomy."""
    priority: int | None = None

    @field_validator("description")
    @classmethod
    def _is_a_scenario(cls, text: str) -> str:
        if not re.fullmatch(r"[^:\s]+(:([^=,]+=[^,]*,?)*)?", text.strip()):
            raise ValueError(f"expected a scenario with arguments, such as mmlu:subject=anatomy, found {text!r}")
        return text

    @property
    def name(self) -> str:
        """The scenario, such as mmlu."""
        return self.description.strip().partition(":")[0]


class HelmRunEntries(BaseModel):
    """The content of HELM's configuration file: `entries: [{description: …, priority: 1}]`."""

    entries: list[RunEntry] = Field(min_length=1)


def read_run_entries(uri: str) -> tuple[RunEntry, ...]:
    """Returns the run entries of a HOCON file."""
    from pyhocon import ConfigFactory, ConfigTree
    from pyhocon.exceptions import ConfigException
    from pyparsing import ParseBaseException

    try:
        parsed = ConfigFactory.parse_string(storage.read_bytes(uri).decode())
    except FileNotFoundError:
        remedy = "write the file, or name it with --helm-config"
        raise not_there("a file of HELM's run entries next to the job's file", uri, remedy) from None
    except UnicodeDecodeError as error:
        raise _no_hocon(uri, f"no text: {error.reason}") from error
    except ParseBaseException as error:
        raise _no_hocon(uri, f"line {error.lineno}, column {error.column}: {error.msg}") from error
    except (ConfigException, RecursionError) as error:
        raise _no_hocon(uri, str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    document = parsed.as_plain_ordered_dict() if isinstance(parsed, ConfigTree) else {}
    return tuple(build_config(document, HelmRunEntries, source=uri).entries)


def _no_hocon(uri: str, problem: str) -> BadInput:
    return BadInput(expected=f"HOCON with HELM's run entries in {uri}", found=problem, remedy="correct it there")
