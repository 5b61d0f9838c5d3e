"""Reconciliation: the cells that a policy requests, minus those with records. A pure function of listings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Literal

from tasks.checkpoints.checkpoint import LOADED_NATIVELY, SERVED, CheckpointRule, Inputs, eligible, might_be_eligible
from tasks.checkpoints.merged_listing import past_means, past_steps
from tasks.checkpoints.run_snapshot import SeenCheckpoint
from tasks.policies.early import NOT_WORSE, EarlyDecisions
from tasks.policies.policy import Overrides, Policy, RetryBudget, WantedEvaluation
from tasks.records.index import Evaluated, RunRecords
from tasks.records.usage import IndexedRecord
from tasks.running.claims.files import CLOCKS_DIFFER_SECONDS, SeenClaim
from tasks.spec.labels import place_in

_ANY_TIME_BEFORE = 1.0  # later than 0, the time without an override

State = Literal[
    "work",
    "waiting",
    "failed",
    "backing_off",
    "retries_exhausted",
    "claimed",
    "scheduled",
    "stopped",
    "not_served",
    "held",
    "decided_early",
    "gone",
]
"""The reason that a requested cell is not done.

work: it can start now.
waiting: the checkpoint is incomplete.
failed: the model or the benchmark was at fault; needs `assay retry`.
backing_off: paused after an infrastructure failure.
retries_exhausted: too many infrastructure failures; needs `assay retry`.
claimed: it is being evaluated.
scheduled: it has a flow run at a work pool.
stopped: cancelled by `assay cancel`; needs `assay retry`.
not_served: in a trainer's own layout (export it or use Levanter), or a duplicate checkpoint name (remove either, or
choose by steps_from).
held: waits for the whole evaluation of an earlier checkpoint, which it is compared with early.
decided_early: not worse by an early verdict; evaluated whole only on an alarm.
gone: the checkpoint was removed before its evaluation; nothing is left to do.
"""
ON_ITS_WAY: frozenset[State] = frozenset({"work", "backing_off", "claimed", "scheduled", "held"})
"""States of cells that get a record or an early verdict without user action."""


@dataclass(frozen=True)
class RunListing:
    """The state of a run: checkpoints, records, claims and overrides."""

    run: str
    name: str
    evaluations: Sequence[WantedEvaluation]
    checkpoints: Sequence[SeenCheckpoint]
    records: RunRecords
    claims: Sequence[SeenClaim] = ()
    overrides: Overrides = field(default_factory=Overrides)
    early: EarlyDecisions | None = None

    def taken_by(self, rules: Sequence[CheckpointRule], *, final_step: int | None) -> set[Inputs]:
        """Returns the inputs of the checkpoints that rules select; see `eligible`. Of labels, rules other than `all`
        select none."""
        written = [checkpoint for checkpoint in self.checkpoints if len(checkpoint.inputs) == 1]
        averaged = [checkpoint for checkpoint in written if checkpoint.kind in SERVED] or written
        by_number = any(rule.every_n_steps for rule in rules)
        past = past_steps(self.records, self.name, self.checkpoints) if by_number else set()
        taken = partial(eligible, past=past, final_step=final_step)
        plain = [rule for rule in rules if rule.merged is None]
        labels: set[Inputs] = {()} if any(rule.which == "all" for rule in plain) else set()
        return (
            labels
            | taken(plain, [checkpoint.step for checkpoint in written if checkpoint.complete])
            | taken(
                [rule for rule in rules if rule.merged is not None],
                [checkpoint.step for checkpoint in averaged if checkpoint.complete],
                listed=[checkpoint.step for checkpoint in averaged],
            )
        )


@dataclass(frozen=True, slots=True)
class OpenCell:
    """A requested cell that is not done; `until` is when its state changes by itself, in seconds since the epoch.
    `early` is True if it will be or was decided early."""

    run: str
    checkpoint: SeenCheckpoint
    evaluation: WantedEvaluation
    state: State = "work"
    reason: str | None = None
    until: float | None = None
    early: bool = False

    @property
    def title(self) -> str:
        return f"{self.checkpoint.name} · {self.evaluation.title}"

    @property
    def key(self) -> tuple[str, str]:
        """Its name in overrides and claims of a run."""
        return self.checkpoint.name, self.evaluation.hash


@dataclass(frozen=True)
class Reconciliation:
    """The requested cells: counts of done cells, and lists of open cells; `work` is in order of execution. `left_out`
    is the number of complete checkpoints that no rule selects."""

    done: Mapping[tuple[str, str], int]
    work: Sequence[OpenCell]
    others: Sequence[OpenCell]
    left_out: int
    gone: Sequence[OpenCell] = ()
    """Cells of removed checkpoints, which are not open any more."""

    @property
    def done_count(self) -> int:
        return sum(self.done.values())

    @property
    def every(self) -> list[OpenCell]:
        return [*self.work, *self.others]

    def by_state(self) -> dict[State, list[OpenCell]]:
        cells: dict[State, list[OpenCell]] = defaultdict(list)
        for cell in self.every:
            cells[cell.state].append(cell)
        return dict(cells)


def reconcile(listings: Iterable[RunListing], policy: Policy, *, now: float) -> Reconciliation:
    """Computes the remaining work at the time `now`, in seconds since the epoch. A pure function of its arguments."""
    parts = [_reconcile_run(listing, policy, now=now) for listing in listings]
    done: Counter[tuple[str, str]] = Counter()
    for part in parts:
        done.update(part.done)
    work = [cell for part in parts for cell in part.work]
    work.sort(key=lambda cell: (-cell.evaluation.priority, cell.checkpoint.order, cell.run))
    others = [cell for part in parts for cell in part.others]
    gone = [cell for part in parts for cell in part.gone]
    return Reconciliation(done, work, others, sum(part.left_out for part in parts), gone)


_WantedOf = dict[Inputs, tuple[Sequence[WantedEvaluation], frozenset[str]]]
"""Evaluations requested of each checkpoint, and their hashes."""


def _reconcile_run(listing: RunListing, policy: Policy, *, now: float) -> Reconciliation:
    state = _RunState(listing, policy, now=now)
    complete = [checkpoint for checkpoint in listing.checkpoints if checkpoint.complete]
    past = past_steps(listing.records, listing.name, listing.checkpoints)
    steps = sorted({*past, *(checkpoint.step for checkpoint in complete if len(checkpoint.inputs) == 1)})
    wanted_of = _wanted_of_each(listing, final_step=policy.final_step)
    done: Counter[tuple[str, str]] = Counter()
    open_cells: list[OpenCell] = []
    finished: Counter[frozenset[str]] = Counter()
    for checkpoint in listing.checkpoints:
        if not (checkpoint.complete or checkpoint.merged):
            open_cells += [
                state.not_whole(OpenCell(listing.name, checkpoint, evaluation))
                for evaluation in listing.evaluations
                if (
                    might_be_eligible(evaluation.rules, checkpoint.step, steps, final_step=policy.final_step)
                    if checkpoint.label is None
                    else () in listing.taken_by(evaluation.rules, final_step=policy.final_step)
                )
            ]
        elif checkpoint.inputs in wanted_of:
            evaluations, hashes = wanted_of[checkpoint.inputs]
            recorded = state.recorded(checkpoint)
            if hashes <= recorded:
                finished[hashes] += 1
                continue
            for each in evaluations:
                if each.hash in recorded or (each.native_hash is not None and each.native_hash in recorded):
                    done[listing.name, each.hash] += 1
                else:
                    open_cells.append(state.decided(OpenCell(listing.name, checkpoint, each)))
    for hashes, times in finished.items():
        done.update({(listing.name, hash_): times for hash_ in hashes})
    if listing.early is not None:
        open_cells = _early_or_whole(listing, listing.early, open_cells, wanted_of)
    work = [cell for cell in open_cells if cell.state == "work"]
    others = [cell for cell in open_cells if cell.state != "work"]
    left_out = sum(checkpoint.inputs not in wanted_of for checkpoint in complete)
    return Reconciliation(done, work, others, left_out, list(_gone(listing)))


def _gone(listing: RunListing) -> Iterator[OpenCell]:
    listed = {checkpoint.name for checkpoint in listing.checkpoints}
    evaluations = {hash_: each for each in listing.evaluations for hash_ in (each.hash, each.native_hash)}
    for record in listing.records.others:
        evaluation, place = evaluations.get(record.evaluation_hash), place_in(record.cell.partition("/")[0])
        if record.status == "gone" and record.checkpoint not in listed and evaluation and place:
            step, label = place
            seen = SeenCheckpoint(
                "", listing.name, record.checkpoint, step, "huggingface", record.listing or "", (), label=label
            )
            yield OpenCell(listing.name, seen, evaluation, "gone", record.reason)


def _early_or_whole(
    listing: RunListing, early: EarlyDecisions, cells: Sequence[OpenCell], wanted_of: _WantedOf
) -> list[OpenCell]:
    steps: dict[str, set[int]] = defaultdict(set)
    for inputs, (_, hashes) in wanted_of.items():
        for hash_ in hashes if len(inputs) == 1 else ():
            steps[hash_].add(inputs[0])
    for name, recorded in listing.records.done.items():  # deleted checkpoints count, too
        number = name.removeprefix(f"{listing.name}-")
        for hash_ in frozenset().union(*(state.hashes for state in recorded)) if number.isdecimal() else ():
            steps[hash_].add(int(number))
    whole_at = {each.hash: early.whole_steps(steps[each.hash], each.hash) for each in listing.evaluations}
    decided: list[OpenCell] = []
    for cell in cells:
        if cell.state in ("waiting", "not_served") or len(cell.checkpoint.inputs) != 1:  # few, so evaluated whole
            decided.append(cell)
        elif why := early.whole_because(cell.checkpoint, cell.evaluation):
            decided.append(replace(cell, reason=cell.reason or why))
        elif early.word(cell.checkpoint, cell.evaluation) is not None:
            decided.append(replace(cell, state="decided_early", reason=NOT_WORSE, until=None, early=True))
        else:
            decided.append(replace(cell, early=cell.checkpoint.step not in whole_at[cell.evaluation.hash]))
    if not early.gate.looks_back:
        return decided
    first_whole: dict[str, int] = {}
    for cell in decided:
        if not cell.early and cell.state in ON_ITS_WAY and cell.checkpoint.label is None:
            hash_, step = cell.evaluation.hash, cell.checkpoint.step
            first_whole[hash_] = min(step, first_whole.get(hash_, step))
    for place, cell in enumerate(decided):
        step = first_whole.get(cell.evaluation.hash, cell.checkpoint.step)
        if cell.early and cell.state == "work" and step < cell.checkpoint.step:
            decided[place] = replace(cell, state="held", reason=f"step {step} is evaluated whole first")
    return decided


def _wanted_of_each(listing: RunListing, *, final_step: int | None) -> _WantedOf:
    taken = {
        rules: listing.taken_by(rules, final_step=final_step)
        for rules in dict.fromkeys(evaluation.rules for evaluation in listing.evaluations)
    }
    numbers = {rules: number for number, rules in enumerate(taken)}
    interned: dict[tuple[int, ...], tuple[Sequence[WantedEvaluation], frozenset[str]]] = {}
    wanted_of: _WantedOf = {}
    for inputs in set().union(*taken.values()):
        key = tuple(number for number, taken_by_rules in enumerate(taken.values()) if inputs in taken_by_rules)
        if key not in interned:
            evaluations = [evaluation for evaluation in listing.evaluations if numbers[evaluation.rules] in key]
            interned[key] = evaluations, frozenset(evaluation.hash for evaluation in evaluations)
        wanted_of[inputs] = interned[key]
    return wanted_of


class _RunState:
    def __init__(self, listing: RunListing, policy: Policy, *, now: float) -> None:
        self._listing, self._policy, self._now = listing, policy, now
        self._failures: dict[tuple[str, str], list[IndexedRecord]] = defaultdict(list)
        self._digests: dict[tuple[str, str | None], set[str]] = defaultdict(set)
        for record in listing.records.others:
            known = record._replace(created=self._known_time(record.created))
            self._failures[record.checkpoint, record.evaluation_hash].append(known)
            self._digests[record.checkpoint, record.listing].add(record.digest)
        for name, recorded in listing.records.done.items():
            for state in recorded if len(recorded) > 1 or listing.records.others else ():
                self._digests[name, state.listing].add(state.digest)
        subjects = ((claim.claim.subject, claim) for claim in listing.claims)
        self._claims = {(subject.checkpoint, subject.evaluation_hash): claim for subject, claim in subjects}
        self._has_overrides = bool(listing.overrides.by_cell or listing.overrides.by_policy)
        self._past = past_means(listing.records.done, listing.checkpoints)
        names = Counter(checkpoint.name for checkpoint in listing.checkpoints)
        self._twice = {name for name, times in names.items() if times > 1}

    def _known_time(self, seconds: float) -> float:
        return seconds if seconds <= self._now + CLOCKS_DIFFER_SECONDS else _ANY_TIME_BEFORE

    def recorded(self, checkpoint: SeenCheckpoint) -> frozenset[str]:
        states = [
            state.hashes
            for state in self._listing.records.done.get(checkpoint.name, ())
            if self._is_of(checkpoint, state)
        ]
        if checkpoint.merged:
            states += self._past.get((checkpoint.step, len(checkpoint.merged)), [])
        return states[0] if len(states) == 1 else frozenset().union(*states)

    def _is_of(self, checkpoint: SeenCheckpoint, recorded: Evaluated | IndexedRecord) -> bool:
        if checkpoint.digest is not None:
            return recorded.digest == checkpoint.digest
        return recorded.listing == checkpoint.listing or recorded.digest in self._digests.get(
            (checkpoint.name, checkpoint.listing), ()
        )

    def not_whole(self, cell: OpenCell) -> OpenCell:
        checkpoint = cell.checkpoint
        waits = checkpoint.kind in (SERVED if checkpoint.merged else LOADED_NATIVELY)
        return replace(cell, state="waiting" if waits else "not_served", reason="; ".join(checkpoint.problems))

    def decided(self, cell: OpenCell) -> OpenCell:
        checkpoint = cell.checkpoint
        if checkpoint.problems:
            return self.not_whole(cell)
        if checkpoint.name in self._twice:
            why = f"two checkpoints are called {checkpoint.name}: remove either, or choose by steps_from"
            return replace(cell, state="not_served", reason=why)
        if checkpoint.kind == "levanter" and not cell.evaluation.config.native:
            why = "in Levanter's own layout: export it to Hugging Face format, or have Levanter evaluate it"
            return replace(cell, state="not_served", reason=why)
        override = self._listing.overrides.newest(*cell.key, policy=self._policy.name) if self._has_overrides else None
        if override is not None and override.kind == "stop":
            return replace(cell, state="stopped", reason=f"cancelled {override.by} at {moment(override.at)}")
        claim = self._claims.get(cell.key)
        if claim is not None and claim.claim.subject.listing not in (None, checkpoint.listing):
            claim = None  # the claim is on an earlier state of the checkpoint
        if claim is not None and claim.live(self._now) and claim.holder is not None:
            holder = f"{claim.holder.user} on {claim.holder.process.machine.partition(' ')[0]}"
            return replace(cell, state="claimed", reason=holder, until=claim.until())
        return self._after_failures(cell, claim, since=override.at if override is not None else 0.0)

    def _after_failures(self, cell: OpenCell, claim: SeenClaim | None, *, since: float) -> OpenCell:
        hashes = filter(None, (cell.evaluation.hash, cell.evaluation.native_hash) if self._failures else ())
        of_cell = [record for hash_ in hashes for record in self._failures.get((cell.checkpoint.name, hash_), ())]
        failed = [record for record in of_cell if self._is_of(cell.checkpoint, record)]
        last = max(failed, key=lambda record: record.created, default=None)
        if last is not None and last.created <= since:
            last = None
        if last is not None and last.status in ("failed", "withheld"):
            return replace(cell, state="failed", reason=last.reason)
        at = self._known_time(claim.claim.at) if claim is not None else 0.0
        deaths = claim.claim.deaths + 1 if claim is not None and claim.died(self._now) and at > since else 0
        failures = deaths + (last.infra_failures if last is not None else 0)
        if failures == 0:
            return cell
        reason = last.reason if last is not None else "the run that had it died"
        ended = max(last.created if last is not None else 0.0, at if deaths else 0.0)
        return by_budget(cell, self._policy.retries, failures=failures, ended=ended, reason=reason, now=self._now)


def by_budget(
    cell: OpenCell, budget: RetryBudget, *, failures: int, ended: float, reason: str | None, now: float
) -> OpenCell:
    """Returns a cell after failures of machines in a row, the last `ended`: for now, for later, or for no other try."""
    if failures > budget.infra_failures:
        return replace(cell, state="retries_exhausted", reason=f"{failures} failures in a row; the last: {reason}")
    due = ended + budget.delay_seconds(failures)
    if now < due:
        return replace(cell, state="backing_off", reason=f"failure {failures}: {reason}", until=due)
    return replace(cell, state="work", reason=f"again after failure {failures}")


def moment(seconds: float) -> str:
    """Formats a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
