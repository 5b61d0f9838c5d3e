"""User overrides of cells: retry or stop. Small files next to the records; records are never removed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from pydantic import ValidationError

from resources.config import Config
from resources.process_marks import acting_user
from resources.storage import storage
from tasks.running.claims.files import CLOCKS_DIFFER_SECONDS, Timestamp

_FOLDER = "marks"  # the name in existing stores, since the first version


class Override(Config):
    """A user's request about some cells of a run, or about all cells of a policy in it."""

    kind: Literal["retry", "stop"]
    """`retry` permits another try after any failure; `stop` blocks tries until the next `retry`."""
    policy: str
    """Name of the policy that was used."""
    cells: tuple[tuple[str, str], ...] | None
    """Checkpoint names with evaluation hashes; all cells of the policy, later cells included, when unset."""
    at: Timestamp
    """Time in seconds since the epoch; at most the store's modification time."""
    user: str
    """The user."""
    flow_run: str | None = None
    """Name of the cancelled flow run, if a cancellation caused it."""

    @property
    def by(self) -> str:
        return f"with the flow run {self.flow_run}" if self.flow_run else f"by {self.user}"


@dataclass(frozen=True)
class Overrides:
    """The newest override of each cell, and of each policy as a whole."""

    by_cell: Mapping[tuple[str, str], Override] = field(default_factory=dict)
    by_policy: Mapping[str, Override] = field(default_factory=dict)

    def newest(self, checkpoint: str, evaluation_hash: str, *, policy: str) -> Override | None:
        """Returns the newest override that applies to a cell."""
        overrides = (self.by_cell.get((checkpoint, evaluation_hash)), self.by_policy.get(policy))
        return max(filter(None, overrides), key=lambda override: override.at, default=None)


def read_overrides(run_folder: str) -> Overrides:
    """Reads the overrides of a run's cells."""
    overrides: list[Override] = []
    for file in filter(lambda file: file.regular, storage.list_files(storage.join(run_folder, _FOLDER))):
        with suppress(FileNotFoundError, ValidationError):
            override = Override.model_validate_json(storage.read_bytes(file.uri))
            latest = file.modified or time.time()  # bounded by the store's clock, since the writer's may be wrong
            ahead = override.at > latest + CLOCKS_DIFFER_SECONDS
            overrides.append(override.model_copy(update={"at": latest}) if ahead else override)
    overrides.sort(key=lambda override: override.at)
    by_cell = {cell: override for override in overrides for cell in override.cells or ()}
    return Overrides(by_cell, {override.policy: override for override in overrides if override.cells is None})


def write_override(
    run_folder: str,
    kind: Literal["retry", "stop"],
    cells: Sequence[tuple[str, str]] | None,
    *,
    policy: str,
    flow_run: str | None = None,
) -> Override:
    """Writes an override of cells, given as (checkpoint name, evaluation hash), or of a whole policy when None."""
    listed = tuple(cells) if cells is not None else None
    override = Override(kind=kind, policy=policy, cells=listed, at=time.time(), user=acting_user(), flow_run=flow_run)
    uri = storage.join(run_folder, _FOLDER, f"{int(override.at)}-{secrets.token_hex(4)}.json")
    storage.write_bytes(uri, override.model_dump_json(indent=2).encode())
    return override
