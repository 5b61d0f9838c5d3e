"""Overrides of people about cells: try it again, or stop. Small files beside the records; no record is ever removed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from pydantic import ValidationError

from resources.config import Config
from resources.storage import storage
from tasks.claims.files import CLOCKS_DIFFER_SECONDS, Timestamp
from tasks.claims.process_marks import acting_user

_FOLDER = "marks"  # so called in stores since the first version


class Override(Config):
    """One thing that somebody said about some cells of a run, or about all that a policy wants of it."""

    kind: Literal["retry", "stop"]
    """Another try whatever came before, or none until such an override."""
    policy: str
    """Name of the policy by which it was said."""
    cells: tuple[tuple[str, str], ...] | None
    """Names of checkpoints with hashes of evaluations; all of the policy, later ones too, when unset."""
    at: Timestamp
    """Time, seconds since the epoch; no later than the store had it."""
    user: str
    """The user."""
    flow_run: str | None = None
    """Name of the flow run that somebody cancelled, where that is how it was said."""

    @property
    def by(self) -> str:
        """Returns who said it, and how."""
        return f"with the flow run {self.flow_run}" if self.flow_run else f"by {self.user}"


@dataclass(frozen=True)
class Overrides:
    """The newest override of each cell, and of each policy as a whole."""

    by_cell: Mapping[tuple[str, str], Override] = field(default_factory=dict)
    by_policy: Mapping[str, Override] = field(default_factory=dict)

    def newest(self, checkpoint: str, evaluation_hash: str, *, policy: str) -> Override | None:
        """Returns what was said last that is about a cell."""
        found = (self.by_cell.get((checkpoint, evaluation_hash)), self.by_policy.get(policy))
        return max(filter(None, found), key=lambda override: override.at, default=None)


def read_overrides(run_folder: str) -> Overrides:
    """The overrides of a run's cells."""
    found: list[Override] = []
    for file in filter(lambda file: file.regular, storage.list_files(storage.join(run_folder, _FOLDER))):
        with suppress(FileNotFoundError, ValidationError):
            override = Override.model_validate_json(storage.read_bytes(file.uri))
            latest = file.modified or time.time()  # by the store's clock, whatever that of its writer said
            ahead = override.at > latest + CLOCKS_DIFFER_SECONDS
            found.append(override.model_copy(update={"at": latest}) if ahead else override)
    found.sort(key=lambda override: override.at)
    by_cell = {cell: override for override in found for cell in override.cells or ()}
    return Overrides(by_cell, {override.policy: override for override in found if override.cells is None})


def write_override(
    run_folder: str,
    kind: Literal["retry", "stop"],
    cells: Sequence[tuple[str, str]] | None,
    *,
    policy: str,
    flow_run: str | None = None,
) -> Override:
    """Says something of some cells, each a checkpoint's name and an evaluation's hash, or of all of a policy."""
    listed = tuple(cells) if cells is not None else None
    override = Override(kind=kind, policy=policy, cells=listed, at=time.time(), user=acting_user(), flow_run=flow_run)
    uri = storage.join(run_folder, _FOLDER, f"{int(override.at)}-{secrets.token_hex(4)}.json")
    storage.write_bytes(uri, override.model_dump_json(indent=2).encode())
    return override
