"""`assay gate`: GO or NO-GO on existing records; and the options and output of `assay evaluate --gate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.cli.options.pools import OptionGroup
from flows.cli.records import Folder
from flows.console.console import OUT, Json, print_json, say_rejected
from resources.errors import BadInput
from resources.storage import storage
from tasks.records.details import CheckpointReference
from tasks.records.record import find_records
from tasks.records.search import records_of_checkpoints
from tasks.records.verdicts import Verdict
from tasks.reports.texts import verdict_markdown, verdict_table
from tasks.running.early import early_below
from tasks.spec.labels import folder_of
from tasks.spec.loading import build_config, load_config
from tasks.verdicts.gate import Gate
from tasks.verdicts.judge import JudgedCheckpoint, judge, judged_checkpoints, with_rejected


@Parameter(name="*")
@dataclass(frozen=True)
class GateOptions(OptionGroup):
    """A gate on the evaluation of a command."""

    gate: str | None = None
    """YAML file with a gate; the exit code is 1 where it says NO-GO."""
    summary: Path | None = None
    """File to append the verdict to as Markdown, such as $GITHUB_STEP_SUMMARY."""

    def loaded(self) -> Gate | None:
        """Returns the gate; None without the option."""
        if self.gate is None and self.summary is not None:
            raise BadInput(expected="--gate with --summary", found="none", remedy="leave --summary out, or name a gate")
        return load_config(self.gate, Gate) if self.gate is not None else None


@Parameter(name="*")
@dataclass(frozen=True)
class EarlyOptions(OptionGroup):
    """Options for a gate's verdict before all questions are evaluated."""

    early: bool = False
    """Stop asking once --gate is decided: is the whole worse than the baseline by the margin?"""
    alpha: float | None = None
    """Largest probability that the whole contradicts early verdicts on a checkpoint, per baseline."""
    finish: bool = False
    """Ask the rest where an earlier run was decided early, and nothing else."""

    def applied_to(self, gate: Gate | None) -> Gate | None:
        """Returns the gate with these options."""
        if gate is None or (self.early and self.finish):
            if not self.given():
                return None
            raise BadInput(
                expected="--gate with --early, --alpha or --finish, and only one of --early and --finish",
                found="no gate" if gate is None else "both",
                remedy="name a gate" if gate is None else "decide early first, and finish then",
            )
        changes = {
            "decide": "early" if self.early else "whole" if self.finish else gate.decide,
            "whole_every": None,  # applies to a policy's checkpoints only
            "alpha": gate.alpha if self.alpha is None else self.alpha,
        }
        return build_config({**gate.model_dump(), **changes}, Gate, source="--gate with --early")


def gate(
    file: Annotated[str, Parameter(help="YAML file with a gate.")],
    /,
    *,
    records: Folder = "evaluations",
    run: str | None = None,
    step: int | None = None,
    checkpoint: str | None = None,
    early: bool = False,
    summary: Path | None = None,
    as_json: Json = False,
) -> None:
    """Judge recorded results: GO (exit code 0) or NO-GO (1), with the reasons.

    Args:
        run: The run; may be left out if it is the only run.
        step: Training step; the latest or every step, as the gate says, when left out.
        checkpoint: The checkpoint, as in assay compare: NAME, RUN@LABEL, or mean(RUN@STEPS) if merged.
        early: Judge by early verdicts, too, where the whole is not recorded.
        summary: File to append the verdict to as Markdown, such as $GITHUB_STEP_SUMMARY.
    """
    if checkpoint is not None and not (run is step is None):
        raise BadInput(expected="--checkpoint, or --run and --step", found="both", remedy="leave --run and --step out")
    gate_config = load_config(file, Gate)
    early = early or gate_config.decide == "early"
    judged = (
        _checkpoints(records, run=run, step=step, early=early)
        if checkpoint is None
        else _named(checkpoint, records, early=early)
    )
    verdict = judge(gate_config, judged, evaluation_path=records)
    write_summaries([verdict], summary)
    if as_json:
        print_json(verdict.as_dict())
    else:
        show_verdict(verdict)
    verdict.raise_unless_go()


def undecided_steps(evaluation_path: str, run: str) -> tuple[int, ...]:
    """Returns the steps of a run that have early verdicts but no succeeded record."""
    folder = storage.join(evaluation_path, run)
    steps = {verdict.checkpoint.step for verdict in early_below(folder) if verdict.checkpoint.label is None}
    if not steps:
        raise BadInput(
            expected=f"early verdicts below {folder} without a whole evaluation yet",
            found="none",
            remedy="decide early first (--early), or leave --finish out to evaluate whole",
        )
    return tuple(sorted(steps))


def show_verdict(verdict: Verdict) -> None:
    """Prints the verdict as a table, with GO or NO-GO at the end."""
    OUT.print(verdict_table(verdict))
    OUT.print(f"{verdict.gate}: {verdict.word}", highlight=False)


def write_summaries(verdicts: Sequence[Verdict], file: Path | None) -> None:
    """Appends verdicts to a file as Markdown; does nothing without a file."""
    if file is None:
        return
    try:
        with file.open("a", encoding="utf-8") as page:
            page.writelines(map(verdict_markdown, verdicts))
    except OSError as error:
        raise BadInput(
            expected=f"--summary {file} to be a file that can be written",
            found=str(error),
            remedy="name another file, in an existing folder",
        ) from error


def _named(name: str, path: str, *, early: bool) -> list[JudgedCheckpoint]:
    rejected: dict[str, str] = {}
    [records] = records_of_checkpoints([name], evaluation_path=path, rejected=rejected)
    say_rejected(rejected)
    meant = {item.record.checkpoint.name for item in records}
    verdicts = [each for each in early_below(path) if each.checkpoint.name in meant] if early else []
    own = records[0].record.checkpoint
    return with_rejected(judged_checkpoints(records, verdicts), rejected, run=own.run, folder=own.folder)


def _checkpoints(path: str, *, run: str | None, step: int | None, early: bool) -> list[JudgedCheckpoint]:
    rejected: dict[str, str] = {}
    records = find_records(path, rejected=rejected)
    say_rejected(rejected)
    verdicts = early_below(path) if early else []
    references = [*(item.record.checkpoint for item in records), *(verdict.checkpoint for verdict in verdicts)]
    runs = sorted({reference.run for reference in references})
    if run is None and len(runs) > 1:
        raise BadInput(expected="--run, one of those recorded", found=", ".join(runs), remedy="name one of them")

    def is_wanted(reference: CheckpointReference) -> bool:
        return (run is None or reference.run == run) and (step is None or reference.folder == folder_of(step, None))

    matching = [recorded for recorded in records if is_wanted(recorded.record.checkpoint)]
    decided = [verdict for verdict in verdicts if is_wanted(verdict.checkpoint)]
    if not matching and not decided:
        own = [reference for reference in references if run in (None, reference.run)]
        steps = ", ".join(map(str, sorted({reference.step for reference in own if reference.label is None})))
        labels = sorted({reference.label for reference in own if reference.label is not None})
        known = ", ".join([f"steps {steps}"] * bool(steps) + labels) or (f"runs {', '.join(runs)}" if runs else "none")
        raise BadInput(
            expected=f"records of {run or 'a run'}{'' if step is None else f' at step {step}'} below {path}",
            found=known,
            remedy="evaluate it, or name another --records, --run or --step",
        )
    return with_rejected(
        judged_checkpoints(matching, decided),
        rejected,
        run=run or runs[0],
        folder=None if step is None else folder_of(step, None),
    )
