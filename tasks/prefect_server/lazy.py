"""Prefect as far as it can be known without importing it, which takes seconds: flow runs, tasks, a named server."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from functools import cached_property, update_wrapper
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from resources.settings import variable, variables_like

P = ParamSpec("P")
R = TypeVar("R")


class Step(Generic[P, R]):
    """A Prefect task where it is called in a flow run, and the plain function, `fn`, where there is none."""

    def __init__(self, fn: Callable[P, R], options: dict[str, Any]) -> None:
        self.fn = fn
        self._options = options
        update_wrapper(self, fn)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls it; without a flow run there are no retries, and no server is asked."""
        return self._task(*args, **kwargs) if in_flow_run() else self.fn(*args, **kwargs)

    @cached_property
    def _task(self) -> Callable[P, R]:
        from prefect import task
        from prefect.cache_policies import NO_CACHE

        return task(cache_policy=NO_CACHE, persist_result=False, **self._options)(self.fn)


def step(**options: Any) -> Callable[[Callable[P, R]], Step[P, R]]:
    """Makes a function a `Step`; the options are those of Prefect's `task`, whose results are not kept."""
    return lambda fn: Step(fn, options)


def in_flow_run() -> bool:
    """Returns whether this is called in a Prefect flow run; there is none in a process that has not imported it."""
    if "prefect" not in sys.modules:
        return False
    from prefect.context import FlowRunContext

    return FlowRunContext.get() is not None


def flow_run_id() -> str | None:
    """Returns the id of the flow run that this is called in, if there is one."""
    if "prefect" not in sys.modules:
        return None
    from prefect.runtime import flow_run

    return flow_run.id


def deployment_id() -> str | None:
    """Returns the id of the deployment whose flow run this is called in, if there is one."""
    if "prefect" not in sys.modules:
        return None
    from prefect.runtime import deployment

    return deployment.id


def run_logger() -> Logger | LoggerAdapter[Any] | None:
    """Returns the log of the Prefect run that this is called in, if there is one."""
    if "prefect" not in sys.modules:
        return None
    from prefect.exceptions import MissingContextError
    from prefect.logging import get_run_logger

    try:
        return get_run_logger()
    except MissingContextError:
        return None


def server_named() -> bool:
    """Returns whether Prefect was told of a server, by a variable, a profile or a file of the working directory."""
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
