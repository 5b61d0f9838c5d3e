"""The only reader of the process environment, by fields of `Settings` (prefix `ASSAY_`) or the functions below."""

from __future__ import annotations

import configparser
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

_KEY_NAME = re.compile(r"TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|_(KEY|AUTH)$", re.I)
_USER_IN_URL = re.compile(r"://[^/\s@]+@")

STORES = ("AWS_*", "S3_*", "GOOGLE_*", "GCS*", "GCE_*", "CLOUDSDK_*", "AZURE_*", "FSSPEC_*")
SERVICES = ("RAY_*", "IRIS_*", "KUBERNETES_*", "UV_*", "PIP_*", "MLFLOW_TRACKING_*")
# Patterns of stores, clusters, package indices and trackers; their keys belong to the jobs that use them.
_WITH_KEYS = (*STORES, *SERVICES, "MLFLOW_*", "WANDB_*")
_HTTP_PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
_NO_PROXY = ("NO_PROXY", "no_proxy")
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_PLACE = ("REPLICA_INDEX", "HOST_INDEX", "HOST_COUNT")
MAX_EGRESS_VARIABLE, MAX_USD_VARIABLE, REGION_VARIABLE = "ASSAY_MAX_EGRESS_USD", "ASSAY_MAX_USD", "ASSAY_REGION"


class Settings(BaseSettings):
    """Settings of a machine, each read from `ASSAY_<FIELD>`."""

    model_config = SettingsConfigDict(env_prefix="ASSAY_", frozen=True, extra="ignore")

    cache_dir: Path = Field(
        default_factory=lambda: Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "assay"
    )
    """Environments, journal, copies of checkpoints, logs of jobs."""

    built_environments: Path | None = None
    """Folder of prebuilt environments, as in Assay's images; searched before the folder of the cache."""

    commit: str | None = None
    """Commit that Assay was installed from, for an installation without a checkout; set in Assay's images."""

    python: Path | None = None
    """Python interpreter for environments; the running interpreter when unset."""

    pinned_lists: dict[str, Path] = {}
    """Pinned lists in place of Assay's own, by environment, as JSON: `{"lm-eval": "/lists/lm-eval-0.4.12.txt"}`."""

    jobs: str | None = None
    """Backend of jobs: `local`, `ray://auto`, `ray://host:10001`, `iris://host:port`,
    `kubernetes://context/namespace?queue=name`, `slurm://partition`.
    Set in every job, for the jobs that it submits.
    """

    job_image: str | None = None
    """Container image of jobs on Kubernetes that name no image."""

    job_lease_seconds: float = Field(default=300.0, gt=0)
    """Seconds that pods on Kubernetes keep running without a heartbeat of their submitter; 180 or more."""

    slurm_dir: Path = Field(default_factory=lambda: Path.home() / ".assay" / "slurm")
    """Folder of jobs on Slurm, which all machines of the cluster see under this path."""

    regions: Path | None = None
    """File that describes regions, buckets and prices, in place of `deployments/regions.yaml`."""

    max_egress_usd: float = Field(default=0.0, ge=0)
    """Highest cost in USD of checkpoints read from another region by a pool, or by a job that loads them itself."""

    max_usd: float | None = Field(default=None, ge=0)
    """Highest expected cost of an evaluation in USD; a higher or unknown cost is refused before the start."""

    region: str | None = None
    """Region of this machine in the regions file, if its metadata lacks it; set for flow runs at work pools."""

    prefix: str | None = None
    """Root of this machine's data, such as `gs://marin-us-central2`; implies its region. Default: `MARIN_PREFIX`."""

    pools: str | None = None
    """Folder, or path in a store, where `assay pool up` publishes pools for all machines that share it; when unset,
    pools are visible only on their own machine.
    """

    pool_key: SecretStr | None = None
    """Key of the pool given as `--pool https://…`; allows model requests and evaluation of the pool's checkpoints."""

    pool_admin_key: SecretStr | None = None
    """Admin key of that pool; needed to evaluate checkpoints that the pool was not started with."""

    endpoint_api_key: SecretStr | None = None
    """Key for an already running endpoint given with `--base-url`."""

    judge_api_key: SecretStr | None = None
    """Key for the endpoint of a judge that is not a pool of this machine."""

    records_key: SecretStr | None = None
    """Key that signs records; when set, a record without a valid signature counts as changed."""

    offline: bool = False
    """Keeps harnesses and engines from contacting a hub."""

    staging_max_bytes: int = Field(default=200 * 2**30, ge=0)
    """Maximum bytes of local copies of checkpoints; the least recently used are deleted first."""

    inherit: str = ""
    """Further variables for engines, harnesses, proxies and sinks: `MY_MIRROR,CORP_*`; full names if they hold keys."""

    insecure: bool = False
    """Allows unencrypted keys, prompts and answers of pools between machines; only for networks without strangers."""

    code_isolation: Literal["required", "where_possible"] = "required"
    """If model-written code cannot be isolated: `required` refuses, `where_possible` runs it as this user."""

    @property
    def environments_dir(self) -> Path:
        """Folder with a virtual environment per pinned list; resolved, since scripts in it contain its path."""
        return (self.cache_dir / "environments").resolve()

    @property
    def jobs_dir(self) -> Path:
        return self.cache_dir / "jobs"

    @property
    def engine_cache_dir(self) -> Path:
        """Folder for compilation results of engines, reused at later starts."""
        return self.cache_dir / "engines"

    @property
    def jax_cache_dir(self) -> Path:
        """JAX's compilation cache, for trainings and Levanter's evaluations; resolved, as JAX's keys contain it."""
        return (self.cache_dir / "jax").resolve()

    @property
    def journal_path(self) -> Path:
        """The journal's file, shared by the pools of this machine."""
        return self.cache_dir / "journal" / "journal.sqlite"

    @property
    def pools_dir(self) -> Path:
        """Folder with a file per running pool that is published nowhere else: its address and keys."""
        return self.cache_dir / "pools"

    @property
    def staging_dir(self) -> Path:
        return self.cache_dir / "staged"


@cache
def settings() -> Settings:
    """Returns the settings of this process; read once."""
    return Settings()


def with_pinned_lists(lists: Mapping[str, Path]) -> AbstractContextManager[None]:
    """Overrides pinned lists of environments within the block, in this process and in jobs that it starts."""
    content = {name: str(path) for name, path in {**settings().pinned_lists, **lists}.items()}
    return variable_set("ASSAY_PINNED_LISTS", json.dumps(content))


def deployment_data(*names: str) -> Path:
    """Returns the path of a file or folder of `deployments/`: in the installed package, else in the checkout."""
    installed = Path(__file__).parent / "deployments"
    return (installed if installed.is_dir() else Path(__file__).parents[1] / "deployments").joinpath(*names)


def process_environment(
    overrides: dict[str, str] | None = None, *, inherited: Iterable[str] | None = None
) -> dict[str, str]:
    """Returns the environment for a child process, without variables that would leak this interpreter into another.

    `inherited` limits it to these names and patterns, see `resources/jobs/inheritance.py`; `overrides` are added. With
    an HTTP proxy, `NO_PROXY` includes this machine, in addition to its entries in this process and in `overrides`.
    """
    left_out = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    base = {name: value for name, value in os.environ.items() if name not in left_out}
    if inherited is not None:
        base = {name: value for name, value in base.items() if may_inherit(name, value, inherited)}
    variables = {**base, **(overrides or {})}
    return {**variables, **_without_proxies(base, variables)}


def ask_this_machine_directly() -> None:
    """Keeps libraries in this process from using the HTTP proxy for loopback (for the command line)."""
    os.environ.update(_without_proxies(os.environ))


def _without_proxies(*environments: Mapping[str, str]) -> dict[str, str]:
    if not any(environment.get(name) for environment in environments for name in _HTTP_PROXIES):
        return {}
    given = [environment.get(name, "") for environment in environments for name in _NO_PROXY]
    if "*" in given:
        return dict.fromkeys(_NO_PROXY, "*")
    hosts = [host.strip() for value in given for host in value.split(",")]
    return dict.fromkeys(_NO_PROXY, ",".join(dict.fromkeys(filter(None, [*hosts, *_THIS_MACHINE]))))


def may_inherit(name: str, value: str, inherited: Iterable[str]) -> bool:
    """Returns True for a variable in the list, in `ASSAY_INHERIT`, or of an Assay setting that is no secret."""
    ours = (f"ASSAY_{field}".upper() for field in Settings.model_fields if not field.endswith("_key"))
    named = (part.strip() for part in settings().inherit.split(","))
    return is_named(name, value, (*inherited, *named, *ours, "MARIN_PREFIX"))


def is_named(name: str, value: str, patterns: Iterable[str]) -> bool:
    """Returns True if a variable matches a list of names and patterns.

    A variable that holds a key, by its name or as a URL with a user, must be listed with its full name, unless the
    pattern is of `STORES`, `SERVICES` or trackers.
    """
    holds_key = _KEY_NAME.search(name) is not None or _USER_IN_URL.search(value) is not None
    return any(
        name == pattern or (fnmatchcase(name, pattern) and (not holds_key or pattern in _WITH_KEYS))
        for pattern in patterns
    )


def set_process_environment_defaults(defaults: dict[str, str]) -> None:
    """Sets variables of this process that are unset (used by the command line, and before Ray connects)."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """Sets a variable of this process and its children within the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    settings.cache_clear()
    try:
        yield
    finally:
        del os.environ[name]
        set_process_environment_defaults({name: before} if before is not None else {})
        settings.cache_clear()


def set_tracking_server(uri: str) -> None:
    """Sets the MLflow tracking server for artifacts that this process reads, overriding its variables."""
    os.environ["MLFLOW_TRACKING_URI"] = uri


def pip_find_links() -> list[str]:
    """Returns the extra folders or pages where this machine's pip finds wheels; uv does not read this configuration."""
    links = os.environ.get("PIP_FIND_LINKS", "").split()
    if links:
        return links
    home = Path.home()
    candidates = [
        Path(os.environ.get("PIP_CONFIG_FILE", "/etc/pip.conf")),
        home / ".config/pip/pip.conf",
        home / ".pip/pip.conf",
        Path(sys.prefix) / "pip.conf",
    ]
    parser = configparser.RawConfigParser()
    parser.read([path for path in candidates if path.is_file()], encoding="utf-8")
    for section in ("install", "global"):
        if parser.has_option(section, "find-links"):
            links.extend(parser.get(section, "find-links").split())
    return links


def data_prefix() -> str | None:
    """Returns the root of this machine's data: `ASSAY_PREFIX`, else `MARIN_PREFIX`."""
    return settings().prefix or os.environ.get("MARIN_PREFIX") or None


def mlflow_tracking_uri() -> str | None:
    """Returns the tracking server for reading artifacts: MLflow's own `MLFLOW_TRACKING_URI`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def variable(name: str) -> str | None:
    """Returns a variable of this process, such as the user of a job or a pool sets for its processes."""
    return os.environ.get(name)


def variables_like(pattern: str, *, but: Iterable[str] = ()) -> dict[str, str]:
    """Returns the variables of this process that match a pattern and none of the patterns in `but`."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if fnmatchcase(name, pattern) and not any(fnmatchcase(name, other) for other in but)
    }


def variables_named(*names: str) -> dict[str, str]:
    """Returns the variables of this process with these names, as far as they are set."""
    return {name: value for name in names if (value := os.environ.get(name))}


def iris_job() -> str | None:
    """Returns the controller of this process's job, as `iris://host:port`; None outside of Iris jobs."""
    address = os.environ.get("IRIS_CONTROLLER_ADDRESS") or os.environ.get("IRIS_CONTROLLER_URL")
    return f"iris://{address.split('://')[-1]}" if address and os.environ.get("IRIS_TASK_ID") else None


def iris_task() -> str | None:
    """Returns the Iris task of this process, as `/user/job/0`; None outside of Iris jobs."""
    return os.environ.get("IRIS_TASK_ID", "").partition(":")[0] or None


def announcement_path() -> Path | None:
    """Returns the file that the backend forwards to holders of this job's handle; None outside of jobs."""
    name = os.environ.get("ASSAY_ANNOUNCEMENT")
    return Path(name) if name else None


def process_rank() -> int:
    """Returns the rank of this process in its job, with a process per host of each replica; 0 outside of jobs."""
    replica, host, hosts = (int(os.environ.get(f"ASSAY_{name}", "0")) for name in _PLACE)
    return replica * hosts + host


def job_id() -> str:
    """Returns the job id of this process; empty outside of jobs."""
    return os.environ.get("ASSAY_JOB_ID", "")
