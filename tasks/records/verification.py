"""Verification that records, their samples and their values were not changed after they were written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from resources.errors import StorageError
from resources.storage import storage
from tasks.records.index import FOLDER, indexed_cells
from tasks.records.record import QUALIFICATIONS_FOLDER, RECORD_NAME, SCOPE_NAME, FoundRecord, broken_seal
from tasks.records.samples import SAMPLES_NAME, KeptSamples, agrees, given, kept_samples
from tasks.records.verdicts import EARLY_NAME

Integrity = Literal["intact", "changed", "unknown"]


@dataclass(frozen=True)
class Verification:
    """Result for a record: `findings` are its defects or, without defects, the reasons why it cannot be verified."""

    entry: FoundRecord
    integrity: Integrity
    findings: tuple[str, ...]

    def as_row(self) -> dict[str, Any]:
        record = self.entry.record
        return {
            "cell": self.entry.cell_uri,
            "checkpoint": record.checkpoint.name,
            "evaluator": record.evaluator,
            "benchmarks": list(record.benchmarks),
            "integrity": self.integrity,
            "findings": list(self.findings),
        }

    @property
    def words(self) -> str:
        record = self.entry.record
        return f"{record.checkpoint.name}, {', '.join(record.benchmarks)}: {'; '.join(self.findings)}"


def verified(entry: FoundRecord) -> Verification:
    """Verifies a record, its samples and its values; reads the samples."""
    try:
        return verified_with(entry, kept_samples(entry))
    except StorageError as error:
        return verified_with(entry, error)


def verified_with(entry: FoundRecord, kept: KeptSamples | StorageError | None) -> Verification:
    """Verifies a record against its samples: their content, the error of reading them, or None if it has none."""
    if isinstance(kept, StorageError):
        return Verification(entry, "changed", (f"its samples cannot be read: {kept.found}",))
    wrong = list(_wrong(entry, kept))
    if wrong:
        return Verification(entry, "changed", tuple(wrong))
    if kept is None and entry.record.digests.samples is not None:
        return Verification(entry, "unknown", ("values not verifiable: its samples are not there",))
    return Verification(entry, "intact", ())


def lost_cells(evaluation_path: str) -> dict[str, str]:
    """Returns the cells below a folder that lost their record, with the evidence.

    Evidence is an entry in the run's index, which the index drops at its next comparison with the records, or samples
    of an attempt, which are written just before the record, unless a later attempt has started.
    """
    aside = f"{storage.join(evaluation_path, QUALIFICATIONS_FOLDER)}/"
    files = [file.uri for file in storage.list_files(evaluation_path) if not file.uri.startswith(aside)]
    has_outcome = {
        storage.parent(uri) for uri in files if storage.basename(uri) in (RECORD_NAME, SCOPE_NAME, EARLY_NAME)
    }
    indices = {storage.parent(uri) for uri in files if storage.basename(storage.parent(uri)) == FOLDER}
    runs = {storage.parent(index) for index in indices}
    known = {storage.join(run, cell): "the run's index lists it" for run in runs for cell in indexed_cells(run)}
    attempts = (storage.parent(uri) for uri in files if storage.basename(uri) == SAMPLES_NAME)
    known |= {storage.parent(uri): f"{storage.basename(uri)} has its samples" for uri in attempts}
    return {cell: f"record.json is gone, but {why}" for cell, why in known.items() if cell not in has_outcome}


def _wrong(entry: FoundRecord, kept: KeptSamples | None) -> Iterator[str]:
    record = entry.record
    if seal := broken_seal(record):
        yield seal
    if kept is None:
        return
    if record.digests.samples not in (None, kept.digest):
        yield "its samples were changed after they were written"
    for metric in record.metrics:
        if metric.recomputed and not agrees(metric, kept.questions, record.metrics):
            values = given(metric, kept.questions, record.metrics)
            source = "its parts give" if metric.parts else "its samples give"
            shown = f"{values[0]:.6g}" if values else "none"
            yield f"{metric.benchmark} · {metric.name} is {metric.value:.6g}, and {source} {shown}"
