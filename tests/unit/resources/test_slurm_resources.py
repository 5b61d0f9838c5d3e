"""Requests as options of sbatch, and refusals before sbatch is called."""

from __future__ import annotations

import pytest

from resources.backends.current import client_from_url
from resources.backends.slurm.resources import (
    Node,
    check_nodes,
    nodes_of,
    refuse_what_slurm_lacks,
    sbatch_options,
    warning_seconds,
)
from resources.config import ResourceConfig
from resources.errors import BadInput, UnsatisfiableResources

SINFO = "2|64|515000|1800000|gpu*|gpu:nvidia_h100_80gb_hbm3:8(S:0-1),shard:8\n4|32|1|0|cpu|(null)\n"
NODES = nodes_of(SINFO)


def test_nodes_are_read_from_sinfo_with_their_gpus() -> None:
    gpu = Node(count=2, cpus=64, memory_mib=515000, disk_mib=1800000, gpus={"nvidia_h100_80gb_hbm3": 8})
    assert [gpu, Node(count=4, cpus=32, memory_mib=1)] == NODES
    assert nodes_of(SINFO, default_only=True) == [gpu]


def test_replica_with_gpus_becomes_options_of_sbatch() -> None:
    resources = ResourceConfig.with_gpu("H100", 8, cpu=48, ram="400g", disk="100g")
    assert sbatch_options(resources, NODES, replicas=1) == [
        "--ntasks=1",
        "--cpus-per-task=48",
        "--mem=409600M",
        "--tmp=102400M",
        "--nodes=1",
        "--gres=gpu:nvidia_h100_80gb_hbm3:8",
    ]


def test_several_replicas_ask_for_memory_by_core_and_gpus_by_task() -> None:
    options = sbatch_options(ResourceConfig.with_gpu("auto", 4, cpu=8, ram="10g"), NODES, replicas=3)
    assert options == ["--ntasks=3", "--cpus-per-task=8", "--mem-per-cpu=1280M", "--tmp=102400M", "--gpus-per-task=4"]


def test_what_a_cluster_does_not_count_is_not_asked_for() -> None:
    assert sbatch_options(ResourceConfig(cpu=2), NODES[1:], replicas=1) == [
        "--ntasks=1",
        "--cpus-per-task=2",
        "--nodes=1",
    ]


@pytest.mark.parametrize(
    ("resources", "replicas", "words"),
    [
        (ResourceConfig.with_gpu("H100", 16), 1, "16 × H100"),
        (ResourceConfig.with_gpu("A100", 1), 1, "8 × nvidia_h100"),
        (ResourceConfig.with_gpu("H100", 8, cpu=8, ram="64g"), 3, "3 ×"),
        (ResourceConfig(cpu=65), 1, "cpu 65"),
        (ResourceConfig.with_gpu("H100", 1, disk="9t"), 1, "disk 9t"),
    ],
)
def test_more_than_the_nodes_have_is_refused_with_what_there_is(
    resources: ResourceConfig, replicas: int, words: str
) -> None:
    with pytest.raises(UnsatisfiableResources, match=words):
        check_nodes(resources, NODES, replicas=replicas)
    check_nodes(ResourceConfig.with_gpu("h100", 4, cpu=8, ram="64g"), NODES, replicas=4)


@pytest.mark.parametrize(
    "resources",
    [
        ResourceConfig.with_tpu("v6e-8"),
        ResourceConfig(regions=("us-central1",)),
        ResourceConfig(zone="a"),
        ResourceConfig(image="i"),
    ],
)
def test_tpus_places_and_images_are_refused(resources: ResourceConfig) -> None:
    with pytest.raises(UnsatisfiableResources):
        refuse_what_slurm_lacks(resources, image=None)


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        (None, 120),
        ("INFINITE", 120),
        ("1", 6),
        ("10", 60),
        ("30", 120),
        ("2:30", 15),
        ("1:00:00", 120),
        ("1-0", 120),
        ("0:2:0", 12),
    ],
)
def test_job_is_warned_two_minutes_or_a_tenth_before_its_limit(limit: str | None, seconds: int) -> None:
    assert warning_seconds(limit) == seconds


def test_address_names_partition_and_options_and_says_them_again_to_jobs_inside_jobs() -> None:
    client = client_from_url("slurm://gpu?account=lab&time=12:00:00&qos=high")
    assert client_from_url(client.url).url == client.url == "slurm://gpu?account=lab&time=12%3A00%3A00&qos=high"
    assert client_from_url("slurm:").url == "slurm://"
    with pytest.raises(BadInput, match="qos"):
        client_from_url("slurm://gpu?nice=5")
    with pytest.raises(BadInput, match="partition"):
        client_from_url("slurm://gpu/other")
