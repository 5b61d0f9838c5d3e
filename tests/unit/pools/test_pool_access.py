"""A pool named by its address, with a real proxy: rights of the client key, TLS in front of it, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from fakes.models import write_checkpoint
from fakes.proxy import JOIN_TOKEN, KEYS, RunningProxy, running_proxy
from fakes.tls import tls_before, write_authority
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable
from pools.pool.access import PoolAccess, PoolDescription, access_at
from pools.pool.kept import access_to
from pools.pool.session import PoolSession
from pools.protocol import Announcement, DesiredState
from resources.errors import BadInput, ProxyFailed, ProxyRefused
from resources.settings import settings

CONFIG = InferencePoolConfig.model_validate({"model": {"name": "run", "engine_kwargs": {"max_model_len": 64}}})
DESCRIPTION = PoolDescription(config=CONFIG, engine_build="build", engine_packages={"torch": "2"})


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes this machine's keys, and forgets the settings of a test."""
    for name in ("ASSAY_POOL_KEY", "ASSAY_POOL_ADMIN_KEY", "ASSAY_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Servable:
    return Servable.from_uri("run-1", str(write_checkpoint(tmp_path_factory.mktemp("run") / "step-1", seed=1)))


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, checkpoint: Servable) -> Iterator[RunningProxy]:
    """The proxy of a pool with a single checkpoint, held by its only replica."""
    folder = tmp_path_factory.mktemp("proxy")
    described = DESCRIPTION.model_dump_json()
    with running_proxy(folder, journal=folder / "journal.sqlite", description=described) as running:
        digest = checkpoint.digests.checkpoint
        ready = Announcement(instance="first", url="http://127.0.0.1:9", state="ready", digest=digest)
        running.client.set_state(DesiredState(models={"run-1": checkpoint.served}, orders={"a": "run-1"}))
        running.client.announce("a", ready, join_token=JOIN_TOKEN)
        yield running


def test_pool_at_an_address_says_itself_how_it_serves_and_what_it_knows(
    proxy: RunningProxy, checkpoint: Servable
) -> None:
    access = access_at(f"{proxy.url}/v1/", key=KEYS.client)
    assert (access.config, access.engine_build, access.engine_packages) == (CONFIG, "build", {"torch": "2"})
    assert access.checkpoints == {"run-1": checkpoint.uri}
    assert (access.address.base_url, access.admin_key) == (proxy.address.base_url, None)


def test_key_of_a_pool_at_an_address_comes_from_the_settings(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match="ASSAY_POOL_KEY"):
        access_to(proxy.url)
    for name, key in {"ASSAY_POOL_KEY": KEYS.client, "ASSAY_POOL_ADMIN_KEY": KEYS.admin}.items():
        monkeypatch.setenv(name, key.get_secret_value())
    settings.cache_clear()
    access = access_to(proxy.url)
    assert (access.key, access.admin_key) == (KEYS.client, KEYS.admin)
    assert access_to(proxy.url, key=KEYS.client).admin_key is None  # a given key is used without the machine's


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://pool.test", "http://pool.test"),
        ("ftp://pool.test", "ftp://pool.test"),
        ("https://", "https://"),
        ("https://pool.test?key=a", "key=a"),
        ("https://pool.test:port", "port"),
        ("https://user:word@pool.test", "something between"),
    ],
)
def test_address_that_is_none_or_not_encrypted_is_refused(url: str, problem: str) -> None:
    with pytest.raises(BadInput, match="Found:.*" + problem.replace("?", r"\?")):
        access_at(url, key=KEYS.client)


def test_address_that_is_not_encrypted_may_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_INSECURE", "1")
    settings.cache_clear()
    with pytest.raises(ProxyFailed, match=r"pool\.invalid:8000"):
        access_at("http://pool.invalid:8000", key=KEYS.client)


def test_wrong_key_or_server_differs_from_a_pool_that_is_down(proxy: RunningProxy, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="takes this key"):
        access_at(proxy.url, key=SecretStr("wrong"))
    with running_proxy(tmp_path) as undescribed, pytest.raises(BadInput, match="no description of its pool"):
        access_at(undescribed.url, key=KEYS.client)
    with pytest.raises(ProxyFailed, match=r"127\.0\.0\.1:9"):
        access_at("http://127.0.0.1:9", key=KEYS.client)


def used(access: PoolAccess, checkpoint: Servable, mirror: Path) -> list[str]:
    """Opens and closes a checkpoint for a cell; returns the names of the files copied to the mirror."""
    with PoolSession(access, [checkpoint], holder="a test") as session:
        opened = session.open("run-1", cell="cell", attempt="first", mirror=str(mirror))
        session.close_cell(opened, finished=False)
        return sorted(path.name for path in mirror.iterdir()) if mirror.exists() else []


def test_clients_key_evaluates_what_the_pool_knows_and_brings_and_copies_nothing(
    proxy: RunningProxy, checkpoint: Servable, tmp_path: Path
) -> None:
    user = access_at(proxy.url, key=KEYS.client)
    elsewhere = Servable(checkpoint.name, "s3://elsewhere/step-1", checkpoint.digests, checkpoint.tokenizer)
    with PoolSession(user, [elsewhere], holder="a user"):
        [lease] = proxy.client.status().leases.values()
        assert {name: served.uri for name, served in lease.models.items()} == {"run-1": checkpoint.uri}
    assert used(user, checkpoint, tmp_path / "mirror") == []
    other = Servable.from_uri("run-2", str(write_checkpoint(tmp_path / "step-2", seed=2)))
    changed = Servable("run-1", other.uri, other.digests, other.tokenizer)
    for brought, reason in ((other, "is no model of this pool"), (changed, "has other weights in this pool")):
        with pytest.raises(ProxyRefused, match=reason), PoolSession(user, [brought], holder="a user"):
            pass
    with PoolSession(access_at(proxy.url, key=KEYS.client, admin_key=KEYS.admin), [other], holder="an owner"):
        pass


def test_clients_key_touches_no_cell_with_copied_answers(
    proxy: RunningProxy, checkpoint: Servable, tmp_path: Path
) -> None:
    owner, user = access_at(proxy.url, key=KEYS.client, admin_key=KEYS.admin), access_at(proxy.url, key=KEYS.client)
    with PoolSession(owner, [checkpoint], holder="an owner") as session:
        opened = session.open("run-1", cell="copied", attempt="first", mirror=str(tmp_path / "mirror"))
        for act in (
            lambda: user.proxy().open_cell("copied", "second", mirror=None),
            lambda: user.proxy().close_cell("copied", "first", drop=True),
            lambda: user.proxy().open_cell("another", "first", mirror=str(tmp_path / "of-a-user")),
        ):
            with pytest.raises(ProxyRefused, match="Only the pool's admin key"):
                act()
        session.close_cell(opened, finished=True)


def test_tls_before_a_pool_is_verified_and_a_path_before_its_own_is_kept(
    proxy: RunningProxy, checkpoint: Servable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, certificate = write_authority(tmp_path)
    with tls_before(proxy.address.host, proxy.address.port, certificate=certificate) as url:
        with pytest.raises(ProxyFailed, match="certificate verify failed"):
            access_at(url, key=KEYS.client)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        access = access_at(url, key=KEYS.client)
        assert access.address.base_url == f"{url}/v1"
        assert used(access, checkpoint, tmp_path / "mirror") == []
        with pytest.raises(BadInput, match="There is nothing at this path"):
            access_at(f"{url}/pools/warm", key=KEYS.client)
