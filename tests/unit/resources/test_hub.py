"""Repositories of the hub as files, read by the real client from a fake hub."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.hub import FakeHub, forget_hub, running_hub, use_hub
from resources.errors import AssayError, BadInput, StorageError
from resources.settings import settings
from resources.storage import hub as the_hub
from resources.storage import storage
from resources.storage.file_copy import copy_file
from resources.storage.hub import hub_location

WEIGHTS = bytes(range(256)) * 400
SMALL = b'{"model_type": "llama"}'
REPOSITORY = "models/acme/llama"


def revisions() -> dict[str, dict[str, bytes]]:
    return {
        "main": {"config.json": SMALL, "model.safetensors": WEIGHTS, "sub/a.txt": b"a"},
        "step100": {"config.json": SMALL, "model.safetensors": WEIGHTS[1:]},
        "refs/tags/v1.0": {"config.json": b"{}"},
        "feature/x": {"config.json": b"{}"},
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    with running_hub({}, {REPOSITORY: revisions()}) as hub:
        hub.retry_after = 0
        use_hub(hub, monkeypatch, home=tmp_path / "hf")
        yield hub
    settings.cache_clear()


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("timinar/baby-llama-58m", "hf://timinar/baby-llama-58m"),
        ("acme/llama@step100", "hf://acme/llama@step100"),
        ("acme/llama@main", "hf://acme/llama"),
        ("acme/llama@feature/x", "hf://acme/llama@feature%2Fx"),
        ("hf://acme/llama@refs/pr/1", "hf://acme/llama@refs%2Fpr%2F1"),
        ("hf://acme/llama/", "hf://acme/llama"),
        ("here/run", "here/run"),  # the folder is there
        ("here/not-yet", "here/not-yet"),  # a run that is not written yet
        ("a/b/c", "a/b/c"),
        ("./acme/llama", "./acme/llama"),
        ("gs://bucket/run", "gs://bucket/run"),
        ("llama", "llama"),
        *(
            (name, name) for name in ("a/b--c", "a/b..c", "runs./x", "runs/x-", f"runs/{'x' * 92}")
        ),  # no names of the hub
    ],
)
def test_location_named_by_a_user_is_on_the_hub_only_if_no_such_folder_is_here(
    text: str, location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "here" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_location(text) == location


@pytest.mark.parametrize("location", ["hf://acme", "hf://acme/lla ma", "hf:///llama"])
def test_location_of_no_repository_is_refused_with_the_form_to_write(location: str):
    with pytest.raises(BadInput, match="hf://owner/name"):
        the_hub.place_of(location)


def test_files_of_a_revision_are_listed_with_the_hashes_of_the_hub(hub: FakeHub):
    hub.page = 2
    files = {file.uri: file for file in storage.list_files("hf://acme/llama")}
    assert list(files) == [f"hf://acme/llama/{name}" for name in ("config.json", "model.safetensors", "sub/a.txt")]
    weights, config = files["hf://acme/llama/model.safetensors"], files["hf://acme/llama/config.json"]
    assert (weights.size, weights.checksum) == (len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest())
    assert config.checksum == hashlib.sha1(b"blob %d\0" % len(SMALL) + SMALL).hexdigest()
    assert [file.uri for file in storage.list_files("hf://acme/llama/sub")] == ["hf://acme/llama/sub/a.txt"]
    assert storage.read_bytes("hf://acme/llama@feature%2Fx/config.json") == b"{}"
    assert storage.read_bytes("hf://acme/llama@v1.0/config.json") == b"{}"
    assert [storage.exists(f"hf://acme/llama/{name}") for name in ("sub", "config.json", "other")] == [
        True,
        True,
        False,
    ]
    assert storage.is_folder("hf://acme/llama") and not storage.is_folder("hf://acme/llama/config.json")


def test_a_range_is_read_from_the_other_host_without_the_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert storage.read_bytes("hf://acme/llama/model.safetensors", start=300, end=310) == WEIGHTS[300:310]
    assert any(request.startswith("GET /large/") for request in hub.requests) and not hub.leaked
    with pytest.raises(FileNotFoundError):
        storage.read_bytes("hf://acme/llama/not-there.json")


def test_a_repository_is_for_reading_only(hub: FakeHub):
    for write in (storage.write_bytes, storage.create_bytes):
        with pytest.raises(StorageError, match="can be read only"):
            write("hf://acme/llama/new.json", b"{}")


def test_a_run_is_listed_from_its_branches_with_a_request_each_and_then_from_their_commits_alone(hub: FakeHub):
    uris = [file.uri for file in storage.list_run("hf://acme/llama", belongs=lambda name: name.startswith("step"))]
    assert "hf://acme/llama@step100/model.safetensors" in uris and "hf://acme/llama/model.safetensors" in uris
    assert not any("feature" in uri for uri in uris)
    assert len(hub.requests) == 3  # the refs, and two trees
    forget_hub()  # as in another process
    hub.revisions[REPOSITORY]["step200"] = {"config.json": SMALL}
    assert len(storage.list_run("hf://acme/llama", belongs=lambda name: name.startswith("step"))) == len(uris) + 1
    assert len(hub.requests) == 5  # the refs, and the new tree
    alone = storage.list_run("hf://acme/llama@step100", belongs=lambda name: True)
    assert {storage.parent(file.uri) for file in alone} == {"hf://acme/llama@step100"}


def test_equal_small_files_of_many_revisions_are_read_once(hub: FakeHub):
    for revision in ("", "@step100"):
        storage.list_files(f"hf://acme/llama{revision}")
        assert storage.read_bytes(f"hf://acme/llama{revision}/config.json") == SMALL
    assert sum("/resolve/" in request for request in hub.requests) == 1


def test_requests_that_are_too_many_are_sent_again_later(hub: FakeHub):
    hub.limited = 1
    assert storage.list_files("hf://acme/llama")
    hub.limited = 1
    assert storage.read_bytes("hf://acme/llama/model.safetensors", start=0, end=4) == WEIGHTS[:4]


@pytest.mark.parametrize(
    ("named", "state", "words"),
    [
        ("acme/other", {}, ["acme/other", "check the name", "HF_TOKEN to a token"]),
        ("acme/llama", {"private": {REPOSITORY}}, ["private", "HF_TOKEN"]),
        ("acme/llama", {"gated": {REPOSITORY}}, ["terms", "/acme/llama", "HF_TOKEN to a token"]),
        ("acme/llama@step10", {}, ["step10", "did you mean step100"]),
    ],
)
def test_what_the_hub_refuses_is_reported_with_what_to_do(
    hub: FakeHub, named: str, state: dict[str, set[str]], words: list[str]
):
    vars(hub).update(state)
    with pytest.raises(BadInput) as caught:
        storage.list_files(f"hf://{named}")
        storage.read_bytes(f"hf://{named}/config.json")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_token_that_is_not_valid_is_reported_and_not_shown(hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with pytest.raises(AssayError, match="HF_TOKEN") as caught:
        storage.list_files("hf://acme/llama")
    assert "hf_expired" not in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_reported(hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(StorageError, match="HF_HUB_OFFLINE") as caught:
        storage.list_files(hub_location("runs/my-rn"))
    assert "a folder runs/my-rn" in caught.value.expected and "http://127.0.0.1:9" in caught.value.found
    assert time.monotonic() - began < 5  # a mistyped path is asked about, too


def test_too_many_requests_for_long_are_reported_with_what_to_do(hub: FakeHub):
    hub.limited = 100
    with pytest.raises(StorageError, match="wait some minutes") as caught:
        storage.list_files("hf://acme/llama")
    assert "429" in caught.value.found and "HF_TOKEN" in caught.value.remedy


def test_remembered_listings_are_bounded_and_the_oldest_goes_first(hub: FakeHub, tmp_path: Path):
    storage.list_files("hf://acme/llama")
    [listing] = (path for path in (tmp_path / "cache" / "hub-listings").rglob("*") if path.is_file())
    former = listing.with_name(f"acme--llama--{'0' * 40}.json")
    with former.open("wb") as file:
        file.truncate(2**30)
    os.utime(former, (1, 1))
    hub.revisions[REPOSITORY] |= {f"step{step}": {"config.json": b"%d" % step} for step in range(200, 300)}
    forget_hub()
    storage.list_run("hf://acme/llama", belongs=lambda name: True)
    assert not former.exists() and listing.exists()


def copied(uri: str, tmp_path: Path) -> list[int]:
    [source] = storage.list_files(uri)
    arrived: list[int] = []
    digest = copy_file(
        source,
        tmp_path / "copy",
        sidecar=tmp_path / "sidecar",
        range_bytes=40_000,
        stopped=lambda: False,
        on_bytes=arrived.append,
    )
    assert digest == source.checksum and (tmp_path / "copy").read_bytes() == WEIGHTS
    return arrived


def test_a_file_in_the_hubs_own_cache_is_not_downloaded_unless_it_was_damaged(hub: FakeHub, tmp_path: Path):
    from huggingface_hub import hf_hub_download

    downloaded = Path(hf_hub_download("acme/llama", "model.safetensors", cache_dir=tmp_path / "hf" / "hub"))
    before = len(hub.requests)
    copied("hf://acme/llama/model.safetensors", tmp_path)
    assert not any("/resolve/" in request for request in hub.requests[before:])
    (tmp_path / "copy").unlink()
    downloaded.resolve().chmod(0o644)
    downloaded.resolve().write_bytes(b"x" + WEIGHTS[1:])
    copied("hf://acme/llama/model.safetensors", tmp_path)
    assert any("/resolve/" in request for request in hub.requests[before:])


def test_offline_only_the_cache_is_read_with_the_same_hashes(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants, snapshot_download

    listed = storage.list_files("hf://acme/llama")
    snapshot_download("acme/llama", cache_dir=tmp_path / "hf" / "hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    requests = len(hub.requests)
    forget_hub()
    assert storage.list_files("hf://acme/llama") == listed
    assert storage.read_bytes("hf://acme/llama/model.safetensors", start=5, end=9) == WEIGHTS[5:9]
    with pytest.raises(BadInput, match="hf download acme/llama --revision step100"):
        storage.list_files("hf://acme/llama@step100")
    with pytest.raises(BadInput, match="hf download acme/other"):
        storage.list_run("hf://acme/other", belongs=lambda name: True)
    assert len(hub.requests) == requests
