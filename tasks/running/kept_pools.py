"""Access to kept pools for flows: by name, or by address with keys from the environment or a Prefect secret block."""

from __future__ import annotations

from typing import Any

from pydantic import SecretStr

from pools.access import PoolAccess
from pools.pool.kept import access_to
from resources.errors import BadInput, SinkFailed
from tasks.sinks.credentials import loaded_block

_KEYS = ("key", "admin_key")


def access_of(pool: str, key_block: str | None = None) -> PoolAccess:
    """Returns access to a kept pool, given by name or address; see `access_to`.

    Args:
        key_block: Prefect secret block with the key of the pool at an address, or with an object of `key` and
            `admin_key`; the keys come from the settings when None.

    Raises:
        BadInput: the block cannot be loaded or has other content; or as in `access_to`.
    """
    return access_to(pool, **(_keys_in(key_block) if key_block is not None else {}))


def _keys_in(block: str) -> dict[str, SecretStr]:
    from prefect.blocks.system import Secret

    try:
        content: Any = loaded_block(Secret, block).get()
    except SinkFailed as error:
        raise BadInput(expected=error.expected, found=error.found, remedy=error.remedy) from error
    keys = content if isinstance(content, dict) else {"key": content}
    if not keys or set(keys) - set(_KEYS) or not all(isinstance(key, str) and key for key in keys.values()):
        raise BadInput(
            expected=f"a pool's key in the Prefect block {block}, or an object with {' and '.join(_KEYS)}",
            found="something else",
            remedy="write there what `assay pool env NAME` prints where the pool was started",
        )
    return {name: SecretStr(key) for name, key in keys.items()}
