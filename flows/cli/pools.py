"""The commands about pools: `assay pool`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Column

from flows.cli.options.evaluations import PartOptions
from flows.cli.options.pools import PoolOptions, pool_content, refuse_with_config
from flows.console.console import ERR, OUT, Json, print_json, say, table_of, write
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable, environment_name
from pools.pool.access import places
from pools.pool.kept import KeptPool, KeptPoolState, access_to, job_of, keep_up, list_kept, take_down
from pools.settings import POOL_ADMIN_KEY_VARIABLE, POOL_KEY_VARIABLE
from pools.weights.model_files import digest_model_folder
from pools.weights.own_code import require_code_allowed
from resources.backends.current import current_client
from resources.config import ResourceConfig
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.errors import BadInput
from tasks.checkpoints.checkpoint import SERVED, WITH_CODE, Checkpoint, Kind
from tasks.checkpoints.discovery import complete_among, find_checkpoints
from tasks.prefect_server.progress import Event, Update, listening
from tasks.spec.loading import build_config, load_config

_Name = Annotated[str, Parameter(help="Name or address of the pool.")]


def pool_up(
    *,
    model: str | None = None,
    config: str | None = None,
    name: str | None = None,
    run_name: str | None = None,
    parts: PartOptions = PartOptions(),
    engines: PoolOptions = PoolOptions(),
    idle_minutes: float = 60.0,
    longest_wait: float | None = None,
) -> None:
    """Start a pool that stays up; any checkpoint of the run can be requested by name.

    Args:
        model: A checkpoint, or a run that holds them as hf/step-N.
        config: YAML file with an InferencePoolConfig that has model.path, in place of options.
        name: Name of the pool; the run's when left out.
        run_name: Name of the run, with which its checkpoints' begin.
        idle_minutes: Ends by itself after so long without a user.
        longest_wait: Longest wait of a model, in seconds, while others keep every engine busy; 60 when left out.
    """
    if config is not None:
        alone = {"--model": model, "--run-name": run_name, "--longest-wait": longest_wait}
        given = [option for option, value in alone.items() if value is not None]
        refuse_with_config([*given, *parts.given(), *engines.given()], "a pool")
        pool_config = load_config(config, InferencePoolConfig)
        if pool_config.model.path is None:
            raise BadInput(
                expected=f"model.path in {config}, a checkpoint or a run",
                found="none",
                remedy="write what it is to serve",
            )
    elif model is None:
        raise BadInput(
            expected="--model, or --config FILE", found="neither", remedy="for example: assay pool up --model runs/a"
        )
    else:
        content = pool_content(engines, model=model, name=run_name)
        content["model"]["path"] = parts.named(model)
        if longest_wait is not None:
            content["longest_wait_seconds"] = longest_wait
        pool_config = build_config(content, InferencePoolConfig, source="the options")
    pool = start_pool(pool_config, pool_name=name, idle_minutes=idle_minutes)
    say(
        f"{pool.name} is up at {pool.access.address.base_url}",
        f"assay evaluate --pool {pool.name} …   evaluates on it",
        f'eval "$(assay pool env {pool.name})"    lets any OpenAI client in this shell ask it',
        f"assay pool down {pool.name}            ends it; without a user it ends after {idle_minutes:g} minutes",
        f"It runs on {pool.place}, and is found by its name through {places()[0]}.",
    )


def pool_ls(*, as_json: Json = False) -> None:
    """Show the pools that are kept up on this machine, or published in ASSAY_POOLS."""
    rows = [state_of(state) for state in list_kept()]
    if as_json:
        print_json(rows)
        return
    shown: list[tuple[str, ...]] = []
    for row in rows:
        replicas = "\n".join(f"{name}: {state}" for name, state in row["replicas"].items())
        users = "\n".join(row["users"]) or "none"
        shown.append((row["name"], row["state"], row["base_url"], replicas, users, str(row["answered"])))
    table = table_of("Name", "State", Column("Address", no_wrap=True), "Replicas", "Users", "Answered", rows=shown)
    OUT.print(table if rows else f"No pool is kept up in {' or '.join(places())}.", soft_wrap=not rows)
    for row in rows:
        if row["state"] == "failed":
            say(f"{row['name']} has given up: {row['reason']}", "The next request makes it try again.")
        elif row["reason"]:
            say(f"{row['name']} is out of reach: {row['reason']}")


def pool_env(name: _Name, /, *, admin: bool = False) -> None:
    """Print variables for OpenAI clients of a pool, and for evaluations by its address, including its key.

    Args:
        admin: Its admin key too, for evaluations that bring more.
    """
    access = access_to(name)
    key = access.key.get_secret_value()
    variables = {"OPENAI_BASE_URL": access.address.base_url, "OPENAI_API_KEY": key, POOL_KEY_VARIABLE: key}
    if admin and access.admin_key is not None:
        variables[POOL_ADMIN_KEY_VARIABLE] = access.admin_key.get_secret_value()
    write("".join(f"export {variable}={value}\n" for variable, value in variables.items()))


def pool_logs(name: _Name, /, *, lines: int = 200) -> None:
    """Print the log of the job that keeps a pool up, from any machine with access to its backend.

    Args:
        lines: Number of lines.
    """
    job = job_of(name)
    write(job.logs(lines) if job is not None else "")


def pool_down(name: _Name, /) -> None:
    """End a pool with all its processes, even if it is in use, from any machine with access to its backend."""
    take_down(name)
    say(f"{name} is down.")


def start_pool(config: InferencePoolConfig, *, pool_name: str | None, idle_minutes: float) -> KeptPool:
    """Keeps a pool up for every complete checkpoint at `model.path`; its engines start at the first request."""
    path, run_name = config.model.path, config.model.name
    assert path is not None
    model = config.model.model_copy(update={"path": None})  # users may add others
    complete = checkpoints_to_serve(path, kinds=WITH_CODE if model.trusts_code else SERVED)
    require_code_allowed((each.folder for each in complete if each.folder), allowed=model.trusts_code)
    checkpoints = [
        Servable.from_folder(checkpoint.named_in(run_name), checkpoint.folder, digest_model_folder(checkpoint.folder))
        for checkpoint in complete
        if checkpoint.folder is not None
    ]
    if current_client().is_local:
        ensure_environment(ENVIRONMENTS[environment_name(config)])
    counted = config.resource_config.chip_count() > 0
    variables: dict[str, str] = {}
    if counted:
        from tasks.prefect_server.client import server_variables  # with Prefect, which takes seconds

        variables = server_variables()
    return keep_up(
        pool_name or run_name,
        config.model_copy(update={"model": model}),
        checkpoints,
        idle_seconds=idle_minutes * 60,
        reserved=accelerators_counted if counted else nullcontext,
        variables=variables,
    )


@contextmanager
def accelerators_counted(resources: ResourceConfig) -> Iterator[None]:
    """Reserves a kept pool's share of the Prefect server's limit, and logs waits to the pool's log."""
    from tasks.prefect_server.client import accelerators_reserved  # with Prefect

    def note(update: Update) -> None:
        if isinstance(update, Event):
            logging.getLogger("assay.pool").info(update.text)

    with listening(note), accelerators_reserved(resources):
        yield


def checkpoints_to_serve(path: str, *, kinds: Collection[Kind] = SERVED) -> list[Checkpoint]:
    """Returns the complete checkpoints at a location, of `kinds`; prints the others with their reasons."""
    shown = partial(ERR.print, highlight=False, markup=False, soft_wrap=True)
    return complete_among(find_checkpoints(path, kinds=kinds, note=shown), path, on_left_out=shown)


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
