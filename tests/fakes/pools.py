"""A pool with shortcuts that only tests need."""

from __future__ import annotations

from pools.endpoint import RunningModel
from pools.pool import inference
from pools.protocol import LoadReport, ProxyStatus


class InferencePool(inference.InferencePool):
    """The product's pool, used by its owner's session."""

    def load(self, name: str) -> tuple[RunningModel, LoadReport]:
        """Requests a single checkpoint, withdraws all other requests, and waits; returns as `PoolSession.load` does."""
        self.session._wants.clear()
        return self.session.load(name)

    @property
    def base_url(self) -> str:
        return self.access.address.base_url

    @property
    def key(self) -> str:
        return self.access.key.get_secret_value()

    @property
    def proxy_pid(self) -> int:
        address = self._proxy_process.address
        assert address is not None
        return address.pid

    def proxy_status(self) -> ProxyStatus:
        return self.access.proxy().status()

    def engine_urls(self) -> list[str]:
        return [replica.announcement.url for replica in self.proxy_status().replicas if replica.announcement.url]
