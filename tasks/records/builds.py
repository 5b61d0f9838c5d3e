"""Builds: versions, besides settings, that can change a score; and qualifications, which measure if they do.

Qualifications are stored in `<evaluation_path>/qualifications/verdicts/`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from pydantic import AwareDatetime

from resources.storage import storage
from tasks.records.details import CheckpointReference, Part, read_model
from tasks.records.record import QUALIFICATIONS_FOLDER, FoundRecord, Record

PACKAGES = "packages"
"""Key, in the versions of an engine or harness, of the digest over its whole list of pinned packages."""
_VERDICTS = "verdicts"
_NOT_THE_HARNESS = ("assay", "python", "prefect", "method", "judge", "annotator")
_FIRST_METHOD = "1"

Verdict = Literal["identical", "within noise", "different"]


class Build(Part):
    """Known versions, besides settings, that can change a score."""

    engine: dict[str, str] = {}
    """Versions of the engine and its packages; empty for a foreign endpoint."""
    harness: dict[str, str] = {}
    """Versions of the harness and its packages."""
    data: dict[str, str] = {}
    """Revisions of data sets, by benchmark."""
    method: str = _FIRST_METHOD
    """Version of the method by which Assay builds and counts requests."""

    def changes(self, later: Build) -> tuple[str, ...]:
        """Returns the known differences to a later build, formatted; versions missing in either are not compared."""
        changes: list[str] = []
        for title, before, after in (
            ("engine", self.engine, later.engine),
            ("harness", self.harness, later.harness),
            ("data of", self.data, later.data),
        ):
            names = [name for name in before if name in after and before[name] != after[name]]
            named = [name for name in names if name != PACKAGES] or names  # a changed package changes the list too
            changes += [f"{title} {name} {before[name]} → {after[name]}" for name in named]
        if self.method != later.method:
            changes.append(f"Assay's method {self.method} → {later.method}")
        return tuple(changes)

    def updated(self, later: Build) -> Build:
        """Returns the later build, its missing versions filled in from this build."""
        return Build(
            engine={**self.engine, **later.engine},
            harness={**self.harness, **later.harness},
            data={**self.data, **later.data},
            method=later.method,
        )


class QualifiedMetric(Part):
    """A metric of a benchmark, measured with two builds on the same questions."""

    name: str
    """Metric as the harness calls it."""
    before: float
    """Value with the former build."""
    after: float
    """Value with the later build."""
    low: float | None = None
    """Lower end of the 95 % interval of the difference; empty where it cannot be computed."""
    high: float | None = None
    """Upper end of the 95 % interval of the difference."""
    p: float | None = None
    """Probability of a difference at least as large by chance (p-value), adjusted for the number of metrics."""
    verdict: Verdict
    """Verdict on this metric."""

    @property
    def bound(self) -> float | None:
        """Largest absolute change within the interval; None if there is no interval."""
        if self.verdict == "identical":
            return 0.0
        return None if self.low is None or self.high is None else max(abs(self.low), abs(self.high))


class QualifiedBenchmark(Part):
    """A benchmark, evaluated with two builds on the same checkpoint."""

    evaluator: str
    """The harness."""
    benchmark: str
    """Name it is published under."""
    before: Build
    """The former build."""
    after: Build
    """The later build."""
    verdict: Verdict
    """Worst verdict of its metrics; identical only if all questions, prompts, answers and scores are the same too."""
    questions: int
    """Questions evaluated with both builds."""
    only_before: int = 0
    """Questions evaluated only with the former build."""
    only_after: int = 0
    """Questions evaluated only with the later build."""
    other_prompts: int = 0
    """Questions with a different prompt."""
    other_outputs: int = 0
    """Questions with a different output."""
    other_log_likelihoods: int = 0
    """Questions with a different log-likelihood."""
    largest_shift: float | None = None
    """Largest difference of a log-likelihood, in nats; empty without log-likelihoods."""
    other_scores: int = 0
    """Questions with a different score."""
    evidence: tuple[str, ...] = ()
    """Names of questions with any of these differences, those with different scores first; cut to a maximum number."""
    metrics: tuple[QualifiedMetric, ...] = ()
    """Its metrics."""


class Qualification(Part):
    """Verdicts on a change of builds, measured on a checkpoint that was evaluated with both."""

    schema_version: Literal[1] = 1
    """Version of this layout."""
    checkpoint: CheckpointReference
    """The evaluated checkpoint."""
    compared: tuple[str, str]
    """The two sides as given by the user: folders of records, or lists of pinned packages."""
    margin: float
    """Largest difference that counts as noise, on the metric's own scale."""
    benchmarks: tuple[QualifiedBenchmark, ...]
    """Verdicts by benchmark."""
    created: AwareDatetime
    """Time it was written, UTC."""


def build_of(record: Record, benchmark: str | None = None) -> Build:
    """Returns a record's build, with data revisions of a benchmark or of a group's parts; of all if it is None."""
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
            if name not in _NOT_THE_HARNESS and " " not in name  # names with spaces are notes of a judge
        },
        data=data if benchmark is None else {name: revision for name, revision in data.items() if name in parts},
        method=record.versions.get("method", _FIRST_METHOD),
    )


def unqualified_changes(
    before: Record, after: Record, qualifications: Iterable[Qualification], *, benchmark: str
) -> tuple[str, ...]:
    """Returns the build changes between two records of an evaluator, empty if a qualification covers them."""
    builds = build_of(before, benchmark), build_of(after, benchmark)
    if is_qualified(*builds, qualifications, evaluator=before.evaluator, benchmark=benchmark):
        return ()
    return builds[0].changes(builds[1])


def is_qualified(
    before: Build, after: Build, qualifications: Iterable[Qualification], *, evaluator: str, benchmark: str
) -> bool:
    """Returns True if scores of two builds may share a curve: see `qualified_steps`."""
    return qualified_steps(before, after, qualifications, evaluator=evaluator, benchmark=benchmark) is not None


def qualified_steps(
    before: Build, after: Build, qualifications: Iterable[Qualification], *, evaluator: str, benchmark: str
) -> tuple[QualifiedBenchmark, ...] | None:
    """Returns the shortest chain of verdicts between two builds; empty if the builds do not differ.

    Verdicts apply in both directions. A change with a "different" verdict anywhere is excluded. None if there is no
    chain.
    """
    judged = [
        step
        for qualification in qualifications
        for step in qualification.benchmarks
        if (step.evaluator, step.benchmark) == (evaluator, benchmark)
    ]
    refused = [step for step in judged if step.verdict == "different"]
    steps = [
        (*ends, step)
        for step in judged
        if not any(_same_step(step, other) for other in refused)
        for ends in ((step.before, step.after), (step.after, step.before))
    ]
    reached: list[tuple[Build, tuple[QualifiedBenchmark, ...]]] = [(before, ())]
    for build, way in reached:
        if not build.changes(after):
            return way
        for start, end, step in steps:
            next_build = build.updated(end)
            if not build.changes(start) and all(next_build != other for other, _ in reached):
                reached.append((next_build, (*way, step)))
    return None


def qualified_words(steps: Sequence[QualifiedBenchmark], metric: str) -> str:
    """Returns the largest change of a metric that the verdicts allow, formatted: the sum of their bounds."""
    noisy = [step for step in steps if step.verdict != "identical"]
    if not noisy:
        return "qualified as identical"
    bounds = [verdict.bound for step in noisy for verdict in step.metrics if verdict.name == metric]
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
    """Returns the readable qualifications below an evaluation path, oldest first."""
    files = storage.list_files(storage.join(evaluation_path, QUALIFICATIONS_FOLDER, _VERDICTS))
    qualifications = filter(None, [read_model(file.uri, Qualification) for file in files])
    return tuple(sorted(qualifications, key=lambda qualification: qualification.created))


def qualifications_of(entries: Iterable[FoundRecord]) -> tuple[Qualification, ...]:
    """Returns the qualifications in the evaluation paths of some records."""
    paths = dict.fromkeys(_evaluation_path(storage.absolute(entry.cell_uri)) for entry in entries)
    return tuple(qualification for path in paths for qualification in read_qualifications(path))


def _evaluation_path(cell_uri: str) -> str:
    for _ in ("cell", "evaluator", "step", "run"):
        cell_uri = storage.parent(cell_uri)
    return cell_uri


def write_qualification(evaluation_path: str, qualification: Qualification) -> str:
    """Writes a qualification to a new file below an evaluation path and returns its URI; never overwrites a file."""
    content = qualification.model_dump_json(indent=2).encode()
    folder = storage.join(evaluation_path, QUALIFICATIONS_FOLDER, _VERDICTS)
    stem = f"{qualification.created:%Y%m%dT%H%M%S%f}-{qualification.checkpoint.name}"
    uris = (storage.join(folder, f"{stem}-{number}.json") for number in count(1))
    return next(uri for uri in uris if storage.create_bytes(uri, content))


@dataclass(frozen=True)
class BuildChange:
    """A change of versions between two checkpoints of a series; `step` is the first with the later versions."""

    run: str
    step: int
    words: tuple[str, ...]
    qualified: str
    """Largest change that the verdicts allow, formatted; empty without a qualification."""

    @property
    def text(self) -> str:
        return f"{'; '.join(self.words)} ({self.qualified or 'not qualified, so the line is broken'})"


def build_changes(
    numbers: Iterable[tuple[CheckpointReference, Record]],
    *,
    evaluator: str,
    benchmark: str,
    metric: str,
    qualifications: Sequence[Qualification],
) -> list[BuildChange]:
    """Returns the changes between neighboring checkpoints of each run; `numbers` is a single series, sorted by step;
    checkpoints with a label are left out."""
    changes: list[BuildChange] = []
    builds: dict[str, Build] = {}
    for checkpoint, record in numbers:
        if checkpoint.label is not None:
            continue
        later, build = build_of(record, benchmark), builds.get(checkpoint.run)
        if build is not None and (words := build.changes(later)):
            steps = qualified_steps(build, later, qualifications, evaluator=evaluator, benchmark=benchmark)
            qualified = "" if steps is None else qualified_words(steps, metric)
            changes.append(BuildChange(checkpoint.run, checkpoint.step, words, qualified))
        builds[checkpoint.run] = build.updated(later) if build is not None else later
    return changes
