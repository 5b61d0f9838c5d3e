"""Builds: versions of all that can change a number beside its settings; and qualifications, which say if they do.

A qualification lies in `<evaluation_path>/qualifications/verdicts/`, beside the records that are read with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from pydantic import AwareDatetime, ValidationError

from resources.errors import IrregularFile
from resources.storage import storage
from tasks.records.details import Part
from tasks.records.record import QUALIFICATIONS_FOLDER, CheckpointReference, FoundRecord, Record

PACKAGES = "packages"
"""Name of the digest over a whole pinned list among the versions of an engine or harness."""
_VERDICTS = "verdicts"
_NOT_THE_HARNESS = ("assay", "python", "prefect", "method", "judge", "annotator")
_FIRST_METHOD = "1"

Verdict = Literal["identical", "within noise", "different"]


class Build(Part):
    """Versions of all that can change a number beside its settings, as far as they are known."""

    engine: dict[str, str] = {}
    """Versions of the engine and its packages; empty for an endpoint of others."""
    harness: dict[str, str] = {}
    """Versions of the harness and its packages."""
    data: dict[str, str] = {}
    """Revisions of data sets, by benchmark."""
    method: str = _FIRST_METHOD
    """Version of the way in which Assay itself puts questions."""

    def changes(self, later: Build) -> tuple[str, ...]:
        """Returns what is known to differ in a later build, in words; what either does not say is no difference."""
        found: list[str] = []
        for title, before, after in (
            ("engine", self.engine, later.engine),
            ("harness", self.harness, later.harness),
            ("data of", self.data, later.data),
        ):
            names = [name for name in before if name in after and before[name] != after[name]]
            named = [name for name in names if name != PACKAGES] or names  # a changed package changes the list as well
            found += [f"{title} {name} {before[name]} → {after[name]}" for name in named]
        if self.method != later.method:
            found.append(f"Assay's method {self.method} → {later.method}")
        return tuple(found)

    def updated(self, later: Build) -> Build:
        """Returns a later build, with what that does not say as it is here."""
        return Build(
            engine={**self.engine, **later.engine},
            harness={**self.harness, **later.harness},
            data={**self.data, **later.data},
            method=later.method,
        )


class QualifiedMetric(Part):
    """A metric of one benchmark, measured with two builds on the same questions."""

    name: str
    """Metric as the harness calls it."""
    before: float
    """Its value with the former build."""
    after: float
    """Its value with the later one."""
    low: float | None = None
    """Lower end of the 95 % interval of the difference; empty where it cannot be known."""
    high: float | None = None
    """Upper end of that interval."""
    p: float | None = None
    """Chance of a difference as large where there is none, adjusted for the number of metrics."""
    verdict: Verdict
    """Finding for this metric."""

    @property
    def bound(self) -> float | None:
        """The largest change that the interval leaves open; None where it is not known."""
        if self.verdict == "identical":
            return 0.0
        return None if self.low is None or self.high is None else max(abs(self.low), abs(self.high))


class QualifiedBenchmark(Part):
    """A benchmark, asked of one checkpoint with two builds."""

    evaluator: str
    """The harness."""
    benchmark: str
    """Name it is published under."""
    before: Build
    """The former build."""
    after: Build
    """The later one."""
    verdict: Verdict
    """The worst of its metrics' verdicts; identical only if no question, prompt, answer or score differs either."""
    questions: int
    """Questions that were asked with both."""
    only_before: int = 0
    """Questions that only the former build asked."""
    only_after: int = 0
    """Questions that only the later one asked."""
    other_prompts: int = 0
    """Questions put in other words."""
    other_outputs: int = 0
    """Questions with another output."""
    other_log_likelihoods: int = 0
    """Questions with another log-likelihood."""
    largest_shift: float | None = None
    """Largest difference of a log-likelihood, in nats; empty where none is known."""
    other_scores: int = 0
    """Questions with another score."""
    evidence: tuple[str, ...] = ()
    """Questions that differ in any of these, by name, those with other scores first; as many as fit."""
    metrics: tuple[QualifiedMetric, ...] = ()
    """Its metrics."""


class Qualification(Part):
    """The verdict on a change of builds, from one checkpoint that was asked with both."""

    schema_version: Literal[1] = 1
    """Version of this layout."""
    checkpoint: CheckpointReference
    """The checkpoint that was asked."""
    compared: tuple[str, str]
    """The two sides, as they were named: folders of records, or pinned lists."""
    margin: float
    """Largest difference that counts as noise, on each metric's own scale."""
    benchmarks: tuple[QualifiedBenchmark, ...]
    """Verdicts by benchmark."""
    created: AwareDatetime
    """Time it was written, UTC."""


def build_of(record: Record, benchmark: str | None = None) -> Build:
    """Returns the build behind a record, with the data of one benchmark, or of a group's parts; of all if None."""
    engine = record.served.get("engine") or {}
    packages = {str(name): str(version) for name, version in (engine.get(PACKAGES) or {}).items()}
    version = {str(engine["name"]): str(engine["version"])} if engine.get("name") and engine.get("version") else {}
    parts = {benchmark, *(part for metric in record.metrics if metric.benchmark == benchmark for part in metric.parts)}
    data = {name: details.data for name, details in record.details.items() if details.data is not None}
    return Build(
        engine={**version, **packages},
        harness={
            name: version
            for name, version in record.versions.items()
            if name not in _NOT_THE_HARNESS and " " not in name  # notes of a judge are sentences
        },
        data=data if benchmark is None else {name: found for name, found in data.items() if name in parts},
        method=record.versions.get("method", _FIRST_METHOD),
    )


def unqualified_changes(
    before: Record, after: Record, qualifications: Iterable[Qualification], *, benchmark: str
) -> tuple[str, ...]:
    """Returns changes of the build between two records of one evaluator that nothing qualifies for a benchmark."""
    builds = build_of(before, benchmark), build_of(after, benchmark)
    if is_qualified(*builds, qualifications, evaluator=before.evaluator, benchmark=benchmark):
        return ()
    return builds[0].changes(builds[1])


def is_qualified(
    before: Build, after: Build, qualifications: Iterable[Qualification], *, evaluator: str, benchmark: str
) -> bool:
    """Returns True if numbers of two builds may share a line: see `qualified_steps`."""
    return qualified_steps(before, after, qualifications, evaluator=evaluator, benchmark=benchmark) is not None


def qualified_steps(
    before: Build, after: Build, qualifications: Iterable[Qualification], *, evaluator: str, benchmark: str
) -> tuple[QualifiedBenchmark, ...] | None:
    """The fewest verdicts that lead from one build to another, in either direction; none where both are alike.

    None where nothing leads there. A step that was once found different is not among them.
    """
    judged = [
        found
        for qualification in qualifications
        for found in qualification.benchmarks
        if (found.evaluator, found.benchmark) == (evaluator, benchmark)
    ]
    refused = [found for found in judged if found.verdict == "different"]
    steps = [
        (*ends, found)
        for found in judged
        if not any(_same_step(found, other) for other in refused)
        for ends in ((found.before, found.after), (found.after, found.before))
    ]
    reached: list[tuple[Build, tuple[QualifiedBenchmark, ...]]] = [(before, ())]
    for here, way in reached:
        if not here.changes(after):
            return way
        for start, end, found in steps:
            there = here.updated(end)
            if not here.changes(start) and all(there != other for other, _ in reached):
                reached.append((there, (*way, found)))
    return None


def qualified_words(steps: Sequence[QualifiedBenchmark], metric: str) -> str:
    """The change of a metric that verdicts leave open, formatted: their bounds add up."""
    noisy = [step for step in steps if step.verdict != "identical"]
    if not noisy:
        return "qualified as identical"
    bounds = [found.bound for step in noisy for found in step.metrics if found.name == metric]
    known = [bound for bound in bounds if bound is not None]
    if len(known) < len(noisy):
        return f"qualified within noise, but nothing bounds how far {metric} may differ"
    added = f", the sum of {len(noisy)} steps" if len(noisy) > 1 else ""
    return f"qualified within noise: {metric} may differ by {math.fsum(known):.3g} at most (95 %{added})"


def _same_step(first: QualifiedBenchmark, second: QualifiedBenchmark) -> bool:
    def same(*builds: Build) -> bool:
        return not builds[0].changes(builds[1])

    return (same(first.before, second.before) and same(first.after, second.after)) or (
        same(first.before, second.after) and same(first.after, second.before)
    )


def read_qualifications(evaluation_path: str) -> tuple[Qualification, ...]:
    """Every readable qualification beside some records, the oldest first."""
    found: list[Qualification] = []
    for file in storage.list_files(storage.join(evaluation_path, QUALIFICATIONS_FOLDER, _VERDICTS)):
        try:
            found.append(Qualification.model_validate_json(storage.read_bytes(file.uri)))
        except (FileNotFoundError, IrregularFile, ValidationError):  # of a newer Assay, or none
            continue
    return tuple(sorted(found, key=lambda qualification: qualification.created))


def qualifications_beside(found: Iterable[FoundRecord]) -> tuple[Qualification, ...]:
    """Every qualification in the evaluation paths that some records lie in."""
    paths = dict.fromkeys(_evaluation_path(storage.absolute(item.cell_uri)) for item in found)
    return tuple(qualification for path in paths for qualification in read_qualifications(path))


def _evaluation_path(cell_uri: str) -> str:
    for _ in ("cell", "evaluator", "step", "run"):
        cell_uri = storage.parent(cell_uri)
    return cell_uri


def write_qualification(evaluation_path: str, qualification: Qualification) -> str:
    """Writes a qualification beside the records it is for, and returns its file; never over another one."""
    content = qualification.model_dump_json(indent=2).encode()
    folder = storage.join(evaluation_path, QUALIFICATIONS_FOLDER, _VERDICTS)
    stem = f"{qualification.created:%Y%m%dT%H%M%S%f}-{qualification.checkpoint.name}"
    uris = (storage.join(folder, f"{stem}-{number}.json") for number in count(1))
    return next(uri for uri in uris if storage.create_bytes(uri, content))


@dataclass(frozen=True)
class BuildChange:
    """A change of versions inside a series, at the first checkpoint with the new ones."""

    run: str
    step: int
    words: tuple[str, ...]
    qualified: str
    """The change that verdicts leave open, formatted; empty where nothing qualifies it."""

    @property
    def text(self) -> str:
        """The change in a line."""
        return f"{'; '.join(self.words)} ({self.qualified or 'not qualified, so the line is broken'})"


def build_changes(
    numbers: Iterable[tuple[CheckpointReference, Record]],
    *,
    evaluator: str,
    benchmark: str,
    metric: str,
    qualifications: Sequence[Qualification],
) -> list[BuildChange]:
    """Returns changes between neighbouring checkpoints of each run; `numbers` are those of one series, by step."""
    found: list[BuildChange] = []
    builds: dict[str, Build] = {}
    for checkpoint, record in numbers:
        later, build = build_of(record, benchmark), builds.get(checkpoint.run)
        if build is not None and (words := build.changes(later)):
            steps = qualified_steps(build, later, qualifications, evaluator=evaluator, benchmark=benchmark)
            qualified = "" if steps is None else qualified_words(steps, metric)
            found.append(BuildChange(checkpoint.run, checkpoint.step, words, qualified))
        builds[checkpoint.run] = build.updated(later) if build is not None else later
    return found
