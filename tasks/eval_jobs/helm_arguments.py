"""Arguments of `helm-run` as options of the HELM evaluator."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HelmArguments:
    """Parsed arguments of `helm-run`."""

    options: dict[str, Any]
    """Options of the HELM evaluator."""
    max_eval_instances: int | None


_COUNTS = {"--priority": "priority", "--num-train-trials": "num_train_trials"}
_SERVED = ("--enable-local-huggingface-models", "--enable-huggingface-models")
"""Arguments that name the model, which the pool serves."""


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
