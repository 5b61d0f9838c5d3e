"""The only reader of the process environment.

Every variable Assay looks at is a field of `Settings` (prefix `ASSAY_`) or one of the functions below; the rest of
the code gets values as arguments.
"""

from __future__ import annotations

import configparser
import json
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from resources.errors import ProxyFailed
from resources.key_variables import is_named

_HTTP_PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
_NO_PROXY = ("NO_PROXY", "no_proxy")
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
POOL_KEY_VARIABLE = "ASSAY_POOL_KEY"
POOL_ADMIN_KEY_VARIABLE = "ASSAY_POOL_ADMIN_KEY"
POOL_JOIN_TOKEN_VARIABLE = "ASSAY_POOL_JOIN_TOKEN"
POOL_DESCRIPTION_VARIABLE = "ASSAY_POOL_DESCRIPTION"
_PLACE = ("REPLICA_INDEX", "HOST_INDEX", "HOST_COUNT")
ENGINE_KEY_VARIABLE = "ASSAY_ENGINE_KEY"
MAX_EGRESS_VARIABLE, MAX_USD_VARIABLE, REGION_VARIABLE = "ASSAY_MAX_EGRESS_USD", "ASSAY_MAX_USD", "ASSAY_REGION"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


class Settings(BaseSettings):
    """Settings of a machine's owner, each read from `ASSAY_<FIELD>`."""

    model_config = SettingsConfigDict(env_prefix="ASSAY_", frozen=True, extra="ignore")

    cache_dir: Path = Field(default_factory=lambda: _user_cache() / "assay")
    """Environments, journal, copies of checkpoints, logs of jobs."""

    built_environments: Path | None = None
    """Folder of environments built ahead, as in Assay's images; looked in before that of the cache."""

    commit: str | None = None
    """Commit that Assay was installed from, where that is no checkout; set in Assay's images."""

    python: Path | None = None
    """Interpreter that environments are built on; the running one when unset."""

    pinned_lists: dict[str, Path] = {}
    """Pinned lists in place of Assay's own, by environment, as JSON: `{"lm-eval": "/lists/lm-eval-0.4.12.txt"}`."""

    jobs: str | None = None
    """Place of jobs: `local`, `ray://auto`, `ray://host:10001`, `iris://host:port`,
    `kubernetes://context/namespace?queue=name`, `slurm://partition`.
    Set in every job, for the jobs inside it."""

    job_image: str | None = None
    """Container image of jobs on Kubernetes that name none themselves."""

    job_lease_seconds: float = Field(default=300.0, gt=0)
    """Time that pods on Kubernetes go on without a sign of their submitter; 180 or more."""

    slurm_dir: Path = Field(default_factory=lambda: Path.home() / ".assay" / "slurm")
    """Folder of jobs on Slurm, which all machines of the cluster see under this path."""

    regions: Path | None = None
    """File that describes regions, buckets and prices, in place of `deployments/regions.yaml`."""

    max_egress_usd: float = Field(default=0.0, ge=0)
    """Most that reading the checkpoints of a pool, or of a job that loads them itself, from another region may cost."""

    max_usd: float | None = Field(default=None, ge=0)
    """Most that an evaluation may be expected to cost; else, or where nobody knows, nothing of it is begun."""

    region: str | None = None
    """Region of this machine in the regions file, where no VM's metadata says it; set for flow runs at work pools."""

    prefix: str | None = None
    """Place of this machine's data, such as `gs://marin-us-central2`, which says its region; else `MARIN_PREFIX`."""

    pools: str | None = None
    """Folder, or place in a store, where `assay pool up` publishes pools for all machines that share it; else they are
    found on their own machine."""

    pool_key: SecretStr | None = None
    """Key of the pool that `--pool https://…` names; lets models be asked, and the pool's checkpoints be evaluated."""

    pool_admin_key: SecretStr | None = None
    """Admin key of that pool; needed to evaluate checkpoints that the pool was not started with."""

    endpoint_api_key: SecretStr | None = None
    """Key for an already running endpoint given with `--base-url`."""

    judge_api_key: SecretStr | None = None
    """Key for the endpoint of a judge that is not a pool of this machine."""

    records_key: SecretStr | None = None
    """Key that records are signed with; where it is set, a record without a valid signature counts as changed."""

    offline: bool = False
    """Tell harnesses and engines not to look for anything on a hub."""

    staging_max_bytes: int = Field(default=200 * 2**30, ge=0)
    """Bound on local copies of checkpoints; the least recently used go first."""

    inherit: str = ""
    """Further variables for engines, harnesses, proxies and sinks: `MY_MIRROR,CORP_*`; in full if they hold keys."""

    insecure: bool = False
    """Let keys, prompts and answers of pools travel unencrypted between machines, whose network keeps strangers out."""

    code_isolation: Literal["required", "where_possible"] = "required"
    """Refuse to run code that a model wrote where it cannot be isolated, or run it with this user's rights."""

    @property
    def environments_dir(self) -> Path:
        """Folder with one virtual environment per pinned list; resolved, since scripts in it name their folder."""
        return (self.cache_dir / "environments").resolve()

    @property
    def jobs_dir(self) -> Path:
        """Folder that holds one folder per local job: its specification, status and logs."""
        return self.cache_dir / "jobs"

    @property
    def engine_cache_dir(self) -> Path:
        """Folder for what engines compile or inspect once and reuse at every later start."""
        return self.cache_dir / "engines"

    @property
    def jax_cache_dir(self) -> Path:
        """Folder for what JAX compiles in trainings and Levanter's evaluations; resolved, since JAX's keys name it."""
        return (self.cache_dir / "jax").resolve()

    @property
    def journal_path(self) -> Path:
        """The journal's file, shared by the pools of this machine."""
        return self.cache_dir / "journal" / "journal.sqlite"

    @property
    def pools_dir(self) -> Path:
        """Folder with one file per pool that was kept up and published nowhere else: where it is, and its keys."""
        return self.cache_dir / "pools"

    @property
    def staging_dir(self) -> Path:
        """Folder for local copies of checkpoints that lie in an object store."""
        return self.cache_dir / "staged"


@cache
def settings() -> Settings:
    """The settings of this process, read once."""
    return Settings()


@contextmanager
def with_pinned_lists(lists: Mapping[str, Path]) -> Iterator[None]:
    """Takes environments from other pinned lists while the block lasts, in this process and in jobs it starts."""
    variable, before = "ASSAY_PINNED_LISTS", settings().pinned_lists
    try:
        os.environ[variable] = json.dumps({name: str(path) for name, path in {**before, **lists}.items()})
        settings.cache_clear()
        yield
    finally:
        os.environ[variable] = json.dumps({name: str(path) for name, path in before.items()})
        settings.cache_clear()


def deployment_data(*names: str) -> Path:
    """The path of a file or folder of `deployments/`: in the installed package, else in the checkout."""
    installed = Path(__file__).parent / "deployments"
    return (installed if installed.is_dir() else Path(__file__).parents[1] / "deployments").joinpath(*names)


def process_environment(
    overrides: dict[str, str] | None = None, *, inherited: Iterable[str] | None = None
) -> dict[str, str]:
    """The environment for a child process: this one's, less what would leak our interpreter into another.

    Args:
        overrides: variables that win over the inherited ones.
        inherited: names of those that it may have, see `resources/jobs/inheritance.py`; all when None.

    Where there is an HTTP proxy, `NO_PROXY` names this machine, beside what it names here and in `overrides`.
    """
    left_out = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    found = {name: value for name, value in os.environ.items() if name not in left_out}
    if inherited is not None:
        found = {name: value for name, value in found.items() if may_inherit(name, value, inherited)}
    variables = {**found, **(overrides or {})}
    return {**variables, **_without_proxies(found, variables)}


def ask_this_machine_directly() -> None:
    """Keeps libraries in this process from asking loopback through the network's HTTP proxy (for the command line)."""
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
    """Returns True if a variable is named by a list or `ASSAY_INHERIT`, or a setting of ours that is no secret."""
    ours = (f"ASSAY_{field}".upper() for field in Settings.model_fields if not field.endswith("_key"))
    named = (part.strip() for part in settings().inherit.split(","))
    return is_named(name, value, (*inherited, *named, *ours, "MARIN_PREFIX"))


def set_process_environment_defaults(defaults: dict[str, str]) -> None:
    """Sets variables for this process that nobody has set yet (used by the command line, and before Ray connects)."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """Sets a variable for this process, and what it starts, while the block lasts."""
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
    """Makes a tracking server the one whose artifacts this process reads, whatever its variables say."""
    os.environ["MLFLOW_TRACKING_URI"] = uri


def pip_find_links() -> list[str]:
    """Folders or pages where this machine's pip also looks for wheels; uv does not read them by itself."""
    found = os.environ.get("PIP_FIND_LINKS", "").split()
    if found:
        return found
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
            found.extend(parser.get(section, "find-links").split())
    return found


def data_prefix() -> str | None:
    """Returns the place of this machine's data: `ASSAY_PREFIX`, else `MARIN_PREFIX`."""
    return settings().prefix or os.environ.get("MARIN_PREFIX") or None


def mlflow_tracking_uri() -> str | None:
    """Returns the tracking server whose artifacts are read: MLflow's own `MLFLOW_TRACKING_URI`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def variable(name: str) -> str | None:
    """A variable of this process that its user passes on to a job by name."""
    return os.environ.get(name)


def variables_like(pattern: str, *, but: Iterable[str] = ()) -> dict[str, str]:
    """The variables of this process whose names match a pattern and none of the others."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if fnmatchcase(name, pattern) and not any(fnmatchcase(name, other) for other in but)
    }


def forwarded_secrets() -> dict[str, str]:
    """Credentials that jobs need wherever they run, as far as they are set here."""
    names = ("HF_TOKEN", "WANDB_API_KEY")
    return {name: value for name in names if (value := os.environ.get(name))}


def training_variables() -> dict[str, str]:
    """Returns all that this process was told about a training that it submits, as far as it is set here."""
    names = ("RUN_ID", "WANDB_API_KEY", "WANDB_MODE")
    return {name: value for name in names if (value := os.environ.get(name))}


class ProxyKeys(BaseModel):
    """Keys of one pool's proxy. They travel in its environment: a command line can be read by every user."""

    model_config = ConfigDict(frozen=True)

    client: SecretStr
    """Key that evaluators send."""
    admin: SecretStr
    """Key that the pool sends, and its users when they ask for checkpoints."""
    join: SecretStr
    """Key that replicas send."""

    @classmethod
    def new(cls) -> ProxyKeys:
        """Keys that nobody can guess."""
        return cls(**{name: SecretStr(secrets.token_urlsafe(24)) for name in cls.model_fields})

    def as_environment(self) -> dict[str, str]:
        """The variables that `proxy_keys` reads in the proxy's process."""
        return {
            POOL_KEY_VARIABLE: self.client.get_secret_value(),
            POOL_ADMIN_KEY_VARIABLE: self.admin.get_secret_value(),
            POOL_JOIN_TOKEN_VARIABLE: self.join.get_secret_value(),
        }


def proxy_keys() -> ProxyKeys:
    """The keys that the pool gave to this process, which is its proxy.

    Raises:
        ProxyFailed: one of them is not set, or empty.
    """
    names = {"client": POOL_KEY_VARIABLE, "admin": POOL_ADMIN_KEY_VARIABLE, "join": POOL_JOIN_TOKEN_VARIABLE}
    keys = {field: os.environ.get(name, "") for field, name in names.items()}
    if not all(keys.values()):
        raise ProxyFailed(
            expected=f"{', '.join(names.values())} in the environment",
            found="at least one of them unset or empty",
            remedy="set each to a secret of its own, such as the output of `openssl rand -hex 32`",
        )
    return ProxyKeys(**{field: SecretStr(key) for field, key in keys.items()})


def pool_description() -> str:
    """Returns what the pool says of itself to clients, as it gave it to this process, its proxy; else an empty text."""
    return os.environ.get(POOL_DESCRIPTION_VARIABLE, "")


def join_token() -> str:
    """The token with which this process, a replica, joins its pool."""
    token = os.environ.get(POOL_JOIN_TOKEN_VARIABLE, "")
    if not token:
        raise ProxyFailed(
            expected=f"{POOL_JOIN_TOKEN_VARIABLE} in the environment",
            found="nothing there",
            remedy="let the pool start its replicas, or give them the token of the pool they join",
        )
    return token


def iris_job() -> str | None:
    """The address, as `iris://host:port`, of the controller whose job this process belongs to; None outside of one."""
    address = os.environ.get("IRIS_CONTROLLER_ADDRESS") or os.environ.get("IRIS_CONTROLLER_URL")
    return f"iris://{address.split('://')[-1]}" if address and os.environ.get("IRIS_TASK_ID") else None


def iris_task() -> str | None:
    """The task of Iris, as `/user/job/0`, that this process belongs to; None outside of one."""
    return os.environ.get("IRIS_TASK_ID", "").partition(":")[0] or None


def announcement_path() -> Path | None:
    """The file whose content the backend passes to holders of this job's handle; None outside of jobs."""
    name = os.environ.get("ASSAY_ANNOUNCEMENT")
    return Path(name) if name else None


def process_rank() -> int:
    """Number of this process among those of its job, where each host of a replica has one; 0 outside of jobs."""
    replica, host, hosts = (int(os.environ.get(f"ASSAY_{name}", "0")) for name in _PLACE)
    return replica * hosts + host


def job_id() -> str:
    """The job that this process belongs to, empty where it belongs to none."""
    return os.environ.get("ASSAY_JOB_ID", "")
