"""The `assay` command. Importing it costs little: Prefect and the rest are loaded by the commands that need them."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from resources.errors import AssayError, BadInput
from resources.settings import set_process_environment_defaults

app = typer.Typer(
    help="Evaluate every checkpoint a language-model training run writes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_out = Console()
_err = Console(stderr=True)

_EMBEDDED_PREFECT = {
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
    # 22 s at its very first start on two cores; Prefect's own limit is 20.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # The live view and the errors at the end say it in words; the log goes to the server all the same.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
}

_TRACEBACK = "--traceback"
_Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


@app.callback()
def _common(
    traceback: Annotated[bool, typer.Option(_TRACEBACK, help="Show Python's traceback with an error.")] = False,
) -> None:
    """Options of every command; `main` has taken them off the command line, wherever they stood."""


def main() -> None:
    """Runs the command line; errors that are meant for the user are shown without a traceback.

    Exit codes: 0 every wanted cell has a succeeded record, 1 one failed or was withheld, 2 infrastructure, 3 bad
    input.
    """
    set_process_environment_defaults(_EMBEDDED_PREFECT)
    arguments = sys.argv[1:]
    traceback = _TRACEBACK in arguments
    # By default SIGTERM would skip every `with` block.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        app([argument for argument in arguments if argument != _TRACEBACK])
    except SystemExit as ended:
        # Typer ends with 2 when it cannot read the command line, which for us is bad input.
        sys.exit(BadInput.exit_code if ended.code == 2 else ended.code)
    except AssayError as error:
        if traceback:
            _err.print_exception()
        _err.print(str(error), style="red", markup=False, highlight=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _err.print("Interrupted; everything that was started has been ended. Run it again to go on.")
        sys.exit(130)


def _exit_on_signal(number: int, frame: object) -> None:
    sys.exit(128 + number)


@app.command()
def evaluate(
    model: Annotated[str | None, typer.Option(help="A checkpoint, or a run that holds them as hf/step-N.")] = None,
    eval_: Annotated[list[str] | None, typer.Option("--eval", help="Benchmark or benchmark:shots; repeatable.")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file with an EvaluationConfig, in place of options.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder for records, evaluations when left out.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run in records and reports.")] = None,
    which: Annotated[str, typer.Option(help="all or latest.")] = "all",
    every: Annotated[int | None, typer.Option(help="Only steps that are multiples of this, and the last.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for checkpoints that are being written.")] = 0.0,
    limit: Annotated[int | None, typer.Option(help="Questions per benchmark.")] = None,
    benchmarks: Annotated[str | None, typer.Option(help="Folder with benchmarks of your own (YAML).")] = None,
    base_url: Annotated[str | None, typer.Option(help="An endpoint that serves the checkpoint already.")] = None,
    served_name: Annotated[str | None, typer.Option(help="Its name there, where it is another one.")] = None,
    pool: Annotated[str | None, typer.Option(help="A pool that is kept up, by its name: see assay pool.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Engines side by side, 1 when left out.")] = None,
    cpu: Annotated[int | None, typer.Option(help="CPU cores per engine, 2 when left out.")] = None,
    engine: Annotated[list[str] | None, typer.Option("--engine", help="Engine argument key=value; repeatable.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the model's chat template.")] = False,
    as_json: _Json = False,
) -> None:
    """Evaluate the checkpoints of a run that have no succeeded record yet."""
    from flows.running import EvaluationOptions, evaluation_from_file, evaluation_from_options, run_series
    from tasks.config import CheckpointSelection

    options = EvaluationOptions(
        model=model,
        evals=tuple(eval_ or ()),
        output=output,
        name=name,
        limit=limit,
        benchmarks=benchmarks,
        base_url=base_url,
        served_name=served_name,
        replicas=replicas,
        cpu=cpu,
        engine=tuple(engine or ()),
        chat=chat,
        pool=pool,
    )
    wanted = evaluation_from_options(options) if config is None else evaluation_from_file(config, options)
    from flows.loading import build_config

    selection = build_config(
        {"which": which, "every_n_steps": every, "wait_for_incomplete_seconds": wait},
        CheckpointSelection,
        source="the options",
    )
    _show_series(run_series(wanted, selection, console=_err), as_json=as_json)


def _show_series(result: Any, *, as_json: bool) -> None:
    """Prints what a series came to; raises its error afterwards, so that it decides the exit code."""
    from tasks.reports import results_rows, results_table

    if as_json:
        _print_json(
            {
                "evaluated": result.evaluated,
                "already_recorded": result.already_recorded,
                "report": result.report,
                "results": results_rows(result.records),
                "records": [json.loads(record.model_dump_json()) for record in result.records],
            }
        )
    else:
        if result.records:
            _out.print(results_table(result.records))
        if result.evaluated == 0 and result.error is None:
            _out.print(f"Nothing to evaluate: all {result.already_recorded} cells have succeeded records.")
        else:
            _out.print(f"Evaluated {result.evaluated}, already recorded {result.already_recorded}.", highlight=False)
        if result.report:
            _out.print(f"Report: {result.report}", soft_wrap=True, highlight=False)
    if result.error is not None:
        raise result.error


pool_app = typer.Typer(help="Keep a pool of warm engines up between evaluations.", no_args_is_help=True)
app.add_typer(pool_app, name="pool")


@pool_app.command("up")
def pool_up(
    model: Annotated[str, typer.Option(help="A checkpoint, or a run that holds them as hf/step-N.")],
    name: Annotated[str | None, typer.Option(help="Name of the pool; the run's when left out.")] = None,
    run_name: Annotated[str | None, typer.Option(help="Name of the run, with which its checkpoints' begin.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Engines side by side, 1 when left out.")] = None,
    cpu: Annotated[int | None, typer.Option(help="CPU cores per engine, 2 when left out.")] = None,
    engine: Annotated[list[str] | None, typer.Option("--engine", help="Engine argument key=value; repeatable.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Evaluations ask through the model's chat template.")] = False,
    idle_minutes: Annotated[float, typer.Option(help="Ends by itself after so long without a user.")] = 60.0,
) -> None:
    """Start a pool that stays up; any checkpoint of the run can be asked for by name."""
    from flows.pooling import start_pool
    from flows.running import EvaluationOptions

    options = EvaluationOptions(
        model=model, name=run_name, replicas=replicas, cpu=cpu, engine=tuple(engine or ()), chat=chat
    )
    pool = start_pool(options, pool_name=name, idle_minutes=idle_minutes)
    _out.print(f"{pool.name} is up at {pool.access.address.base_url}", highlight=False, soft_wrap=True)
    _out.print(
        f"assay evaluate --pool {pool.name} …   evaluates on it\n"
        f'eval "$(assay pool env {pool.name})"    lets any OpenAI client in this shell ask it\n'
        f"assay pool down {pool.name}            ends it; without a user it ends after {idle_minutes:g} minutes",
        highlight=False,
        soft_wrap=True,
    )


@pool_app.command("ls")
def pool_ls(as_json: _Json = False) -> None:
    """Show the pools that are kept up on this machine."""
    from flows.pooling import state_of
    from pools.kept import list_kept

    rows = [state_of(state) for state in list_kept()]
    if as_json:
        _print_json(rows)
        return
    table = Table("Name", "State", "Address", "Replicas", "Users", "Answered")
    table.columns[2].no_wrap = True
    for row in rows:
        replicas = "\n".join(f"{name}: {state}" for name, state in row["replicas"].items())
        users = "\n".join(row["users"]) or "none"
        table.add_row(row["name"], row["state"], row["base_url"], replicas, users, str(row["answered"]))
    _out.print(table if rows else "No pool is kept up on this machine.")


@pool_app.command("env")
def pool_env(name: Annotated[str, typer.Argument(help="Name of the pool.")]) -> None:
    """Print the variables that let OpenAI clients use a pool; its key is among them."""
    from pools.kept import require

    access = require(name).access
    sys.stdout.write(f"export OPENAI_BASE_URL={access.address.base_url}\n")
    sys.stdout.write(f"export OPENAI_API_KEY={access.key.get_secret_value()}\n")


@pool_app.command("down")
def pool_down(name: Annotated[str, typer.Argument(help="Name of the pool.")]) -> None:
    """End a pool with everything it runs, whoever uses it."""
    from pools.kept import take_down

    take_down(name)
    _out.print(f"{name} is down.", highlight=False)


@app.command()
def checkpoints(
    path: Annotated[str, typer.Argument(help="A checkpoint, or a run that holds them.")], as_json: _Json = False
) -> None:
    """Show which checkpoints are there, and which are complete or why not."""
    from tasks.checkpoints import find_checkpoints

    found = find_checkpoints(path)
    if as_json:
        keys = ("uri", "run", "name", "step", "kind", "complete", "problems")
        _print_json([{key: getattr(checkpoint, key) for key in keys} for checkpoint in found])
        return
    table = Table("Step", "Name", "Complete", "Why not")
    for checkpoint in found:
        complete = "[green]yes[/]" if checkpoint.complete else "[yellow]no[/]"
        table.add_row(str(checkpoint.step), checkpoint.name, complete, "; ".join(checkpoint.problems))
    _out.print(table)


@app.command()
def records(
    path: Annotated[str, typer.Argument(help="Folder given as --output to evaluate.")] = "evaluations",
    as_json: _Json = False,
) -> None:
    """Show recorded results; as JSON, every record, also those that newer ones replaced."""
    from tasks.records import read_records
    from tasks.reports import results_table

    found = read_records(path)
    if as_json:
        _print_json([json.loads(record.model_dump_json()) for record in found])
        return
    if not found:
        raise BadInput(
            expected=f"records below {path}", found="none", remedy="evaluate something, or name another folder"
        )
    _out.print(results_table(found))


@app.command()
def report(
    path: Annotated[str, typer.Argument(help="Folder given as --output to evaluate.")] = "evaluations",
    output: Annotated[str, typer.Option(help="Where to write the page.")] = "report.html",
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
) -> None:
    """Write one self-contained HTML page with curves and tables."""
    from tasks.records import read_records
    from tasks.reports import write_report

    found = read_records(path)
    if not found:
        raise BadInput(
            expected=f"records below {path}", found="none", remedy="evaluate something, or name another folder"
        )
    runs = sorted({record.checkpoint.run for record in found})
    _out.print(write_report(found, output, title=title or ", ".join(runs)), soft_wrap=True, highlight=False)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("demo"),
    as_json: _Json = False,
) -> None:
    """Train a tiny model on this CPU and evaluate its checkpoints: the whole path, in minutes."""
    home = (folder / "prefect").absolute()
    home.mkdir(parents=True, exist_ok=True)
    set_process_environment_defaults({"PREFECT_HOME": str(home)})
    from flows.demo import next_steps, prepare, run_demo

    prepare(folder, console=_err)
    result = run_demo(folder, console=_err)
    _show_series(result, as_json=as_json)
    if not as_json:
        _out.print(next_steps(folder), highlight=False, soft_wrap=True)


@app.command()
def faults(
    model: Annotated[str, typer.Option(help="A checkpoint, or a run that holds them; the latest is served.")],
    only: Annotated[list[str] | None, typer.Option("--only", help="One scenario by its name; repeatable.")] = None,
    replicas: Annotated[int, typer.Option(help="Engines side by side.")] = 2,
    requests: Annotated[int, typer.Option(help="Requests of each scenario.")] = 2000,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 64,
    fuzzed: Annotated[int, typer.Option(help="Malformed requests.")] = 3000,
    cpu: Annotated[int | None, typer.Option(help="CPU cores per engine, 2 when left out.")] = None,
    engine: Annotated[list[str] | None, typer.Option("--engine", help="Engine argument key=value; repeatable.")] = None,
    as_json: _Json = False,
) -> None:
    """Try faults on a pool of real engines under load: what clients see, and what is recorded."""
    from flows.faults import outcomes_as_json, outcomes_table, try_faults
    from flows.running import EvaluationOptions
    from pools.faults.outcome import Scale

    outcomes = try_faults(
        EvaluationOptions(model=model, replicas=replicas, cpu=cpu, engine=tuple(engine or ())),
        only=tuple(only or ()),
        scale=Scale(requests=requests, concurrency=concurrency, clients=requests, fuzzed=fuzzed),
        on_outcome=lambda one: _err.print(f"{one.scenario}: {one.verdict}", highlight=False),
        on_event=lambda line: _err.print(line, style="dim", markup=False, highlight=False),
    )
    if as_json:
        _print_json(outcomes_as_json(outcomes))
    else:
        _out.print(outcomes_table(outcomes))
    if any(one.violations for one in outcomes):
        raise typer.Exit(1)


@app.command()
def doctor(as_json: _Json = False) -> None:
    """Show what this machine can run and what is missing."""
    from flows.doctor import examine

    findings = examine()
    if as_json:
        _print_json([finding.as_dict() for finding in findings])
    else:
        table = Table("", "Subject", "Seen", "To do")
        marks: dict[Literal["ok", "note", "missing"], str] = {
            "ok": "[green]✓[/]",
            "note": "·",
            "missing": "[red]✗[/]",
        }
        for finding in findings:
            table.add_row(marks[finding.level], finding.subject, finding.seen, finding.remedy)
        _out.print(table)
    if any(finding.level == "missing" for finding in findings):
        raise typer.Exit(1)


def _print_json(content: Any) -> None:
    sys.stdout.write(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
