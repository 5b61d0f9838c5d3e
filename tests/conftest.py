"""Fixtures of all tests."""

from __future__ import annotations

import gc
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from fakes import gcs_variables, ray_variables  # noqa: F401 before any test imports gcsfs or ray
from fakes.prefect_database import new_databases
from fakes.shared import end_shared, shared
from resources.settings import settings
from tiers import brought_back, changed_since, entry_of

TOGETHER = {
    "a Prefect server": (
        *("integration/test_prefect_blocks.py", "integration/test_cli.py", "integration/test_evaluations_together.py"),
        "integration/test_alerts.py",
        *("integration/test_flows.py", "integration/test_generation.py", "integration/test_suites_real.py"),
        *("integration/test_training_hooks.py", "integration/test_wheel.py"),
    ),
    "another Prefect server": (
        *("e2e/test_train_and_evaluate.py", "integration/test_flow_runs.py", "integration/test_reconcile_flow.py"),
    ),
    "jobs on iris": ("integration/test_iris_jobs.py", "integration/test_training_real.py"),
    "jobs on slurm": ("integration/test_slurm_jobs.py",),
    "an lm-eval": (
        *("integration/test_lm_eval_real.py", "integration/test_lm_eval_refusals.py"),
        *("integration/test_warm_lm_eval.py", "integration/test_early_decisions.py"),
    ),
    "another harness": (
        *("integration/test_alpaca_eval_real.py", "integration/test_helm_real.py"),
        *("integration/test_inspect_real.py", "integration/test_lies.py"),
    ),
    "an MLflow": (
        "e2e/test_eval_job.py",
        "contract/test_sinks.py",
        "integration/test_mlflow_checkpoints.py",
        "integration/test_mlflow_sink.py",
    ),
}
"""Files that share slow servers, and so run in the same process."""
IN_TURN = (
    "jobs on ray",
    *("tests/integration/test_cli_jobs.py", "tests/integration/test_pool_on_ray.py"),
    *("tests/integration/test_ray_jobs.py", "tests/integration/test_ray_tpu.py"),
    *("tests/integration/test_levanter_jobs.py", "tests/integration/test_kept_pools_on_ray.py"),
)
"""Groups and files with a Ray each, in turn in a single process: programs of different Rays mistake each other."""
_GROUPS = {f"tests/{file}": name for name, files in TOGETHER.items() for file in files}
_ON_A_CLUSTER = re.compile(r"tests/(?:contract|integration)/\w+\.py::\w+\[(iris|ray|slurm)[-\]]")


def _group_of(nodeid: str) -> str:
    # tests with the same group share servers and clusters
    if on_a_cluster := _ON_A_CLUSTER.match(nodeid):
        return f"jobs on {on_a_cluster[1]}"
    file = nodeid.split("::")[0]
    return _GROUPS.get(file, file)


_BACK = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the choice of a part of the tests; without it, those named on the command line run."""
    group = parser.getgroup("assay")
    group.addoption("--part", choices=("test", "rest"), help="of `make test`, or all that it leaves out (tiers.py)")
    group.addoption("--since", help="commit that the working tree is compared with: changed parts are in `test`")


def pytest_configure(config: pytest.Config) -> None:
    """Finds the modules that changes bring into `make test`; workers take what the first process found."""
    if hasattr(config, "workerinput"):
        config.stash[_BACK] = config.workerinput["back"]  # pyright: ignore[reportAttributeAccessIssue]
        return
    try:
        changed = changed_since(config.getoption("since")) if config.getoption("part") else []
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_BACK] = brought_back(changed)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Sends a worker the modules that changes bring into `make test`."""
    node.workerinput["back"] = node.config.stash[_BACK]


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Names the modules that changes brought into `make test`, with their reasons."""
    if config.getoption("part") is None:
        return []
    return [
        f"with the changes, part of `make test`: {entry}, for {path}" for entry, path in config.stash[_BACK].items()
    ]


def _is_left_out(nodeid: str, config: pytest.Config) -> bool:
    if (part := config.getoption("part")) is None:
        return False
    entry = entry_of(nodeid)
    return (entry is not None and entry not in config.stash[_BACK]) is (part == "test")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out modules of another part without importing them, where no test of them can belong to it."""
    if collection_path.suffix != ".py" or "contract" in collection_path.parts:  # some backends are in another part
        return None
    nodeid = collection_path.relative_to(config.rootpath).as_posix()
    return True if _is_left_out(nodeid, config) else None


gc.disable()  # until all is imported: garbage collection takes a fifth of that time and finds nothing


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Enables garbage collection again, and exempts all imported objects."""
    gc.freeze()
    gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedules as `--dist loadfile` does, with some groups treated as a single file."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = _group_of(nodeid)
            return IN_TURN[0] if group in IN_TURN else group

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the shared servers after a group or file: they would use the processor until the end."""
    if nextitem is None or _group_of(item.nodeid) != _group_of(nextitem.nodeid):
        end_shared()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests of another part, and sorts files: with engines, with harnesses, servers or processes, and logic.

    Workers take files in this order: long files first, computing files together with mostly waiting files (contract
    tests and faults), and short files fill in at the end.
    """
    left_out = [item for item in items if _is_left_out(item.nodeid, config)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not _is_left_out(item.nodeid, config)]
    ranks: dict[Path, int] = {}
    for item in items:
        rank = 0 if item.get_closest_marker("engine") else 1 + ("unit" in item.path.parts)
        ranks[item.path] = min(rank, ranks.get(item.path, rank))
    items.sort(key=lambda item: (ranks[item.path], len(item.path.parts) if ranks[item.path] == 2 else 0))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with about a megabyte of space: a tmpfs if mounting is allowed, else a limit on the size of files."""
    folder = tmp_path / "small-disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode == 0:
        try:
            yield folder
        finally:
            subprocess.run(["umount", str(folder)], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for all tests of this process: digests, staged copies, job folders, verdicts on reloads.

    Environments, and caches of compiled code of engines and JAX, stay in the user's cache: they take minutes to make,
    and are named after their content. So does the database of a new Prefect server.
    """
    folder = tmp_path_factory.getbasetemp() / "cache"
    folder.mkdir()
    for kept in (settings().environments_dir, settings().engine_cache_dir, settings().jax_cache_dir, new_databases()):
        kept.mkdir(parents=True, exist_ok=True)
        (folder / kept.name).symlink_to(kept.resolve())
    return folder


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_session(session_cache: Path) -> Iterator[None]:
    # set before the fixtures of modules: their processes inherit it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASSAY_CACHE_DIR", str(session_cache))
        settings.cache_clear()
        yield
    settings.cache_clear()


@pytest.fixture(autouse=True)
def _own_cache(session_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(session_cache))
    settings.cache_clear()
    yield
    settings.cache_clear()


@shared
def _prefect_server() -> Iterator[str]:
    # flows that run in this process meanwhile import each harness once
    from prefect.context import get_settings_context
    from prefect.logging.handlers import APILogWorker

    from fakes.prefect_server import FEW_SERVICES, NO_UI, start_prefect_server, used_here
    from fakes.processes import end, free_port
    from fakes.warm_servers import KeptServers
    from tasks.running import warm

    servers, port = KeptServers(), free_port()
    address = f"http://127.0.0.1:{port}/api"
    with TemporaryDirectory(prefix="assay-prefect-") as home, pytest.MonkeyPatch.context() as patch:
        server = start_prefect_server(Path(home), port, variables={**FEW_SERVICES, **NO_UI})
        try:
            with used_here(address):
                patch.setattr(warm, "warmed", servers.warmed)
                patch.setattr("prefect.context.GLOBAL_SETTINGS_CONTEXT", get_settings_context())  # of other threads
                yield address
                APILogWorker.drain_all(timeout=30, at_exit=False)
        finally:
            servers.close()
            end(server)


@pytest.fixture(scope="module")
def prefect_api() -> str:
    """Address of a Prefect server for these tests; flows called in this process use it by themselves."""
    return _prefect_server()


@shared
def _mlflow_server() -> Iterator[str]:
    from fakes.mlflow_server import mlflow_server

    with TemporaryDirectory(prefix="assay-mlflow-") as folder, mlflow_server(Path(folder)) as address:
        yield address


@pytest.fixture(scope="module")
def mlflow_address() -> str:
    """Address of an MLflow server, on which each test has experiments of its own."""
    return _mlflow_server()


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    # a shell's & or nohup makes pytest ignore SIGINT and SIGHUP, and its child processes, too
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="module", autouse=True)
def _leaves_ray() -> Iterator[None]:
    # a process connected to a Ray sends its jobs to it: the next module would use a stopped cluster
    yield
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()
