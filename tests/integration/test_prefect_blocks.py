"""Blocks of a Prefect server: buckets and their accounts, named by sinks; keys of pools, named by evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from fakes.cells import make_cell
from fakes.gcs import FakeGcs, fake_gcs
from fakes.proxy import KEYS, running_proxy
from pools.config import InferencePoolConfig
from pools.pool.access import PoolDescription
from resources.errors import BadInput
from resources.settings import settings
from tasks.running.cells import access_of
from tasks.sinks.object_store import ObjectStoreSink
from tasks.sinks.publishing import publish_record

pytestmark = pytest.mark.usefixtures("prefect_api")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with fake_gcs("bucket") as started:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", started.address)
        yield started


def test_bucket_block_names_place_and_account(store: FakeGcs, tmp_path: Path):
    # Imported locally: the import takes a second in every process that collects these tests.
    from prefect_gcp import GcpCredentials
    from prefect_gcp.cloud_storage import GcsBucket

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {
        "type": "service_account",
        "project_id": "p",
        "private_key_id": "1",
        "private_key": key.decode(),
        "client_email": "robot@p.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": f"{store.address}/token",
    }
    GcsBucket(
        bucket="bucket",
        bucket_folder="from/a/block",
        gcp_credentials=GcpCredentials(service_account_info=account),  # pyright: ignore[reportArgumentType]
    ).save("results", overwrite=True, _sync=True)  # pyright: ignore[reportCallIssue]
    record, cell = make_cell(tmp_path)
    sink = ObjectStoreSink(block="results")
    state = publish_record(record, str(cell), (sink,))[sink.name]
    assert (state.status, state.reason) == ("published", None)
    assert state.where is not None and state.where.startswith("gs://bucket/from/a/block/run-a/step-100/")
    assert len(store.sign_ins) == 1, "the block's own account was used"
    assert "private" not in json.dumps(state.model_dump(mode="json"))


def test_block_that_is_not_there_is_reported(tmp_path: Path):
    record, cell = make_cell(tmp_path)
    sink = ObjectStoreSink(block="no-such-block")
    reason = publish_record(record, str(cell), (sink,))[sink.name].reason
    assert reason is not None and "the Prefect block no-such-block of type GcsBucket" in reason


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a pool with keys that are not configured on this machine."""
    for name in ("ASSAY_POOL_KEY", "ASSAY_POOL_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    settings.cache_clear()
    config = InferencePoolConfig.model_validate({"model": {"name": "run"}})
    description = PoolDescription(config=config, engine_build="build", engine_packages={}).model_dump_json()
    journal = tmp_path / "journal.sqlite"
    with running_proxy(tmp_path, journal=journal, description=description) as running:
        yield running.url


CLIENT, ADMIN = KEYS.client.get_secret_value(), KEYS.admin.get_secret_value()


@pytest.mark.parametrize(
    ("content", "admin_key"), [(CLIENT, None), ({"key": CLIENT, "admin_key": ADMIN}, KEYS.admin)], ids=["key", "keys"]
)
def test_secret_block_has_the_keys_of_a_pool_at_an_address(pool: str, content: object, admin_key: object):
    from prefect.blocks.system import Secret

    Secret(value=content).save("kept-pool", overwrite=True, _sync=True)  # pyright: ignore
    access = access_of(pool, "kept-pool")
    assert (access.key, access.admin_key, access.engine_build) == (KEYS.client, admin_key, "build")


@pytest.mark.parametrize("content", ["wrong", {"token": CLIENT}, {}, 7])
def test_secret_block_that_has_no_key_of_the_pool_is_refused_without_its_content(pool: str, content: object):
    from prefect.blocks.system import Secret

    Secret(value=content).save("no-key", overwrite=True, _sync=True)  # pyright: ignore
    with pytest.raises(BadInput) as refused:
        access_of(pool, "no-key")
    assert CLIENT not in str(refused.value)
    with pytest.raises(BadInput, match="the Prefect block no-such-block of type Secret"):
        access_of(pool, "no-such-block")
