"""`assay gate`: GO or NO-GO on existing records; and the output of `assay evaluate --gate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.console.console import OUT, Json, print_json, say_rejected

if TYPE_CHECKING:
    from tasks.records.record import CheckpointReference
    from tasks.records.verdicts import Verdict
    from tasks.verdicts.gate import Gate
    from tasks.verdicts.judge import JudgedCheckpoint

_Summary = Annotated[
    Path | None, typer.Option(help="File to append the verdict to as Markdown, such as $GITHUB_STEP_SUMMARY.")
]


@dataclass(frozen=True)
class GateOptions:
    """A gate on the evaluation of a command."""

    gate: Annotated[
        str | None,
        typer.Option("--gate", help="YAML file with a gate; the exit code is 1 where it says NO-GO.", metavar="GATE"),
    ] = None
    summary: _Summary = None


@dataclass(frozen=True)
class EarlyOptions:
    """Options for a gate's verdict before all questions are evaluated."""

    early: Annotated[
        bool,
        typer.Option(
            "--early",
            help="Stop asking once --gate is decided: is the whole worse than the baseline by the margin?",
        ),
    ] = False
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Largest probability that the whole contradicts early verdicts on a checkpoint, per baseline."
        ),
    ] = None
    finish: Annotated[
        bool, typer.Option("--finish", help="Ask the rest where an earlier run was decided early, and nothing else.")
    ] = False


def gate(
    file: Annotated[str, typer.Argument(help="YAML file with a gate.", metavar="GATE")],
    records: Annotated[str, typer.Option(help="Folder given as --output to evaluate.")] = "evaluations",
    run: Annotated[str | None, typer.Option(help="The run; may be left out if it is the only run.")] = None,
    step: Annotated[
        int | None, typer.Option(help="Training step; the latest or every step, as the gate says, when left out.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="The checkpoint, as in assay compare: NAME, or mean(RUN@STEPS) if merged.")
    ] = None,
    early: Annotated[
        bool, typer.Option("--early", help="Judge by early verdicts, too, where the whole is not recorded.")
    ] = False,
    summary: _Summary = None,
    as_json: Json = False,
) -> None:
    """Judge recorded results: GO (exit code 0) or NO-GO (1), with the reasons."""
    from resources.errors import BadInput
    from tasks.verdicts.judge import judge

    if checkpoint is not None and not (run is step is None):
        raise BadInput(expected="--checkpoint, or --run and --step", found="both", remedy="leave --run and --step out")
    gate_config = load_gate(file)
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


def load_gate(uri: str) -> Gate:
    """Returns the gate in a YAML or JSON file, in any store."""
    from tasks.spec.loading import load_config
    from tasks.verdicts.gate import Gate

    return load_config(uri, Gate)


def gate_of(options: GateOptions) -> Gate | None:
    """Returns the gate of `--gate`; None without the option."""
    from resources.errors import BadInput

    if options.gate is None and options.summary is not None:
        raise BadInput(expected="--gate with --summary", found="none", remedy="leave --summary out, or name a gate")
    return load_gate(options.gate) if options.gate is not None else None


def early_gate(gate: Gate | None, options: EarlyOptions) -> Gate | None:
    """Returns the gate with the options for early decisions applied."""
    from resources.errors import BadInput
    from tasks.spec.loading import build_config
    from tasks.verdicts.gate import Gate

    if gate is None or (options.early and options.finish):
        if not (options.early or options.finish or options.alpha is not None):
            return None
        raise BadInput(
            expected="--gate with --early, --alpha or --finish, and only one of --early and --finish",
            found="no gate" if gate is None else "both",
            remedy="name a gate" if gate is None else "decide early first, and finish then",
        )
    decide = "early" if options.early else "whole" if options.finish else gate.decide
    changes = {"decide": decide, "whole_every": None}  # applies to a policy's checkpoints only
    alpha = gate.alpha if options.alpha is None else options.alpha
    return build_config({**gate.model_dump(), **changes, "alpha": alpha}, Gate, source="--gate with --early")


def undecided_steps(evaluation_path: str, run: str) -> tuple[int, ...]:
    """Returns the steps of a run that have early verdicts but no succeeded record."""
    from resources.errors import BadInput
    from resources.storage import storage
    from tasks.running.early import early_below

    folder = storage.join(evaluation_path, run)
    steps = {verdict.checkpoint.step for verdict in early_below(folder)}
    if not steps:
        raise BadInput(
            expected=f"early verdicts below {folder} without a whole evaluation yet",
            found="none",
            remedy="decide early first (--early), or leave --finish out to evaluate whole",
        )
    return tuple(sorted(steps))


def show_verdict(verdict: Verdict) -> None:
    """Prints the verdict as a table, with GO or NO-GO at the end."""
    from tasks.reports.texts import verdict_table

    OUT.print(verdict_table(verdict))
    OUT.print(f"{verdict.gate}: {verdict.word}", highlight=False, markup=False)


def write_summaries(verdicts: Sequence[Verdict], file: Path | None) -> None:
    """Appends verdicts to a file as Markdown; does nothing without a file."""
    from resources.errors import BadInput
    from tasks.reports.texts import verdict_markdown

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
    from tasks.records.search import records_of_checkpoints
    from tasks.running.early import early_below
    from tasks.verdicts.judge import judged_checkpoints, with_rejected

    rejected: dict[str, str] = {}
    [records] = records_of_checkpoints([name], evaluation_path=path, rejected=rejected)
    say_rejected(rejected)
    meant = {item.record.checkpoint.name for item in records}
    verdicts = [each for each in early_below(path) if each.checkpoint.name in meant] if early else []
    own = records[0].record.checkpoint
    return with_rejected(judged_checkpoints(records, verdicts), rejected, run=own.run, step=own.step)


def _checkpoints(path: str, *, run: str | None, step: int | None, early: bool) -> list[JudgedCheckpoint]:
    from resources.errors import BadInput
    from tasks.records.record import find_records
    from tasks.running.early import early_below
    from tasks.verdicts.judge import judged_checkpoints, with_rejected

    rejected: dict[str, str] = {}
    records = find_records(path, rejected=rejected)
    say_rejected(rejected)
    verdicts = early_below(path) if early else []
    references = [*(item.record.checkpoint for item in records), *(verdict.checkpoint for verdict in verdicts)]
    runs = sorted({reference.run for reference in references})
    if run is None and len(runs) > 1:
        raise BadInput(expected="--run, one of those recorded", found=", ".join(runs), remedy="name one of them")

    def is_wanted(reference: CheckpointReference) -> bool:
        return (run is None or reference.run == run) and (step is None or reference.step == step)

    matching = [recorded for recorded in records if is_wanted(recorded.record.checkpoint)]
    decided = [verdict for verdict in verdicts if is_wanted(verdict.checkpoint)]
    if not matching and not decided:
        steps = sorted({reference.step for reference in references if run is None or reference.run == run})
        known = f"steps {', '.join(map(str, steps))}" if steps else f"runs {', '.join(runs)}" if runs else "none"
        raise BadInput(
            expected=f"records of {run or 'a run'}{'' if step is None else f' at step {step}'} below {path}",
            found=known,
            remedy="evaluate it, or name another --records, --run or --step",
        )
    return with_rejected(judged_checkpoints(matching, decided), rejected, run=run or runs[0], step=step)
