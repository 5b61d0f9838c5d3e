"""The commands about pools: `assay pool`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from flows.cli.options.groups import EngineOptions, EvaluationOptions, MachineOptions, flattened, refuse_with_config
from flows.console.console import ERR, OUT, Json, print_json, write
from pools.settings import POOL_ADMIN_KEY_VARIABLE, POOL_KEY_VARIABLE
from resources.errors import BadInput

if TYPE_CHECKING:
    from pools.config import InferencePoolConfig
    from pools.pool.kept import KeptPool, KeptPoolState
    from resources.config import ResourceConfig
    from tasks.checkpoints.discovery import Checkpoint

pool_app = typer.Typer(help="Keep a pool of warm engines up between evaluations.", no_args_is_help=True)


@pool_app.command("up")
@flattened
def pool_up(
    *,
    model: Annotated[
        str | None, typer.Option(help="A checkpoint, or a run that holds them as hf/step-N.", show_default=False)
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="YAML file with an InferencePoolConfig that has model.path, in place of options.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the pool; the run's when left out.")] = None,
    run_name: Annotated[str | None, typer.Option(help="Name of the run, with which its checkpoints' begin.")] = None,
    engines: EngineOptions,
    machine: MachineOptions,
    idle_minutes: Annotated[float, typer.Option(help="Ends by itself after so long without a user.")] = 60.0,
    longest_wait: Annotated[
        float | None,
        typer.Option(help="Longest wait of a model, in seconds, while others keep every engine busy; else 60."),
    ] = None,
) -> None:
    """Start a pool that stays up; any checkpoint of the run can be requested by name."""
    options = EvaluationOptions(model=model, name=run_name, **asdict(engines), **asdict(machine))
    from pools.pool.access import places

    pool_config = _from_options(options, longest_wait) if config is None else _from_file(config, options, longest_wait)
    pool = start_pool(pool_config, pool_name=name, idle_minutes=idle_minutes)
    OUT.print(f"{pool.name} is up at {pool.access.address.base_url}", highlight=False, soft_wrap=True)
    OUT.print(
        f"assay evaluate --pool {pool.name} …   evaluates on it\n"
        f'eval "$(assay pool env {pool.name})"    lets any OpenAI client in this shell ask it\n'
        f"assay pool down {pool.name}            ends it; without a user it ends after {idle_minutes:g} minutes\n"
        f"It runs on {pool.place}, and is found by its name through {places()[0]}.",
        highlight=False,
        soft_wrap=True,
    )


@pool_app.command("ls")
def pool_ls(as_json: Json = False) -> None:
    """Show the pools that are kept up on this machine, or published in ASSAY_POOLS."""
    from pools.pool.access import places
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
    OUT.print(table if rows else f"No pool is kept up in {' or '.join(places())}.", soft_wrap=not rows)
    for row in rows:
        if row["state"] == "failed":
            OUT.print(
                f"{row['name']} has given up: {row['reason']}\nThe next request makes it try again.", markup=False
            )
        elif row["reason"]:
            OUT.print(f"{row['name']} is out of reach: {row['reason']}", markup=False)


@pool_app.command("env")
def pool_env(
    name: Annotated[str, typer.Argument(help="Name or address of the pool.")],
    admin: Annotated[bool, typer.Option("--admin", help="Its admin key too, for evaluations that bring more.")] = False,
) -> None:
    """Print variables for OpenAI clients of a pool, and for evaluations by its address, including its key."""
    from pools.pool.kept import access_to

    access = access_to(name)
    key = access.key.get_secret_value()
    variables = {"OPENAI_BASE_URL": access.address.base_url, "OPENAI_API_KEY": key, POOL_KEY_VARIABLE: key}
    if admin and access.admin_key is not None:
        variables[POOL_ADMIN_KEY_VARIABLE] = access.admin_key.get_secret_value()
    write("".join(f"export {variable}={value}\n" for variable, value in variables.items()))


@pool_app.command("logs")
def pool_logs(
    name: Annotated[str, typer.Argument(help="Name of the pool.")],
    lines: Annotated[int, typer.Option(help="Number of lines.")] = 200,
) -> None:
    """Print the log of the job that keeps a pool up, from any machine with access to its backend."""
    from pools.pool.kept import job_of

    job = job_of(name)
    write(job.logs(lines) if job is not None else "")


@pool_app.command("down")
def pool_down(name: Annotated[str, typer.Argument(help="Name of the pool.")]) -> None:
    """End a pool with all its processes, even if it is in use, from any machine with access to its backend."""
    from pools.pool.kept import take_down

    take_down(name)
    OUT.print(f"{name} is down.", highlight=False)


def _from_options(options: EvaluationOptions, longest_wait_seconds: float | None) -> InferencePoolConfig:
    from flows.cli.options.evaluations import pool_content
    from pools.config import InferencePoolConfig
    from tasks.spec.loading import build_config

    if options.model is None:
        raise BadInput(
            expected="--model, or --config FILE", found="neither", remedy="for example: assay pool up --model runs/a"
        )
    content = pool_content(options)
    content["model"]["path"] = options.model
    if longest_wait_seconds is not None:
        content["longest_wait_seconds"] = longest_wait_seconds
    return build_config(content, InferencePoolConfig, source="the options")


def _from_file(uri: str, options: EvaluationOptions, longest_wait_seconds: float | None) -> InferencePoolConfig:
    from pools.config import InferencePoolConfig
    from tasks.spec.loading import load_config

    given = [*options.given(), *(["--longest-wait"] if longest_wait_seconds is not None else [])]
    refuse_with_config(given, "a pool")
    config = load_config(uri, InferencePoolConfig)
    if config.model.path is None:
        raise BadInput(
            expected=f"model.path in {uri}, a checkpoint or a run", found="none", remedy="write what it is to serve"
        )
    return config


def start_pool(config: InferencePoolConfig, *, pool_name: str | None, idle_minutes: float) -> KeptPool:
    """Keeps a pool up for every complete checkpoint at `model.path`; its engines start at the first request."""
    from pools.engine.launch import Servable, environment_name
    from pools.pool.kept import keep_up
    from pools.weights.model_files import digest_model_folder
    from resources.backends.current import current_client
    from resources.environments.environments import ENVIRONMENTS, ensure_environment

    path, run_name = config.model.path, config.model.name
    assert path is not None
    model = config.model.model_copy(update={"path": None})  # users may add others
    complete = checkpoints_to_serve(path)
    checkpoints = [
        Servable.from_folder(
            f"{run_name}{checkpoint.name.removeprefix(checkpoint.run)}",
            checkpoint.folder,
            digest_model_folder(checkpoint.folder),
        )
        for checkpoint in complete
        if checkpoint.folder is not None
    ]
    if current_client().is_local:
        ensure_environment(ENVIRONMENTS[environment_name(config)])
    counted = config.resource_config.chip_count() > 0
    return keep_up(
        pool_name or run_name,
        config.model_copy(update={"model": model}),
        checkpoints,
        idle_seconds=idle_minutes * 60,
        reserved=accelerators_counted if counted else nullcontext,  # `accelerators_counted` imports Prefect
        variables=_server_variables() if counted else {},
    )


def _server_variables() -> dict[str, str]:
    from tasks.prefect_server.client import server_variables

    return server_variables()


@contextmanager
def accelerators_counted(resources: ResourceConfig) -> Iterator[None]:
    """Reserves a kept pool's share of the Prefect server's limit, and logs waits to the pool's log."""
    from tasks.prefect_server.accelerators import accelerators_reserved
    from tasks.prefect_server.progress import Event, Update, listening

    def note(update: Update) -> None:
        if isinstance(update, Event):
            logging.getLogger("assay.pool").info(update.text)

    with listening(note), accelerators_reserved(resources):
        yield


def checkpoints_to_serve(path: str) -> list[Checkpoint]:
    """Returns the complete checkpoints at a location; prints the others with their reasons."""
    from tasks.checkpoints.discovery import complete_among, find_checkpoints

    shown = partial(ERR.print, highlight=False, markup=False, soft_wrap=True)
    return complete_among(find_checkpoints(path), path, on_left_out=shown)


def state_of(state: KeptPoolState) -> dict[str, Any]:
    """Returns a kept pool as a row, without its keys."""
    pool, status = state.pool, state.status
    return {
        "name": pool.name,
        "state": state.state,
        "reason": state.reason,
        "base_url": pool.access.address.base_url,
        "replicas": {
            replica.name: _of_replica(replica.lost, replica.announcement.state, replica.announcement.model)
            for replica in status.replicas
        }
        if status
        else {},
        "held": status.held if status else None,
        "users": [lease.holder for lease in status.leases.values()] if status else [],
        "answered": sum(model.answered for model in status.models.values()) if status else None,
        "created": pool.created.isoformat(timespec="seconds"),
        "ends_after_idle_minutes": round(pool.idle_seconds / 60, 2),
        "job": pool.job_id,
        "backend": pool.backend,
        "place": pool.place,
    }


def _of_replica(lost: bool, state: str, model: str | None) -> str:
    return "silent" if lost else f"{state} {model}" if model and state == "ready" else state
