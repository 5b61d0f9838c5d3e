"""`assay demo`: the two demos, and `assay checkpoints`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Column, Table
from rich.text import Text

from flows.cli.evaluate import show_series
from flows.cli.options.evaluations import PartOptions
from flows.cli.options.pools import Positive
from flows.console.console import OUT, Json, note, print_json, say
from resources.errors import BadInput
from resources.settings import set_process_environment_defaults
from resources.storage import storage
from tasks.checkpoints.checkpoint import LOADED_NATIVELY, SERVED, WITH_CODE, Checkpoint
from tasks.checkpoints.discovery import find_checkpoints
from tasks.checkpoints.merged import write_checkpoint
from tasks.running.warm import warm_programs
from tasks.spec.evaluation import CheckpointSelection
from tasks.spec.loading import build_config
from tasks.spec.names import how_many

_LEAST_STEPS = 20


def demo(
    *,
    train: bool = False,
    folder: Path | None = None,
    steps: Annotated[int | None, Positive] = None,
    exports: Annotated[int | None, Positive] = None,
    as_json: Json = False,
) -> None:
    """Train a tiny model on this CPU and evaluate its checkpoints.

    Args:
        train: Train with Levanter, while lm-eval evaluates the checkpoints.
        folder: Folder for everything; demo when left out, demo-train with --train.
        steps: Training steps, unless the model is there already; 360 when left out, 240 with --train.
        exports: With --train, checkpoints to evaluate; 4 when left out.
    """
    folder = folder or Path("demo-train" if train else "demo")
    if not train and (exports is not None or (steps is not None and steps < _LEAST_STEPS)):
        raise BadInput(
            expected=f"--steps of at least {_LEAST_STEPS}, and --exports only with --train",
            found="--exports" if exports is not None else f"--steps {steps}",
            remedy="add --train, or leave it out",
        )
    home = (folder / "prefect").absolute()
    home.mkdir(parents=True, exist_ok=True)
    set_process_environment_defaults({"PREFECT_HOME": str(home)})
    if train:
        from flows.demo import training  # with Prefect, which reads PREFECT_HOME when it is imported

        config = training.prepare(folder, steps=steps or 240, exports=exports or 4)
        result = training.run_demo(config)
        after = training.seconds_to_records(config, result.records) if result.evaluated else ""
    else:
        from flows.demo.demo import next_steps, prepare, run_demo

        with warm_programs():
            prepare(folder, steps=steps or 360)
            result = run_demo(folder)
        after = next_steps(folder)
    show_series(result, shown=print_json if as_json else None)
    if after and not as_json:
        say(after)


def checkpoints(
    path: Annotated[str, Parameter(help="A checkpoint, a run, or the name of a merged checkpoint.")],
    /,
    *,
    parts: PartOptions = PartOptions(),
    export: str | None = None,
    trust_remote_code: bool = False,
    steps_from: str | None = None,
    as_json: Json = False,
) -> None:
    r"""Show the checkpoints in a folder: their state, notes on them, and the next command.

    Args:
        steps_from: As in `assay evaluate`, such as 'step(\d+)-tokens', tokens or epoch.
        export: Write the checkpoint, as an engine loads it, to this new folder: merged, or with safetensors made of
            its weights.
        trust_remote_code: Let DeepSpeed and verl export their shards; a checkpoint can run code in that.
    """
    if export is not None and not storage.is_local(export):
        raise BadInput(expected="a folder of this machine", found=export, remedy="write it here, and copy it there")
    checked = build_config({"steps_from": steps_from}, CheckpointSelection, source="the options")
    left_out: list[str] = []
    kinds = WITH_CODE if trust_remote_code else SERVED
    checkpoints = find_checkpoints(parts.named(path), kinds=kinds, steps_from=checked.steps_from, note=left_out.append)
    if export is not None:
        write_checkpoint(checkpoints, storage.local_path(export), trusted=trust_remote_code)
        checkpoints = find_checkpoints(export)
    if as_json:
        note(*left_out)
        keys = ("uri", "run", "name", "step", "label", "series", "kind", "complete", "problems", "notes")
        print_json([{key: getattr(checkpoint, key) for key in keys} for checkpoint in checkpoints])
        return
    options = ["--steps-from", steps_from] if steps_from else []
    _show_checkpoints(checkpoints, left_out, asked=[export or parts.named(path), *options])


def _show_checkpoints(checkpoints: Sequence[Checkpoint], left_out: Sequence[str], *, asked: Sequence[str]) -> None:
    complete = [checkpoint for checkpoint in checkpoints if checkpoint.complete]
    shared = set(checkpoints[0].notes).intersection(*(checkpoint.notes for checkpoint in checkpoints))
    table = Table("Step", "Name", "State", Column("Notes", overflow="fold"))  # commands are copied from there
    for checkpoint in checkpoints:
        made_by = checkpoint.folder and checkpoint.folder.made_by
        state = f"made while staged ({made_by.rpartition(' ')[0]})" if made_by else "complete"
        if not checkpoint.complete:
            state = "incomplete" if checkpoint.kind in LOADED_NATIVELY else "for its trainer only"
        notes = "; ".join([*checkpoint.problems, *(note for note in checkpoint.notes if note not in shared)])
        shown = Text(state, "green" if checkpoint.complete else "yellow")
        table.add_row(checkpoint.label or str(checkpoint.step), checkpoint.name, shown, notes)
    OUT.print(table)
    runs = ", ".join(dict.fromkeys(checkpoint.run for checkpoint in checkpoints))
    say(f"{how_many(len(checkpoints), 'checkpoint')} of {runs}: {len(complete)} can be evaluated")
    say(*(f"All: {note}" for note in sorted(shared)), *left_out)
    if complete:
        say(f"Next: assay evaluate --model {shlex.join(asked)} --eval demo_facts --limit 20")
