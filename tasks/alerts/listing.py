"""Lists the alerts of runs from their records and alert files, and selects alerts by id."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from resources.errors import BadInput
from resources.storage import storage
from tasks.alerts.detection import Alert, alerts_in
from tasks.alerts.files import KnownAlert, read_alerts
from tasks.alerts.texts import SHORT_ID
from tasks.records.builds import read_qualifications
from tasks.records.record import find_records

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
