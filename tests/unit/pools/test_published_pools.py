"""Files of kept pools: publication and lookup, files that may be read, and names that are taken."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import SecretStr

from fakes.conditional_store import conditional_store
from pools.config import InferencePoolConfig
from pools.pool.access import KeptPool, PoolAccess, all_published, publish, published_as, withdraw
from pools.pool.kept import find, list_kept, require, take_down
from pools.proxy.client import ProxyAddress
from resources.errors import BackendUnavailable, BadInput
from resources.settings import settings
from resources.storage import storage


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ASSAY_POOLS", str(tmp_path / "shared"))
    settings.cache_clear()
    yield
    settings.cache_clear()


def pool(name: str = "warm", *, job_id: str = "pool-warm-1", **fields: str) -> KeptPool:
    access = PoolAccess(
        address=ProxyAddress(host="127.0.0.1", port=9),
        key=SecretStr("key-of-clients"),
        admin_key=SecretStr("key-of-owners"),
        config=InferencePoolConfig.model_validate({"model": {"name": "run"}}),
        engine_build="build",
    )
    place = {"backend": "local", "place": "another machine", **fields}
    return KeptPool(name=name, access=access, job_id=job_id, created=datetime.now(UTC), idle_seconds=60, **place)


def test_pool_is_published_where_machines_share_and_found_there_before_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASSAY_POOLS")
    settings.cache_clear()
    assert publish(pool(job_id="here")) and publish(pool("own"))
    monkeypatch.setenv("ASSAY_POOLS", str(tmp_path / "shared"))
    settings.cache_clear()
    shared = pool(job_id="shared")
    assert publish(shared)
    file = tmp_path / "shared" / "warm.json"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent)] == [0o600, 0o700]
    shared_entry = published_as("warm")
    assert shared_entry is not None and shared_entry.pool == shared and "key-of-owners" in file.read_text()
    assert [(published.pool.name, published.pool.job_id) for published in all_published()] == [
        ("own", "pool-warm-1"),
        ("warm", "shared"),
    ]


@pytest.mark.parametrize("place", ["shared", "memory://pools-of-a-test"])
def test_name_that_is_taken_is_not_taken_again_and_only_its_own_file_is_withdrawn(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_POOLS", place if "://" in place else str(tmp_path / place))
    settings.cache_clear()
    first, second = pool(job_id="first"), pool(job_id="second")
    assert publish(first) and not publish(second)
    own_entry = published_as("warm")
    assert own_entry is not None and own_entry.pool == first
    withdraw(own_entry)
    assert publish(second) and not publish(first, in_place_of=own_entry)
    withdraw(own_entry)
    now = published_as("warm")
    assert now is not None and now.pool == second
    moved = second.model_copy(update={"idle_seconds": 1.0})
    assert publish(moved, in_place_of=now)
    if storage.is_local(now.uri):
        assert stat.S_IMODE(storage.local_path(now.uri).stat().st_mode) == 0o600
    again = published_as("warm")
    assert again is not None and again.pool == moved
    withdraw(again)
    assert published_as("warm") is None and list(all_published()) == []


def test_store_that_accepts_two_publishers_of_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_POOLS", "cond://pools-of-a-test")
    settings.cache_clear()
    with conditional_store(exclusive=False), pytest.raises(BadInput, match="second writer replaces the file"):
        publish(pool())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_file_that_others_could_have_read_or_changed_is_refused(mode: int, tmp_path: Path) -> None:
    publish(pool())
    (tmp_path / "shared" / "warm.json").chmod(mode)
    for act in (find, require, take_down, lambda _: list_kept()):
        with pytest.raises(BadInput, match=f"it is yours, mode {mode:o}"):
            act("warm")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_file_of_another_user_is_refused(tmp_path: Path) -> None:
    publish(pool())
    os.chown(tmp_path / "shared" / "warm.json", 12345, 12345)
    with pytest.raises(BadInput, match="it is user 12345's"):
        find("warm")


def test_folder_that_others_can_write_into_is_no_place_for_keys(tmp_path: Path) -> None:
    publish(pool())
    (tmp_path / "shared").chmod(0o777)
    for act in (lambda: publish(pool("other")), lambda: find("warm")):
        with pytest.raises(BadInput, match="shared to be yours alone"):
            act()


def test_link_to_a_file_of_a_pool_is_none(tmp_path: Path) -> None:
    publish(pool())
    file = tmp_path / "shared" / "warm.json"
    file.with_name("other.json").symlink_to(file)
    assert published_as("other") is None
    assert [published.pool.name for published in all_published()] == ["warm"]


def test_name_that_is_nowhere_is_refused_with_the_places_that_were_looked_at(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"warm in {tmp_path}/shared or {tmp_path}/cache/pools"):
        require("warm")


def test_silent_pool_with_its_job_elsewhere_stays_published_out_of_reach(tmp_path: Path) -> None:
    publish(pool())
    [state] = list_kept()
    assert state.state == "out of reach" and "another machine" in str(find_error("warm"))
    assert (tmp_path / "shared" / "warm.json").exists()
    assert "delete" in str(find_error("warm")) and "warm.json" in str(find_error("warm"))


def test_pool_without_a_job_in_its_backend_is_withdrawn(tmp_path: Path) -> None:
    publish(pool(place=f"{socket.gethostname()}, {settings().jobs_dir}"))
    assert find("warm") is None
    assert list((tmp_path / "shared").iterdir()) == []


def find_error(name: str) -> BackendUnavailable:
    with pytest.raises(BackendUnavailable) as raised:
        find(name)
    return raised.value
