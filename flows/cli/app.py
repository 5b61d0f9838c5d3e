"""The `assay` command: a table of all commands, of which only the called command's module is imported."""

from __future__ import annotations

import ast
import atexit
import gc
import signal
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from traceback import format_exc
from typing import Any

from cyclopts import App, CycloptsError, Group, Parameter

from flows.console.console import ERR, say
from resources.errors import AssayError, BadInput, StorageError
from resources.settings import ask_this_machine_directly, set_process_environment_defaults

COMMANDS = {
    "Evaluate and look": {
        "evaluate": "evaluate.evaluate",
        "generate": "generate.generate",
        "train-and-evaluate": "evaluate.train_and_evaluate",
        "checkpoints": "demo.checkpoints",
        "records": "records.records",
        "compare": "reports.compare",
        "requalify": "reports.requalify",
        "report": "reports.report",
        "view": "reports.view",
        "gate": "gate.gate",
        "demo": "demo.demo",
        "doctor": "doctor.doctor",
    },
    "Policies": {
        "status": "policy.status",
        "alerts": "policy.alerts",
        "reconcile": "policy.reconcile",
        "retry": "policy.retry",
        "cancel": "policy.cancel",
        "notify": "deployments.notify",
        "policy deploy": "deployments.deploy",
    },
    "Pools": {
        "pool up": "pools.pool_up",
        "pool ls": "pools.pool_ls",
        "pool env": "pools.pool_env",
        "pool logs": "pools.pool_logs",
        "pool down": "pools.pool_down",
    },
    "Jobs and clusters": {
        "submit": "jobs.submit",
        "jobs list": "jobs.jobs_list",
        "jobs logs": "jobs.jobs_logs",
        "jobs stop": "jobs.jobs_stop",
        "eval-job submit": "eval_job.submit",
        "eval-job list": "eval_job.list_jobs",
        "eval-job logs": "eval_job.logs",
        "eval-job run": "eval_job.run",
        "cluster up": "cluster.cluster_up",
        "cluster down": "cluster.cluster_down",
        "cluster status": "cluster.cluster_status",
        "cluster write": "cluster.cluster_write",
        "work-pools apply": "deployments.apply",
        "work-pools list": "deployments.list_",
    },
    "Data and publishing": {
        "suites": "suites.suites",
        "stage": "suites.stage",
        "publish": "reports.publish",
        "contamination": "contamination.contamination",
    },
}
"""The function of each command, in a module of this folder, by panel of the help."""
GROUPS = {
    "policy": "Policies that carry themselves out.",
    "pool": "Keep a pool of warm engines up between evaluations.",
    "jobs": "Jobs of a backend, of all users.",
    "eval-job": "Evaluations on GKE, each from a YAML file.",
    "cluster": "Ray clusters of regions, and a local cluster.",
    "work-pools": "The Prefect work pools of the regions.",
}
REMOVED = {
    "plan": "status --plan",
    "gaps": "status --gaps",
    "watch": "notify POLICY --every 5s",
    "demo-train": "demo --train",
    "jobs status": "jobs list JOB",
    "eval-job check": "eval-job submit FILE --check",
    "eval-job render": "eval-job submit FILE --output MANIFESTS, or --dry-run to print them",
    "eval-job fetch": "eval-job run --fetch",
    "cluster dashboard": "cluster status REGION --forward",
    "work-pools choose": "work-pools list, with the same options",
    "contamination scan": "contamination PATH --texts TEXTS",
    "contamination import": "contamination PATH --findings FILES --from TOOL",
}
"""Earlier spellings, with the commands that replace them."""

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
_EVERYWHERE = f"""With every command: {_TRACEBACK} shows Python's traceback with an error.
With every command: {_INSECURE} lets pools' keys travel unencrypted between machines."""
_STORE_LIBRARIES = ("botocore", "google", "gcsfs")


def command_line(*, with_help: bool = False) -> App:
    """Returns the command line; `with_help` reads a line about each command from its module, without importing it."""
    options: dict[str, Any] = {
        "version_flags": (),
        "help_flags": ("--help",),
        "help_format": "plaintext",
        "default_parameter": Parameter(
            negative=(),
            allow_repeating=True,
            show_default=lambda default: None if default in (None, False, True, ()) else str(default),
        ),
        "result_action": "return_value",
        "suppress_keyboard_interrupt": False,
    }
    app = App(
        name="assay",
        help="Evaluate every checkpoint a language-model training run writes.",
        help_epilogue=_EVERYWHERE,
        **options,
    )
    groups: dict[str, App] = {}
    for place, (title, commands) in enumerate(COMMANDS.items()):
        panel = Group(title, sort_key=place)
        for rank, (name, target) in enumerate(commands.items()):
            group, _, verb = name.rpartition(" ")
            if group and group not in groups:
                groups[group] = App(name=group, help=GROUPS[group], group=panel, sort_key=rank, **options)
                app.command(groups[group])
            module, _, function = target.partition(".")
            own = {"name": verb, "help": _help(module, function) if with_help else None, "sort_key": rank}
            parent, own = (groups[group], own) if group else (app, {**own, "group": panel})
            parent.command(f"flows.cli.{module}:{function}", **own, **options)
    return app


def _help(module: str, function: str) -> str:
    return next(
        (ast.get_docstring(node) or "").partition("\n")[0]
        for node in _tree(module).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8"))


def run(arguments: Sequence[str]) -> None:
    """Runs a command; raises BadInput for an earlier spelling, CycloptsError if it cannot be read, which is printed,
    and SystemExit for another exit code than 0."""
    for words in (2, 1):
        if (replaced := REMOVED.get(" ".join(arguments[:words]))) is not None:
            raise BadInput(
                expected="a command of this version",
                found=f"assay {' '.join(arguments[:words])}, an earlier spelling",
                remedy=f"assay {replaced}",
            )
    arguments = list(arguments) or ["--help"]
    listing = arguments[0].startswith("-") or arguments[1:2] in ([], ["--help"])
    app = command_line(with_help=listing and (arguments[0].startswith("-") or arguments[0] in GROUPS))
    app(with_program_apart(app, arguments), exit_on_error=False, error_console=ERR)


def with_program_apart(app: App, arguments: list[str]) -> list[str]:
    """Returns a command line with `--` before the program of `assay submit`, since what follows it belongs to it."""
    if arguments[0] != "submit":
        return arguments
    options = app["submit"].assemble_argument_collection()
    flags = {name for option in options if option.hint is bool for name in option.names}
    place = 1
    while place < len(arguments) and (word := arguments[place]).startswith("-") and word != "--":
        place += 1 if word in flags or word == "--help" or "=" in word else 2
    return arguments if arguments[place : place + 1] == ["--"] else [*arguments[:place], "--", *arguments[place:]]


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
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        run([argument for argument in arguments if argument not in (_TRACEBACK, _INSECURE)] + submitted)
    except CycloptsError:
        sys.exit(BadInput.exit_code)
    except AssayError as error:
        if traceback:
            ERR.print_exception()
        _show(error)
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 - the boundary: libraries of stores have errors of their own
        if traceback or type(error).__module__.partition(".")[0] not in _STORE_LIBRARIES:
            say(format_exc(), to=ERR)
            sys.exit(1)
        remedy = "log in to the store, or set the variables of its credentials; `--traceback` shows the place"
        refused = StorageError(expected="a store that can be used", found=str(error), remedy=remedy)
        _show(refused)
        sys.exit(refused.exit_code)
    except KeyboardInterrupt:
        ERR.print("Interrupted; everything that was started has been ended. Run it again to go on.")
        sys.exit(130)


def _show(error: AssayError) -> None:
    # CI logs keep long lines; without a terminal the 80 columns are only a guess.
    ERR.print(str(error), style="red", highlight=False, soft_wrap=not ERR.is_terminal)


if __name__ == "__main__":
    main()
