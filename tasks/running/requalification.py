"""Sides of a requalification: existing records, or a pinned list of packages to repeat the same requests with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from resources.environments.environments import ENVIRONMENTS, KEPT_LIST
from resources.errors import AssayError, BadInput
from resources.settings import settings
from resources.storage import storage
from tasks.evaluators.evaluator import harness_environments
from tasks.records.record import FoundRecord, Record, find_records
from tasks.spec.evaluation import EvaluationConfig

PRESENT = "present"
"""The side that uses the pinned lists of this Assay."""


@dataclass(frozen=True)
class Side:
    """A side: a folder of records, or pinned lists by environment that replace Assay's own."""

    label: str
    records: str | None = None
    lists: Mapping[str, Path] = field(default_factory=dict)


def side_of(text: str) -> Side:
    """Returns the side named by a text.

    Args:
        text: `present`; a pinned list named after its environment (`lm-eval-0.4.12.txt`); the name of a kept
            environment (`lm-eval-c15858043edd`); or a folder of records.
    """
    if text == PRESENT:
        return Side(text)
    kept = settings().environments_dir / text
    if "/" not in text and kept.is_dir() and not Path(text).exists():
        if not (kept / KEPT_LIST).is_file():
            raise BadInput(
                expected=f"{KEPT_LIST} in {kept}, the list it was built from",
                found="none: an older Assay built it",
                remedy="name the pinned list itself; it is in the repository of that Assay",
            )
        return Side(text, lists={_environment(text): kept / KEPT_LIST})
    if storage.is_local(text) and storage.local_path(text).is_file():
        path = storage.local_path(text).absolute()
        return Side(text, lists={_environment(path.name): path})
    if not storage.is_folder(text):
        raise BadInput(
            expected=f"{PRESENT}, a folder of records, a pinned list, or an environment in {kept.parent}",
            found=f"{text}, which is none of them",
            remedy="correct it; `assay requalify --help` has examples",
        )
    return Side(text, records=text)


def _environment(name: str) -> str:
    known = {**ENVIRONMENTS, **harness_environments()}
    fitting = [environment for environment in known if name.startswith(environment)]
    if not fitting:
        raise BadInput(
            expected=f"a pinned list with a name that begins with its environment: {', '.join(sorted(known))}",
            found=name,
            remedy="rename it, for example to lm-eval-0.4.12.txt",
        )
    return max(fitting, key=len)


def recorded_successes(evaluation_path: str, *, digest: str) -> list[FoundRecord]:
    """Returns all succeeded records of a checkpoint below a folder."""
    records = find_records(evaluation_path)
    return [item for item in records if item.record.checkpoint.digest == digest and item.record.succeeded]


def asked_again(records: Sequence[Record], evaluation_path: str) -> list[list[EvaluationConfig]]:
    """Returns the records' evaluations for another folder, grouped by serving; kept pools become new pools."""
    served: list[list[EvaluationConfig]] = []
    for record in records:
        config = _config(record, evaluation_path)
        alike = next((group for group in served if _served_alike(group[0], config)), None)
        if alike is None:
            served.append([config])
        elif config not in alike:
            alike.append(config)
    return served


def _config(record: Record, evaluation_path: str) -> EvaluationConfig:
    content = {
        **record.evaluation,
        "model_path": record.checkpoint.uri,
        "model_name": record.checkpoint.run,
        "evaluation_path": evaluation_path,
        "discover_latest_checkpoint": False,
        "sinks": (),
    }
    if content.get("pool_config"):
        content["pool_name"] = None
    try:
        return EvaluationConfig.model_validate(content)
    except (ValidationError, AssayError) as error:
        raise BadInput(
            expected=f"an evaluation that this Assay can make again, in the record {record.cell}",
            found=str(error),
            remedy="evaluate the checkpoint with this Assay into a folder of its own, and name both folders",
        ) from error


def _served_alike(first: EvaluationConfig, second: EvaluationConfig) -> bool:
    names = ("pool_name", "pool_config", "base_url", "served_model_name")
    return first.native == second.native and all(getattr(first, name) == getattr(second, name) for name in names)
