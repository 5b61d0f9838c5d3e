"""Files of alerts: that an alert was found, announced or acknowledged; and lists of alerts.

<evaluation_path>/<run>/alerts/<id>.json      created by the first process that finds it, which alone notifies others
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError
from rich.table import Table
from rich.text import Text

from resources.config import Config
from resources.errors import BadInput, StorageError
from resources.process_marks import acting_user
from resources.storage import storage
from resources.storage.conditional_writes import creates_exclusively, delete_version, read_version, replace_bytes
from tasks.records.builds import read_qualifications
from tasks.records.details import Timestamp, read_model
from tasks.records.record import find_records
from tasks.verdicts.alerts import SHORT_ID, Alert, alerts_in

_FOLDER = "alerts"
_SETTLE_SECONDS = 2.0


class Acknowledgement(Config):
    """A user's acknowledgement of an alert."""

    model_config = ConfigDict(extra="ignore")

    by: str
    """The user."""
    at: Timestamp
    """Time, seconds since the epoch."""
    note: str | None = None
    """A short note."""

    @property
    def words(self) -> str:
        return f"by {self.by}, {datetime.fromtimestamp(self.at, UTC):%Y-%m-%d}" + (
            f": {self.note}" if self.note else ""
        )


class KnownAlert(Config):
    """An alert and its status; fields of a newer version are ignored."""

    model_config = ConfigDict(extra="ignore")

    alert: Alert
    """The alert as found."""
    found_at: Timestamp
    """Time it was found, seconds since the epoch."""
    announced: bool
    """True if it was new and was announced; False if it was found in old records."""
    acknowledged: Acknowledgement | None = None
    """Empty while it is open."""
    finder: str = Field(default_factory=lambda: secrets.token_hex(8))
    """Random id of the finder, which recognises its own file by it."""


def alerts_on_file(run_folder: str) -> set[str]:
    """Returns the ids of a run's alerts that have a file; 1 listing."""
    return {storage.basename(uri).removesuffix(".json") for uri in _files(run_folder)}


def read_alerts(run_folder: str) -> dict[str, KnownAlert]:
    """Returns the alerts of a run that have a file, by id; 1 listing, and a read per alert. Raises StorageError."""
    read = [read_model(uri, KnownAlert) for uri in _files(run_folder)]
    return {known.alert.id: known for known in read if known is not None}


def write_first(run_folder: str, known: KnownAlert, *, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Creates the file of an alert; returns False if another process did. Without exclusive creation in the store, the
    last writer wins once both files are visible: best effort."""
    uri, content = _uri(run_folder, known.alert.id), _content(known)
    if creates_exclusively(storage.join(run_folder, _FOLDER)):
        # If the response to a write is lost, the client retries and finds its own file.
        return storage.create_bytes(uri, content) or _held(uri) == content
    if _held(uri) is not None:
        return False
    storage.write_bytes(uri, content)
    sleep(_SETTLE_SECONDS)
    return _held(uri) == content


def forget(run_folder: str, known: KnownAlert) -> None:
    """Deletes the file of an alert that could not be announced, unless it changed, so that the next pass finds it
    again. A marker file remains, so that the next pass announces it at any later time."""
    uri = _uri(run_folder, known.alert.id)
    standing = read_version(uri)
    if standing is not None and standing.content == _content(known):
        delete_version(uri, standing=standing)
        storage.write_bytes(_untold(run_folder, known.alert.id), b"")


def take_untold(run_folder: str, alert: Alert) -> bool:
    """Returns True if an alert was found before but could not be announced; removes its marker."""
    mark = _untold(run_folder, alert.id)
    if not storage.exists(mark):
        return False
    storage.delete(mark)
    return True


def acknowledge(run_folder: str, alert: Alert, *, note: str | None) -> KnownAlert:
    """Acknowledges an alert in the name of this process's user; an earlier acknowledgement is kept."""
    word = Acknowledgement(by=acting_user(), at=time.time(), note=note)
    uri = _uri(run_folder, alert.id)
    while True:
        standing = read_version(uri)
        if standing is None:
            known = KnownAlert(alert=alert, found_at=word.at, announced=False, acknowledged=word)
            if storage.create_bytes(uri, _content(known)):
                return known
            continue
        try:
            before = KnownAlert.model_validate_json(standing.content)
        except ValidationError as error:
            raise StorageError(
                expected=f"an alert in {uri}", found="something else", remedy="remove it, or use the newer Assay"
            ) from error
        if before.acknowledged is not None:
            return before
        known = before.model_copy(update={"acknowledged": word})
        if replace_bytes(uri, _content(known), standing=standing):
            return known


def _files(run_folder: str) -> list[str]:
    listed = storage.list_files(storage.join(run_folder, _FOLDER))
    return [file.uri for file in listed if file.regular and file.uri.endswith(".json")]


def _uri(run_folder: str, identifier: str) -> str:
    return storage.join(run_folder, _FOLDER, f"{identifier}.json")


def _untold(run_folder: str, identifier: str) -> str:
    return storage.join(run_folder, _FOLDER, f"{identifier}.untold")


def _content(known: KnownAlert) -> bytes:
    return known.model_dump_json(indent=2).encode()


def _held(uri: str) -> bytes | None:
    try:
        return storage.read_bytes(uri)
    except FileNotFoundError:
        return None


State = Literal["open", "acknowledged", "gone"]
_ORDER: tuple[State, ...] = ("open", "acknowledged", "gone")


@dataclass(frozen=True)
class ListedAlert:
    """An alert, the folder of its run's records, and its file, if any; `shown` if the records still show it."""

    alert: Alert
    run_folder: str
    known: KnownAlert | None
    shown: bool

    @property
    def state(self) -> State:
        """`acknowledged` permanently once acknowledged; `gone` if the records no longer show it, as after a rewrite."""
        if self.known is not None and self.known.acknowledged is not None:
            return "acknowledged"
        return "open" if self.shown else "gone"

    def as_dict(self) -> dict[str, Any]:
        known = self.known.model_dump(include={"announced", "acknowledged"}) if self.known else {}
        return {"state": self.state, **asdict(self.alert), "announced": False, "acknowledged": None, **known}

    @property
    def words(self) -> str:
        word = self.known.acknowledged if self.known is not None else None
        return self.state if word is None else f"acknowledged {word.words}"


def list_alerts(paths: Iterable[str]) -> list[ListedAlert]:
    """Returns the alerts of the records below some folders: open alerts first, then by latest step."""
    records: dict[str, list[Any]] = defaultdict(list)
    for path in paths:
        for found_record in find_records(path):
            records[storage.parent(storage.parent(storage.parent(found_record.cell_uri)))].append(found_record.record)
    listed: list[ListedAlert] = []
    for folder, of_run in records.items():
        known = read_alerts(folder)
        qualifications = read_qualifications(storage.parent(folder))
        shown = {alert.id: alert for alert in alerts_in(of_run, qualifications=qualifications)}
        every = {**{key: known_alert.alert for key, known_alert in known.items()}, **shown}
        listed += [ListedAlert(alert, folder, known.get(key), key in shown) for key, alert in every.items()]
    return sorted(listed, key=lambda entry: (_ORDER.index(entry.state), -entry.alert.step, entry.alert.id))


def alerts_table(listed: Sequence[ListedAlert]) -> Table:
    """Returns the alerts for a terminal, a line each."""
    table = Table("Id", "Run", "Step", "Metric", "Found", "Expected", "State")
    for each in listed:
        alert = each.alert
        place = Text(alert.run), f"{alert.step:,}", Text(f"{alert.benchmark} {alert.metric}")
        numbers = f"{alert.found:.4g}", f"{alert.expected:.4g}"
        table.add_row(alert.id[:SHORT_ID], *place, *numbers, Text(each.words, "" if each.state == "open" else "dim"))
    return table


def chosen(listed: Sequence[ListedAlert], texts: Sequence[str]) -> list[ListedAlert]:
    """Returns the alerts with the given ids or unique beginnings of ids."""
    alerts: dict[str, ListedAlert] = {}
    for text in texts:
        meant = [each for each in listed if text and each.alert.id.startswith(text)]
        if len(meant) != 1:
            ids = ", ".join(each.alert.id[: max(SHORT_ID, len(text) + 2)] for each in meant)
            raise BadInput(
                expected="the id of an alert, or so much of its beginning as no other has",
                found=f"{text!r}, with which {ids} begin" if meant else f"{text!r}, which none has",
                remedy="`assay alerts` lists them",
            )
        alerts[meant[0].alert.id] = meant[0]
    return list(alerts.values())
