"""Keys of a pool and of its engines, as their processes receive them in the environment."""

from __future__ import annotations

import secrets

from pydantic import BaseModel, ConfigDict, SecretStr

from resources.errors import ProxyFailed
from resources.settings import variable

POOL_KEY_VARIABLE = "ASSAY_POOL_KEY"
POOL_ADMIN_KEY_VARIABLE = "ASSAY_POOL_ADMIN_KEY"
POOL_JOIN_TOKEN_VARIABLE = "ASSAY_POOL_JOIN_TOKEN"
ENGINE_KEY_VARIABLE = "ASSAY_ENGINE_KEY"
_VARIABLES = {"client": POOL_KEY_VARIABLE, "admin": POOL_ADMIN_KEY_VARIABLE, "join": POOL_JOIN_TOKEN_VARIABLE}


class ProxyKeys(BaseModel):
    """Keys of a pool's proxy, passed in its environment, since every user can read command lines."""

    model_config = ConfigDict(frozen=True)

    client: SecretStr
    """Key that evaluators send."""
    admin: SecretStr
    """Key that the pool sends, and users that request checkpoints."""
    join: SecretStr
    """Key that replicas send."""

    @classmethod
    def new(cls) -> ProxyKeys:
        return cls(**{name: SecretStr(secrets.token_urlsafe(24)) for name in _VARIABLES})

    def as_environment(self) -> dict[str, str]:
        """Returns the variables that `proxy_keys` reads in the proxy's process."""
        return {key: getattr(self, name).get_secret_value() for name, key in _VARIABLES.items()}


def proxy_keys() -> ProxyKeys:
    """Returns the keys that the pool set for this process, its proxy."""
    keys = {name: variable(key) or "" for name, key in _VARIABLES.items()}
    if not all(keys.values()):
        raise ProxyFailed(
            expected=f"{', '.join(_VARIABLES.values())} in the environment",
            found="at least one of them unset or empty",
            remedy="set each to a secret of its own, such as the output of `openssl rand -hex 32`",
        )
    return ProxyKeys(**{name: SecretStr(key) for name, key in keys.items()})


def join_token() -> str:
    """Returns the token with which this process, a replica, joins its pool."""
    if token := variable(POOL_JOIN_TOKEN_VARIABLE):
        return token
    raise ProxyFailed(
        expected=f"{POOL_JOIN_TOKEN_VARIABLE} in the environment",
        found="nothing there",
        remedy="let the pool start its replicas, or give them the token of the pool they join",
    )
