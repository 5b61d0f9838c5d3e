"""The `assay` command. Its import is cheap: commands load Prefect and the rest when they need them."""

from __future__ import annotations

import atexit
import gc
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import format_exc
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from flows.cli.clusters.cluster import cluster_app
from flows.cli.clusters.work_pools import work_pool_app
from flows.cli.contamination import contamination_app
from flows.cli.eval_job import eval_job_app
from flows.cli.evaluate import evaluate, requalify, show_series
from flows.cli.gate import gate
from flows.cli.generate import generate
from flows.cli.jobs import SUBMIT_SETTINGS, jobs_app, submit
from flows.cli.policy import alerts, cancel, gaps, plan, reconcile, retry, status
from flows.cli.pools import pool_app
from flows.cli.records import compare, publish, records, report
from flows.cli.schedule import notify, policy_app, watch
from flows.cli.suites import stage, suites
from flows.cli.train import demo_train, train_and_evaluate
from flows.cli.view import view
from flows.console.console import ERR, OUT, Json, print_json
from resources.errors import AssayError, BadInput, StorageError
from resources.settings import ask_this_machine_directly, set_process_environment_defaults


class _InGroups(TyperGroup):
    # typer lists groups with subcommands last
    def list_commands(self, ctx: Any) -> list[str]:
        groups = list(_GROUPS)
        return sorted(self.commands, key=lambda name: groups.index(vars(self.commands[name])["rich_help_panel"]))


app = typer.Typer(
    cls=_InGroups,
    help="Evaluate every checkpoint a language-model training run writes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_EMBEDDED_PREFECT = {
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
    # 22 s at its first start on two cores; Prefect's own limit is 20.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # Else it imports every collection of Prefect's at each start; a block registers its own type when it is saved.
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
    "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
    # The live view and the final errors show it; the log still goes to the server.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
}

_OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""Python's default of 700 costs a seventh of the time of imports, and their objects all stay."""
_TRACEBACK, _INSECURE = "--traceback", "--insecure"


@app.callback()
def _common(
    traceback: Annotated[bool, typer.Option(_TRACEBACK, help="Show Python's traceback with an error.")] = False,
    insecure: Annotated[
        bool, typer.Option(_INSECURE, help="Let pools' keys travel unencrypted between machines.")
    ] = False,
) -> None: ...  # for --help only: `main` removes these options from the command line


_STORE_LIBRARIES = ("botocore", "google", "gcsfs")


def main() -> None:
    """Runs the command line; shows user errors without a traceback.

    Exit codes: 0 every wanted cell has a succeeded record, 1 a cell failed or was withheld, or a gate's verdict is
    NO-GO, 2 infrastructure, 3 bad input.
    """
    atexit.register(gc.freeze)  # a last garbage collection over all imports takes a second
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    set_process_environment_defaults(_EMBEDDED_PREFECT)
    ask_this_machine_directly()
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)  # the rest belongs to a submitted program
    arguments, submitted = sys.argv[1:end], sys.argv[end:]
    traceback = _TRACEBACK in arguments
    if _INSECURE in arguments:
        set_process_environment_defaults({"ASSAY_INSECURE": "true"})
    # By default SIGTERM would skip every `with` block.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        app([argument for argument in arguments if argument not in (_TRACEBACK, _INSECURE)] + submitted)
    except SystemExit as ended:
        # Typer exits with 2 for an unreadable command line, which is our bad input.
        sys.exit(BadInput.exit_code if ended.code == 2 else ended.code)
    except AssayError as error:
        if traceback:
            ERR.print_exception()
        # CI logs keep long lines; without a terminal the 80 columns are only a guess.
        ERR.print(str(error), style="red", markup=False, highlight=False, soft_wrap=not ERR.is_terminal)
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 - the boundary: libraries of stores have errors of their own
        if traceback or type(error).__module__.partition(".")[0] not in _STORE_LIBRARIES:
            ERR.print(format_exc(), highlight=False, soft_wrap=True)
            sys.exit(1)
        remedy = "log in to the store, or set the variables of its credentials; `--traceback` shows the place"
        refused = StorageError(expected="a store that can be used", found=str(error), remedy=remedy)
        ERR.print(str(refused), style="red", markup=False, highlight=False, soft_wrap=not ERR.is_terminal)
        sys.exit(refused.exit_code)
    except KeyboardInterrupt:
        ERR.print("Interrupted; everything that was started has been ended. Run it again to go on.")
        sys.exit(130)


def _exit_on_signal(number: int, frame: object) -> None:
    sys.exit(128 + number)


def checkpoints(
    path: Annotated[
        str, typer.Argument(help="A checkpoint, a run, or the name of a merged checkpoint.", metavar="PATH")
    ],
    folder: Annotated[str | None, typer.Argument(help="With --materialize, the folder.", show_default=False)] = None,
    materialize: Annotated[bool, typer.Option("--materialize", help="Write a merged checkpoint to FOLDER.")] = False,
    as_json: Json = False,
) -> None:
    """Show the checkpoints at a path, and which are complete or why not."""
    from resources.storage import storage
    from tasks.checkpoints.discovery import find_checkpoints

    if materialize != (folder is not None):
        raise BadInput(
            expected="--materialize with the name of a merged checkpoint and a folder, or neither",
            found="--materialize alone" if materialize else f"{folder} alone",
            remedy="for example: assay checkpoints --materialize 'mean(runs/a@last:5)' averaged",
        )
    if folder is not None and not storage.is_local(folder):
        raise BadInput(expected="a folder of this machine", found=folder, remedy="write it here, and copy it there")
    checkpoints = find_checkpoints(path)
    if folder is not None:
        from tasks.checkpoints.merged import write_merged

        write_merged(checkpoints[0], storage.local_path(folder))
        checkpoints = find_checkpoints(folder)
    if as_json:
        keys = ("uri", "run", "name", "step", "kind", "complete", "problems")
        print_json([{key: getattr(checkpoint, key) for key in keys} for checkpoint in checkpoints])
        return
    table = Table("Step", "Name", "Complete", "Why not")
    for checkpoint in checkpoints:
        complete = Text("yes", "green") if checkpoint.complete else Text("no", "yellow")
        table.add_row(str(checkpoint.step), checkpoint.name, complete, "; ".join(checkpoint.problems))
    OUT.print(table)


def demo(
    folder: Annotated[Path, typer.Option(help="Folder for everything.")] = Path("demo"),
    steps: Annotated[int, typer.Option(help="Training steps, unless the model is there already.", min=20)] = 360,
    as_json: Json = False,
) -> None:
    """Train a tiny model on this CPU and evaluate its checkpoints."""
    home = (folder / "prefect").absolute()
    home.mkdir(parents=True, exist_ok=True)
    set_process_environment_defaults({"PREFECT_HOME": str(home)})
    from flows.demo.demo import next_steps, prepare, run_demo
    from tasks.running.warm import warm_programs

    with warm_programs():
        prepare(folder, steps=steps, console=ERR)
        result = run_demo(folder, console=ERR)
    show_series(result, as_json=as_json)
    if not as_json:
        OUT.print(next_steps(folder), highlight=False, soft_wrap=True)


def doctor(as_json: Json = False) -> None:
    """Show what this machine can run and what is missing."""
    from flows.cli.doctor import examine

    findings = examine()
    if as_json:
        print_json([finding.as_dict() for finding in findings])
    else:
        table = Table("", "Subject", "Seen", "To do")
        marks = {"ok": Text("✓", "green"), "note": Text("·"), "missing": Text("✗", "red")}
        for finding in findings:
            table.add_row(marks[finding.level], finding.subject, finding.seen, finding.remedy)
        OUT.print(table)
    if any(finding.level == "missing" for finding in findings):
        raise typer.Exit(AssayError.exit_code)


_GROUPS: dict[str, tuple[Callable[..., None] | typer.Typer, ...]] = {
    "Evaluate and look": (
        *(evaluate, generate, train_and_evaluate, checkpoints, records, compare, requalify, report, view, gate),
        *(demo, demo_train, doctor),
    ),
    "Policies": (plan, gaps, status, alerts, reconcile, retry, cancel, watch, notify, policy_app),
    "Pools": (pool_app,),
    "Jobs and clusters": (submit, jobs_app, eval_job_app, cluster_app, work_pool_app),
    "Data and publishing": (suites, stage, contamination_app, publish),
}
_NAMES = {
    **{policy_app: "policy", pool_app: "pool", jobs_app: "jobs", eval_job_app: "eval-job"},
    contamination_app: "contamination",
    **{cluster_app: "cluster", work_pool_app: "work-pools"},
}
for _group, _commands in _GROUPS.items():
    for _command in _commands:
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_NAMES[_command], rich_help_panel=_group)
        else:
            _settings = SUBMIT_SETTINGS if _command is submit else None
            app.command(rich_help_panel=_group, context_settings=_settings)(_command)

if __name__ == "__main__":
    main()
