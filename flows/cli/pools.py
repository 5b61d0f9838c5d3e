"""The commands about pools: `assay pool`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.table import Table

from flows.console.console import OUT, Json, print_json

pool_app = typer.Typer(help="Keep a pool of warm engines up between evaluations.", no_args_is_help=True)


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
    from flows.cli.options import EvaluationOptions
    from flows.cli.pooling import start_pool

    options = EvaluationOptions(
        model=model, name=run_name, replicas=replicas, cpu=cpu, engine=tuple(engine or ()), chat=chat
    )
    pool = start_pool(options, pool_name=name, idle_minutes=idle_minutes)
    OUT.print(f"{pool.name} is up at {pool.access.address.base_url}", highlight=False, soft_wrap=True)
    OUT.print(
        f"assay evaluate --pool {pool.name} …   evaluates on it\n"
        f'eval "$(assay pool env {pool.name})"    lets any OpenAI client in this shell ask it\n'
        f"assay pool down {pool.name}            ends it; without a user it ends after {idle_minutes:g} minutes",
        highlight=False,
        soft_wrap=True,
    )


@pool_app.command("ls")
def pool_ls(as_json: Json = False) -> None:
    """Show the pools that are kept up on this machine."""
    from flows.cli.pooling import state_of
    from pools.pool.kept import list_kept

    rows = [state_of(state) for state in list_kept()]
    if as_json:
        print_json(rows)
        return
    table = Table("Name", "State", "Address", "Replicas", "Users", "Answered")
    table.columns[2].no_wrap = True
    for row in rows:
        replicas = "\n".join(f"{name}: {state}" for name, state in row["replicas"].items())
        users = "\n".join(row["users"]) or "none"
        table.add_row(row["name"], row["state"], row["base_url"], replicas, users, str(row["answered"]))
    OUT.print(table if rows else "No pool is kept up on this machine.")


@pool_app.command("env")
def pool_env(name: Annotated[str, typer.Argument(help="Name of the pool.")]) -> None:
    """Print the variables that let OpenAI clients use a pool; its key is among them."""
    from pools.pool.kept import require

    access = require(name).access
    sys.stdout.write(f"export OPENAI_BASE_URL={access.address.base_url}\n")
    sys.stdout.write(f"export OPENAI_API_KEY={access.key.get_secret_value()}\n")


@pool_app.command("down")
def pool_down(name: Annotated[str, typer.Argument(help="Name of the pool.")]) -> None:
    """End a pool with everything it runs, whoever uses it."""
    from pools.pool.kept import take_down

    take_down(name)
    OUT.print(f"{name} is down.", highlight=False)
