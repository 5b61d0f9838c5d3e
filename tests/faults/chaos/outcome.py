"""Inspects the results and leftovers of an evaluation."""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from faults.chaos.evaluation import IN_FLIGHT, RUN, SAMPLED, Place
from faults.chaos.roles import Tree
from faults.scenarios.processes import listens_on
from pools.journal.schema import unpacked
from tasks.records.record import JOURNAL_FOLDER, SCOPE_NAME, Record, find_records
from tasks.records.samples import SAMPLES_NAME, Sample, read_samples
from tasks.running.claims.files import claims_folder, read_claims

_SHOWN = 3
_CANARIES_PER_START = 16


@dataclass(frozen=True)
class Answered:
    """The content of a journal: number of answers, and the texts of sampled answers."""

    answers: int
    sampled: Counter[str]


@dataclass(frozen=True)
class Outcome:
    """The end of an evaluation: its only record, with samples by benchmark and question."""

    record: Record
    samples: Mapping[tuple[str, str], Sample]
    sampled: Counter[str]
    """Texts that the harness has of the sampled benchmark, each repetition counted."""
    prompts: int
    """Prompts with an answer in the harness, each repetition counted."""


def answered(place: Place) -> Answered:
    path = place.cache / "journal" / "journal.sqlite"
    if not path.is_file():
        return Answered(0, Counter())
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as journal:
            (number,) = journal.execute("SELECT count(*) FROM answers").fetchone()
            rows = journal.execute("SELECT body FROM answers WHERE deterministic = 0").fetchall()
    except sqlite3.OperationalError:  # the file is being created
        return Answered(0, Counter())
    bodies = [json.loads(unpacked(body)) for (body,) in rows]
    return Answered(number, Counter(choice["text"] for body in bodies for choice in body["choices"]))


def count_answers(place: Place) -> int:
    """Counts the answers in the journal; 0 without a journal."""
    path = place.cache / "journal" / "journal.sqlite"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as journal:
            return journal.execute("SELECT count(*) FROM answers").fetchone()[0]
    except sqlite3.OperationalError:
        return 0


def outcome_of(place: Place) -> tuple[Outcome | None, list[str]]:
    """Returns the record and samples of an evaluation, and their errors."""
    records = find_records(str(place.evaluations))
    if len(records) != 1:
        return None, [f"{len(records)} records, 1 is expected"]
    record, folder = records[0].record, Path(records[0].cell_uri)
    if not record.succeeded:
        return None, [f"the record is {record.status}: {record.reason}"]
    samples = list(read_samples(str(folder / record.attempt / SAMPLES_NAME)))
    times = Counter((sample.benchmark, sample.id) for sample in samples)
    wrong = [f"{benchmark} {name} is {n} times among the samples" for (benchmark, name), n in times.items() if n > 1]
    if record.samples != len(samples):
        wrong.append(f"the record says {record.samples} samples, and there are {len(samples)}")
    texts: Counter[str] = Counter()
    prompts = 0
    for file in (folder / record.attempt).glob("lm_eval/*/samples_*.jsonl"):
        for line in file.read_text().splitlines():
            answers = [answer for answers_of_prompt in json.loads(line)["resps"] for answer in answers_of_prompt]
            prompts += len(answers)
            if file.name.startswith(f"samples_{SAMPLED}_"):
                texts.update(answers)
    by_question = {(sample.benchmark, sample.id): sample for sample in samples}
    return Outcome(record, by_question, texts, prompts), wrong[:_SHOWN]


def differences(outcome: Outcome, undisturbed: Outcome) -> list[str]:
    """Returns differences from the undisturbed evaluation; sampled answers differ each time."""
    problems = []
    if outcome.record.counts != undisturbed.record.counts:
        problems.append(f"counts are {outcome.record.counts}, undisturbed {undisturbed.record.counts}")
    of, expected = _scores(outcome.record), _scores(undisturbed.record)
    if of != expected:
        problems.append(f"scores are {of}, undisturbed {expected}")
    if outcome.samples.keys() != undisturbed.samples.keys():
        problems.append("samples are of other questions")
    others = [
        f"{name}: {sample.output!r}, undisturbed {undisturbed.samples[name].output!r}"
        for name, sample in outcome.samples.items()
        if name[0] != SAMPLED and name in undisturbed.samples and sample != undisturbed.samples[name]
    ]
    if others:
        problems.append(f"{len(others)} samples differ, such as {'; '.join(others[:_SHOWN])}")
    if outcome.sampled.total() != undisturbed.sampled.total():
        problems.append(f"{outcome.sampled.total()} sampled answers, undisturbed {undisturbed.sampled.total()}")
    return problems


def _scores(record: Record) -> dict[str, tuple[float, float | None, int]]:
    return {
        f"{metric.benchmark} {metric.name}": (metric.value, metric.stderr, metric.n)
        for metric in record.metrics
        if metric.benchmark != SAMPLED
    }


def not_replayed(outcome: Outcome, before: Answered) -> list[str]:
    """Returns which sampled answers of before a kill are missing in the end."""
    missing = before.sampled - outcome.sampled
    if not missing:
        return []
    shown = ", ".join(repr(text) for text in list(missing)[:_SHOWN])
    return [f"{missing.total()} of {before.sampled.total()} sampled answers were sampled again, such as {shown}"]


def asked_too_often(asked: int, undisturbed: int, *, starts: int) -> list[str]:
    """Returns a text if engines answered more prompts than were lost, apart from the canaries of each start."""
    most = undisturbed + IN_FLIGHT + _CANARIES_PER_START * (starts - 1)
    return [f"engines answered {asked} prompts, undisturbed {undisturbed}; {most} would do"] if asked > most else []


def leftovers(place: Place, tree: Tree) -> list[str]:
    problems = []
    for process in tree.processes.values():
        ports = ", ".join(str(port) for _, port in listens_on(process.pid))
        where = f" at port {ports}" if ports else ""
        problems.append(f"process {process.pid}{where}: {process.executes[-160:]}")
    for record in find_records(str(place.evaluations)):
        kept = [Path(record.cell_uri) / SCOPE_NAME, *(Path(record.cell_uri) / JOURNAL_FOLDER).glob("*")]
        problems += [f"{path.name} next to the record" for path in kept if path.exists()]
    for folder in (place.evaluations, place.cache):
        problems += [str(path.relative_to(place.folder)) for path in folder.rglob("*.partial")]
    for name in ("pools", "proxies"):
        problems += [str(path.relative_to(place.folder)) for path in (place.cache / name).glob("*")]
    claims = read_claims(claims_folder(str(place.evaluations), RUN))
    problems += [f"a claim of {seen.claim.subject.key} is held" for seen in claims if seen.live(time.time())]
    return problems


def journal_damage(place: Place) -> list[str]:
    """Returns damage of the journal's file, and sampled answers that stay in it."""
    path = place.cache / "journal" / "journal.sqlite"
    with closing(sqlite3.connect(path)) as journal:
        verdict = [row[0] for row in journal.execute("PRAGMA integrity_check").fetchall()]
        (kept,) = journal.execute("SELECT count(*) FROM answers WHERE deterministic = 0").fetchone()
    problems = [] if verdict == ["ok"] else [f"the journal is damaged: {verdict[:_SHOWN]}"]
    return [*problems, f"{kept} sampled answers of a finished cell stay in the journal"] if kept else problems
