"""The cluster files: valid for Ray's launcher, and consistent with the regions file."""

from __future__ import annotations

import pytest
import yaml
from ray.autoscaler._private.util import fill_node_type_min_max_workers, prepare_config, validate_config

from fakes.cli import invoke
from resources.errors import BadInput
from resources.regions.ray_clusters import render, slices_in
from resources.regions.region_table import Region
from resources.regions.regions import load_regions, regions_file
from resources.settings import settings
from resources.tpu import tpu_topology

OURS = [region for region in load_regions(regions_file()).regions if region.ray_cluster is not None]


@pytest.mark.parametrize("region", OURS, ids=lambda region: region.name)
def test_cluster_file_is_what_the_regions_file_says_and_what_ray_takes(region: Region):
    assert region.ray_cluster is not None
    content = yaml.safe_load(render(region))
    validate_config(content)
    validate_config(prepare_config(content))
    fill_node_type_min_max_workers(content)
    assert content["provider"]["region"] == region.name
    assert region.ray_cluster.zone in region.zones
    types = content["available_node_types"]
    head = types[content["head_node_type"]]
    assert "scheduling" not in head["node_config"] and head["resources"]["head_node"] == 1
    offered = {topology.variant for topology in slices_in(region, region.ray_cluster.zone)}
    assert offered and {f"tpu-{variant}" for variant in offered} == {name for name in types if name.startswith("tpu-")}
    for variant in offered:
        node = types[f"tpu-{variant}"]
        assert node["node_config"]["acceleratorType"] == variant == node["labels"]["ray.io/tpu-pod-type"]
        assert node["resources"][f"TPU-{variant}-head"] == 1
        assert node["resources"]["TPU"] == tpu_topology(variant).chips_per_vm


def test_cluster_commands_are_shown_by_a_dry_run():
    for arguments, expected in (
        (("up", "us-east5"), "ray up --yes "),
        (("down", "eu-west4"), "ray down --yes "),
        (("status", "us-east5"), "ray exec "),
        (("status", "us-east5", "--forward"), "--port-forward 8265 --port-forward 10001"),
    ):
        shown = invoke(["cluster", *arguments, "--dry-run"])
        assert shown.exit_code == 0 and expected in shown.stdout, shown.output
        assert yaml.safe_load((settings().cache_dir / "clusters" / "us-east5.yaml").read_text())


def test_cluster_up_without_a_project_says_what_is_missing():
    shown = invoke(["cluster", "up", "us-east5"])
    assert isinstance(shown.exception, BadInput)
    assert "project" in shown.exception.found
    assert "at us-east5: ray_cluster: {file: ray/us-east5.yaml, zone: us-east5-a, project: " in shown.exception.remedy


def test_cluster_write_check_finds_files_that_are_out_of_date(tmp_path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "regions.yaml"
    file.write_text(regions_file().read_text().replace("us-east5-a, us-east5-b]", "us-east5-b]"))
    monkeypatch.setenv("ASSAY_REGIONS", str(file))
    settings.cache_clear()
    assert invoke(["cluster", "write", "--check"]).exit_code == 1
    assert invoke(["cluster", "write"]).exit_code == 0
    assert invoke(["cluster", "write", "--check"]).exit_code == 0
    assert "tpu-v6e" not in (tmp_path / "ray" / "us-east5.yaml").read_text()
