"""Prefect state read without importing Prefect, which takes seconds: flow runs, tasks, the configured server."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from functools import cached_property, update_wrapper
from importlib import import_module
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from resources.settings import variable, variables_like

P = ParamSpec("P")
R = TypeVar("R")


class Step(Generic[P, R]):
    """A function that runs as a Prefect task in a flow run, and as the plain function, `fn`, otherwise."""

    def __init__(self, fn: Callable[P, R], options: dict[str, Any]) -> None:
        self.fn = fn
        self._options = options
        update_wrapper(self, fn)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # without a flow run there are no retries and no server requests
        return self._task(*args, **kwargs) if in_flow_run() else self.fn(*args, **kwargs)

    @cached_property
    def _task(self) -> Callable[P, R]:
        from prefect import task
        from prefect.cache_policies import NO_CACHE

        return task(cache_policy=NO_CACHE, persist_result=False, **self._options)(self.fn)


def step(**options: Any) -> Callable[[Callable[P, R]], Step[P, R]]:
    """Makes a function a `Step` with options of Prefect's `task`; results are not persisted."""
    return lambda fn: Step(fn, options)


def in_flow_run() -> bool:
    """Returns True inside a Prefect flow run; False if Prefect was not imported."""
    if "prefect" not in sys.modules:
        return False
    from prefect.context import FlowRunContext

    return FlowRunContext.get() is not None


def flow_run_id() -> str | None:
    """Returns the id of the current flow run, if any."""
    return _runtime_id("flow_run")


def deployment_id() -> str | None:
    """Returns the id of the current flow run's deployment, if any."""
    return _runtime_id("deployment")


def _runtime_id(name: str) -> str | None:
    return import_module(f"prefect.runtime.{name}").id if "prefect" in sys.modules else None


def run_logger() -> Logger | LoggerAdapter[Any] | None:
    """Returns the logger of the current Prefect run, if any."""
    if "prefect" not in sys.modules:
        return None
    from prefect.exceptions import MissingContextError
    from prefect.logging import get_run_logger

    try:
        return get_run_logger()
    except MissingContextError:
        return None


def server_named() -> bool:
    """Returns True if a Prefect server is configured, by a variable, a profile or a file of the working directory."""
    if "prefect" not in sys.modules and not _server_may_be_named():
        return False
    from prefect.settings import PREFECT_API_URL

    return bool(PREFECT_API_URL.value())


def _server_may_be_named() -> bool:
    if {name.upper() for name in variables_like("*")} & {"PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH"}:
        return True
    home = Path(variable("PREFECT_HOME") or Path.home() / ".prefect")
    if Path("prefect.toml").is_file() or "prefect_" in _text(Path(".env")):
        return True
    try:
        described = tomllib.loads(_text(Path("pyproject.toml")))
    except tomllib.TOMLDecodeError:
        return True
    return "prefect" in described.get("tool", {}) or "prefect_api_url" in _text(home / "profiles.toml")


def _text(file: Path) -> str:
    return file.read_text(errors="replace").lower() if file.is_file() else ""
