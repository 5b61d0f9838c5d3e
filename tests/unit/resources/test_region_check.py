"""Paths of other regions, found anywhere in a configuration."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import gcsfs
import pytest
import yaml
from pydantic import BaseModel

from fakes.gcs import FakeGcs, fake_gcs
from fakes.http_server import Answer, Request, http_server
from resources.config import ResourceConfig
from resources.errors import BadInput, WrongRegion
from resources.regions.region_check import (
    check_gcs_paths_same_region,
    check_reads,
    find_gcs_paths,
    region_of_data,
    region_of_prefix,
    region_of_this_machine,
)
from resources.regions.regions import known_regions
from resources.settings import deployment_data, settings


class Model(BaseModel):
    path: str
    extra: dict[str, Any] = {}


@dataclass
class Training:
    model: Model
    resources: ResourceConfig | None = None
    sources: list[Any] = field(default_factory=list)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with fake_gcs() as started:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", started.address)
        gcsfs.GCSFileSystem.clear_instance_cache()
        yield started
    gcsfs.GCSFileSystem.clear_instance_cache()


def bucket_in(store: FakeGcs, location: str, name: str) -> str:
    store.storage.create_bucket(name, {"name": name, "id": name, "kind": "storage#bucket", "location": location})
    return name


def test_gcs_paths_are_found_in_every_kind_of_container_with_their_places():
    config = Training(
        model=Model(path="gs://a/model", extra={"k": ("x", {"deep": "gs://b/deep"})}),
        sources=[{"gs://key/is-no-value", "gs://c/set"}, PurePosixPath("gs://d/path"), Path("/local"), 3, None, b"gs"],
    )
    assert {(path.place, path.uri) for path in find_gcs_paths(config)} == {
        ("model.path", "gs://a/model"),
        ("model.extra.k[1].deep", "gs://b/deep"),
        ("sources[0][0]", "gs://c/set"),
        ("sources[0][1]", "gs://key/is-no-value"),
        ("sources[1]", "gs://d/path"),
    }


def test_gcs_paths_in_a_value_that_holds_itself_are_found_once():
    ring: dict[str, Any] = {"path": "gs://a/b"}
    ring["again"] = [ring]
    shared = [ring["path"]]
    assert [path.place for path in find_gcs_paths(ring)] == ["path"]
    assert [path.place for path in find_gcs_paths({"one": shared, "two": shared})] == ["one[0]", "two[0]"]


def test_paths_of_another_region_are_refused_with_their_places_and_what_reading_them_costs(store: FakeGcs):
    config = Training(
        Model(path="gs://marin-eu-west4/m"), sources=["gs://marin-us-east1/x", "gs://marin-us-central2/y"]
    )
    with pytest.raises(WrongRegion) as caught:
        check_gcs_paths_same_region(config, local_ok=False, region="us-central2")
    message = caught.value.found
    assert "not in the same region" in message and "us-central2" in caught.value.expected
    assert "model.path" in message and "europe-west4" in message and "0.05 USD per GB" in message
    assert "sources[0]" in message and "us-east1" in message and "0.02 USD per GB" in message
    assert "sources[1]" not in message


@pytest.mark.parametrize(
    ("config", "region"),
    [
        ({"a": "gs://marin-eu-west4/m"}, "europe-west4"),
        ({"a": "gs://marin-eu-west4/m"}, "eu-west4"),
        ({"train_urls": ["gs://marin-eu-west4/a"]}, "us-central2"),
        ({"data": {"validation_urls": ["gs://marin-eu-west4/b"]}}, "us-central2"),
    ],
)
def test_paths_of_the_region_and_at_places_to_skip_are_accepted(config: dict[str, Any], region: str):
    assert check_gcs_paths_same_region(config, local_ok=False, region=region) == region


def test_regions_of_the_resources_override_the_machine_s_and_the_first_that_fits_is_returned(store: FakeGcs):
    resources = ResourceConfig(regions=("us-east1", "us-central2"))
    config = Training(Model(path="gs://marin-us-central2/m"), resources)
    assert check_gcs_paths_same_region(config, local_ok=False, region_getter=lambda: "us-east1") == "us-central2"
    config.sources = ["gs://marin-us-east5/m"]
    with pytest.raises(WrongRegion, match="the best of us-east1, us-central2"):
        check_gcs_paths_same_region(config, local_ok=False)


def test_unknown_region_is_a_warning_only_where_that_is_allowed(caplog: pytest.LogCaptureFixture):
    config = {"path": "gs://marin-us-central2/m"}
    with caplog.at_level(logging.WARNING):
        assert check_gcs_paths_same_region(config, local_ok=True, region_getter=lambda: None) is None
    assert "not checked" in caplog.text
    with pytest.raises(BadInput, match="ASSAY_PREFIX"):
        check_gcs_paths_same_region(config, local_ok=False, region_getter=lambda: None)


def test_configuration_without_buckets_asks_for_no_region():
    def fail() -> str:
        raise AssertionError

    assert check_gcs_paths_same_region({"path": "/local"}, local_ok=False, region_getter=fail) is None


def test_region_of_an_undescribed_bucket_comes_from_the_bucket_itself(store: FakeGcs):
    near, far = bucket_in(store, "US-CENTRAL2", "check-near"), bucket_in(store, "EUROPE-WEST1", "check-far")
    around = bucket_in(store, "US", "check-around")
    gcsfs.GCSFileSystem().pipe_file(f"{far}/weights/a.bin", b"x" * 2_000_000)
    config = {"near": f"gs://{near}/m", "around": f"gs://{around}/m"}
    assert check_gcs_paths_same_region(config, local_ok=False, region="us-central2") == "us-central2"
    with pytest.raises(WrongRegion) as caught:
        check_gcs_paths_same_region({**config, "far": f"gs://{far}/weights"}, local_ok=False, region="us-central2")
    assert "far: gs://check-far/weights is in europe-west1; reading 0.002 GB once" in caught.value.found
    assert "near: " not in caught.value.found


def test_region_of_data_is_its_bucket_s_or_for_a_path_the_machine_s(store: FakeGcs, monkeypatch: pytest.MonkeyPatch):
    assert region_of_data("gs://marin-us-central2/runs/a") == "us-central2"
    assert region_of_data(f"gs://{bucket_in(store, 'US-EAST5', 'described-by-nobody')}/runs/a") == "us-east5"
    assert region_of_data("s3://bucket/runs/a") is None
    monkeypatch.setenv("MARIN_PREFIX", "gs://marin-eu-west4")
    assert region_of_data("/runs/a") == region_of_this_machine() is not None


def test_bucket_that_may_not_be_looked_at_is_a_warning(store: FakeGcs, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        check_gcs_paths_same_region({"path": "gs://check-nobody-s/m"}, local_ok=False, region="us-central2")
    assert "check-nobody-s" in caplog.text and "path" in caplog.text


def test_region_of_a_job_elsewhere_is_its_clusters_region(
    store: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    described = yaml.safe_load((deployment_data() / "regions.yaml").read_text())
    next(region for region in described["regions"] if region["name"] == "us-east5")["ray_address"] = "ray://head:10001"
    (tmp_path / "regions.yaml").write_text(yaml.safe_dump(described))
    monkeypatch.setenv("ASSAY_REGIONS", str(tmp_path / "regions.yaml"))
    settings.cache_clear()
    with pytest.raises(WrongRegion, match=r"(?s)us-east5.*gs://marin-eu-west4/m is in europe-west4"):
        check_reads(["gs://marin-eu-west4/m"], ResourceConfig(), backend="ray://head:10001")
    check_reads(["gs://marin-us-east5/m"], ResourceConfig(), backend="ray://head:10001")
    check_reads(["gs://marin-eu-west4/m"], ResourceConfig(), backend="ray://nobody-knows:10001")


@pytest.fixture
def metadata() -> Iterator[str]:
    def answer(request: Request) -> Answer:
        status = 200 if request.headers["Metadata-Flavor"] == "Google" else 403
        return status, {"Metadata-Flavor": "Google"}, b"projects/1234/zones/us-east5-b"

    with http_server(answer) as address:
        yield address


def test_region_of_this_machine_is_the_vm_s_else_the_prefix_s(metadata: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert region_of_this_machine(metadata) == "us-east5"
    monkeypatch.setenv("MARIN_PREFIX", "gs://marin-eu-west4/somewhere")
    assert region_of_this_machine("http://127.0.0.1:9") == "europe-west4"
    monkeypatch.setenv("ASSAY_PREFIX", "gs://ours-us-central2")
    settings.cache_clear()
    assert region_of_this_machine("http://127.0.0.1:9") == "us-central2"


@pytest.mark.parametrize("prefix", [None, "", "/local", "gs://elsewhere", "s3://marin-us-central2"])
def test_region_of_a_prefix_that_names_none_is_none(prefix: str | None):
    assert region_of_prefix(prefix, known_regions()) is None
