"""The only reader of the process environment.

Every variable Assay looks at is a field of `Settings` (prefix `ASSAY_`) or one of the functions below; the rest of
the code gets values as arguments.
"""

from __future__ import annotations

import configparser
import os
import sys
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from resources.errors import ProxyFailed

POOL_KEY_VARIABLE = "ASSAY_POOL_KEY"
POOL_ADMIN_KEY_VARIABLE = "ASSAY_POOL_ADMIN_KEY"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


class Settings(BaseSettings):
    """What a machine's owner may set, each as `ASSAY_<FIELD>`."""

    model_config = SettingsConfigDict(env_prefix="ASSAY_", frozen=True, extra="ignore")

    cache_dir: Path = Field(default_factory=lambda: _user_cache() / "assay")
    """Environments, engine compile caches, staged checkpoints, job logs. Safe to delete when nothing runs."""

    python: Path | None = None
    """Interpreter that engine and evaluator environments are built on; the running one when unset."""

    endpoint_api_key: SecretStr | None = None
    """Key for an already running endpoint given with `--base-url`."""

    offline: bool = False
    """Tell harnesses and engines not to look for anything on a hub."""

    @property
    def environments_dir(self) -> Path:
        """Folder that holds one virtual environment per pinned list."""
        return self.cache_dir / "environments"

    @property
    def jobs_dir(self) -> Path:
        """Folder that holds one folder per local job: its specification, status and logs."""
        return self.cache_dir / "jobs"

    @property
    def engine_cache_dir(self) -> Path:
        """Folder for what engines compile or inspect once and reuse at every later start."""
        return self.cache_dir / "engines"

    @property
    def staging_dir(self) -> Path:
        """Folder for local copies of checkpoints that lie in an object store."""
        return self.cache_dir / "staged"


@cache
def settings() -> Settings:
    """The settings of this process, read once."""
    return Settings()


def process_environment(overrides: dict[str, str] | None = None) -> dict[str, str]:
    """The environment for a child process: this one's, less what would leak our interpreter into another.

    Args:
        overrides: variables that win over the inherited ones.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    }
    return {**inherited, **(overrides or {})}


def set_process_environment_defaults(defaults: dict[str, str]) -> None:
    """Sets variables for this process that nobody has set yet (used once, by the command line)."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def prefect_api_url() -> str | None:
    """The Prefect server this process was pointed at, or None where one is started with each run."""
    return os.environ.get("PREFECT_API_URL") or None


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


def forwarded_secrets() -> dict[str, str]:
    """Credentials that jobs need wherever they run, as far as they are set here."""
    names = ("HF_TOKEN", "WANDB_API_KEY")
    return {name: value for name in names if (value := os.environ.get(name))}


class ProxyKeys(BaseModel):
    """Keys of one pool's proxy. They travel in its environment: a command line can be read by every user."""

    model_config = ConfigDict(frozen=True)

    client: SecretStr
    """What evaluators send."""
    admin: SecretStr
    """What the pool sends."""

    def as_environment(self) -> dict[str, str]:
        """The variables that `proxy_keys` reads in the proxy's process."""
        return {
            POOL_KEY_VARIABLE: self.client.get_secret_value(),
            POOL_ADMIN_KEY_VARIABLE: self.admin.get_secret_value(),
        }


def proxy_keys() -> ProxyKeys:
    """The keys that the pool gave to this process, which is its proxy.

    Raises:
        ProxyFailed: one of them is not set, or empty.
    """
    client, admin = os.environ.get(POOL_KEY_VARIABLE, ""), os.environ.get(POOL_ADMIN_KEY_VARIABLE, "")
    if not client or not admin:
        raise ProxyFailed(
            expected=f"{POOL_KEY_VARIABLE} and {POOL_ADMIN_KEY_VARIABLE} in the environment",
            found="at least one of them unset or empty",
            remedy="set both to secrets of your own, such as the output of `openssl rand -hex 32`",
        )
    return ProxyKeys(client=SecretStr(client), admin=SecretStr(admin))
