"""Buckets and their accounts in blocks of a Prefect server, named by sinks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from fakes.cells import make_cell
from fakes.gcs import FakeGcs, fake_gcs
from tasks.sinks.object_store import ObjectStoreSink
from tasks.sinks.publishing import publish_record

pytestmark = pytest.mark.usefixtures("prefect_api")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with fake_gcs("bucket") as started:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", started.address)
        yield started


def test_bucket_block_names_place_and_account(store: FakeGcs, tmp_path: Path):
    # Imported here: a second for every process that collects these tests.
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
