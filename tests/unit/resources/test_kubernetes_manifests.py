"""Translation of a request into a cluster's terms: devices, names, manifests against the published schemas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.kubernetes_schemas import ValidationError, validate
from resources.backends.kubernetes.client import client_from_address
from resources.backends.kubernetes.devices import placement
from resources.backends.kubernetes.manifests import (
    LARGEST_SECRET_BYTES,
    Owner,
    Submission,
    attempt_manifest,
    image_of,
    keeper_pod_manifest,
    secret_content,
    secret_manifest,
    service_manifest,
)
from resources.backends.kubernetes.names import dns_label, new_job_id
from resources.backends.programs import run_in_pod
from resources.config import ResourceConfig, TpuConfig
from resources.errors import BadInput, UnsatisfiableResources
from resources.jobs import inheritance
from resources.jobs.jobs import Call, Command, EnvironmentConfig, JobRequest, create_environment
from resources.settings import settings
from resources.tpu import TPU_TOPOLOGIES

OWNER = Owner(jobs_url="kubernetes:///ml", image=None, grace_seconds=10, lease_seconds=300)
SECRET_WORD = "hf_do_not_show"


def manifest(
    resources: ResourceConfig,
    *,
    replicas: int | None = None,
    environment: EnvironmentConfig | None = None,
    owner: Owner = OWNER,
    **options: Any,
) -> dict[str, Any]:
    environment = environment or create_environment(
        docker_image="registry.example/a:1", env_vars={"HF_TOKEN": SECRET_WORD}
    )
    request = JobRequest(
        "Eval_7B.step",
        Command("train", (SECRET_WORD,)),
        resources=resources,
        replicas=replicas,
        environment=environment,
        **options,
    )
    return attempt_manifest(submission(request, owner=owner), 2)


def submission(request: JobRequest, *, owner: Owner = OWNER) -> Submission:
    return Submission(job_id="eval-7b-step-1", request=request, image="registry.example/a:1", files={}, owner=owner)


def keeper_pod() -> dict[str, Any]:
    return keeper_pod_manifest(submission(JobRequest("job", Command("true"), resources=ResourceConfig())))


@pytest.mark.parametrize(
    "resources",
    [
        ResourceConfig.with_cpu(cpu=4, ram="8g", disk="20g"),
        ResourceConfig.with_gpu(
            "A100-80GB", count=4, preemptible=False, regions=("us-central1",), zone="us-central1-a"
        ),
        ResourceConfig.with_tpu("v6e-16", regions=("us-east5", "europe-west4")),
        ResourceConfig.with_tpu("v6e-16", slice_count=2),
    ],
    ids=["cpu", "gpu", "tpu", "slices"],
)
@pytest.mark.parametrize("version", ["1.29", "1.34"])
def test_manifests_of_a_job_follow_the_published_schemas(resources: ResourceConfig, version: str) -> None:
    job = manifest(resources, working_directory=Path("/app"))
    owner = {**job, "metadata": {**job["metadata"], "uid": "123"}}
    for made in (job, secret_manifest({"pod.json": b"{}"}, job=owner), service_manifest(job=owner), keeper_pod()):
        validate(made, version)
    (job["spec"].get("replicatedJobs") or [job])[0]["typo"] = 1
    with pytest.raises(ValidationError, match="typo"):
        validate(job, version)


def test_pods_have_no_privileges_and_only_programs_of_users_and_keepers_a_token_of_the_cluster() -> None:
    ours = create_environment(docker_image="image", inherited=inheritance.SERVICE)
    pods = [
        manifest(ResourceConfig())["spec"]["template"]["spec"],
        manifest(ResourceConfig(), environment=ours)["spec"]["template"]["spec"],
        keeper_pod()["spec"]["template"]["spec"],
    ]
    for pod in pods:
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
    assert [pod["automountServiceAccountToken"] for pod in pods] == [True, False, True]


def test_manifest_requests_and_limits_the_share_of_a_replica() -> None:
    pod = manifest(ResourceConfig.with_gpu("H100", count=8, cpu=16, ram="64g", disk="100g"))["spec"]["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    assert limits == {
        "cpu": "16",
        "memory": str(64 * 2**30),
        "ephemeral-storage": str(100 * 2**30),
        "nvidia.com/gpu": "8",
    }
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}


def test_manifest_shows_no_variable_and_no_argument_but_the_given_name() -> None:
    job = manifest(ResourceConfig())
    assert SECRET_WORD not in json.dumps(job)
    assert job["metadata"]["annotations"] == {"assay-evals/name": "Eval_7B.step"}


@pytest.mark.parametrize(
    ("variant", "gke"),
    [
        ("T4", "nvidia-tesla-t4"),
        ("A100", "nvidia-tesla-a100"),
        ("a100_80gb", "nvidia-a100-80gb"),
        ("nvidia-rtx-pro-6000", "nvidia-rtx-pro-6000"),
    ],
)
def test_gpu_model_becomes_the_label_of_its_nodes(variant: str, gke: str) -> None:
    where = placement(ResourceConfig.with_gpu(variant))
    assert where.node_selector == {"cloud.google.com/gke-accelerator": gke}
    assert not placement(ResourceConfig.with_gpu()).node_selector


@pytest.mark.parametrize(
    ("variant", "accelerator", "topology", "pods", "chips"),
    [
        ("v4-8", "tpu-v4-podslice", "2x2x1", 1, "4"),
        ("v4-32", "tpu-v4-podslice", "2x2x4", 4, "4"),
        ("v5p-128", "tpu-v5p-slice", "4x4x4", 16, "4"),
        ("v5p-256", "tpu-v5p-slice", "4x4x8", 32, "4"),
        ("v5p-12288", "tpu-v5p-slice", "16x16x24", 1536, "4"),
        ("v5litepod-8", "tpu-v5-lite-podslice", "2x4", 1, "8"),
        ("v5e-256", "tpu-v5-lite-podslice", "16x16", 64, "4"),
        ("v6e-1", "tpu-v6e-slice", "1x1", 1, "1"),
        ("v6e-32", "tpu-v6e-slice", "4x8", 8, "4"),
    ],
)
def test_tpu_slice_has_a_pod_for_each_vm_on_nodes_of_its_shape(
    variant: str, accelerator: str, topology: str, pods: int, chips: str
) -> None:
    job = manifest(ResourceConfig.with_tpu(variant))
    pod = job["spec"]["template"]["spec"]
    assert job["spec"]["completions"] == pods
    assert pod["containers"][0]["resources"]["limits"]["google.com/tpu"] == chips
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    assert pod["subdomain"] == job["metadata"]["name"]


@pytest.mark.parametrize("variant", sorted(set(TPU_TOPOLOGIES) - {"v5litepod-2"}))
def test_every_tpu_shape_has_as_many_chips_as_its_slice(variant: str) -> None:
    shape = placement(ResourceConfig.with_tpu(variant)).node_selector["cloud.google.com/gke-tpu-topology"]
    chips = 1
    for side in shape.split("x"):
        chips *= int(side)
    assert chips == TPU_TOPOLOGIES[variant].chips


@pytest.mark.parametrize(
    ("variant", "shape"),
    [
        *(("v4-16", "2x2x2"), ("v5p-64", "2x4x4"), ("v5p-384", "4x4x12"), ("v5p-512", "4x8x8")),
        *(("v5p-1152", "4x12x12"), ("v5p-1280", "4x8x20"), ("v5p-6144", "12x16x16"), ("v5p-8192", "16x16x16")),
    ],
)
def test_shape_of_a_slice_is_as_near_to_a_cube_as_it_can_be(variant: str, shape: str) -> None:
    where = placement(ResourceConfig.with_tpu(variant))
    assert where.node_selector["cloud.google.com/gke-tpu-topology"] == shape


def test_several_slices_of_several_vms_are_a_jobset_with_a_job_and_a_node_pool_for_each_slice() -> None:
    jobset = manifest(ResourceConfig.with_tpu("v6e-16", slice_count=3))
    assert (jobset["kind"], jobset["metadata"]["name"]) == ("JobSet", "eval-7b-step-1-2")
    assert jobset["metadata"]["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"] == (
        "cloud.google.com/gke-nodepool"
    )
    assert (jobset["spec"]["suspend"], jobset["spec"]["failurePolicy"]) == (True, {"maxRestarts": 0})
    [slices] = jobset["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    assert (slices["replicas"], job["completions"], job["parallelism"]) == (3, 4, 4)
    assert job["backoffLimitPerIndex"] == 0
    assert slices["template"]["metadata"]["labels"] == job["template"]["metadata"]["labels"]
    single = manifest(ResourceConfig.with_tpu("v6e-8", slice_count=2))
    assert (single["kind"], single["spec"]["completions"], single["spec"]["completionMode"]) == ("Job", 2, "Indexed")
    assert (single["spec"]["backoffLimitPerIndex"], single["spec"]["suspend"]) == (0, True)


def test_queue_label_is_on_the_waiting_object_only() -> None:
    queued = replace(OWNER, queue="team")
    for resources in (ResourceConfig(), ResourceConfig.with_tpu("v6e-16", slice_count=2)):
        made = manifest(resources, owner=queued)
        assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
        assert made["spec"]["suspend"]
        assert json.dumps(made).count("kueue") == 1
        owned = {**made, "metadata": {**made["metadata"], "uid": "123"}}
        assert "kueue" not in json.dumps(service_manifest(job=owned)["spec"])
    assert "kueue" not in json.dumps(manifest(ResourceConfig()))


@pytest.mark.parametrize(
    ("given", "coordinator"), [({}, "a-1-slice-0-0.a-1:8081"), ({"MEGASCALE_COORDINATOR_ADDRESS": "gke"}, "gke")]
)
def test_pod_of_a_slice_knows_its_replica_and_where_slices_find_each_other_unless_the_cluster_says_so(
    given: dict[str, str], coordinator: str
) -> None:
    specification = {"vms": 4, "replicas": 2, "env_vars": {}, "jobs": "", "job_id": "a", "path_first": ""}
    pod = {"JOB_COMPLETION_INDEX": "3", "ASSAY_JOBSET": "a-1", "ASSAY_SLICE_INDEX": "1", **given}
    environment = run_in_pod.variables(specification, pod, run_folder=Path("/run"))
    assert {name: environment[f"ASSAY_{name}"] for name in ("REPLICA_INDEX", "HOST_INDEX", "HOST_COUNT")} == {
        "REPLICA_INDEX": "1",
        "HOST_INDEX": "3",
        "HOST_COUNT": "4",
    }
    assert environment["MEGASCALE_COORDINATOR_ADDRESS"] == coordinator
    assert (environment["MEGASCALE_NUM_SLICES"], environment["MEGASCALE_SLICE_ID"]) == ("2", "1")


def test_device_that_gke_has_no_nodes_for_is_refused_and_a_given_topology_wins() -> None:
    for resources, words in (
        (ResourceConfig.with_gpu("Voodoo2"), "h100-80gb"),
        (ResourceConfig.with_tpu("v5litepod-2"), "v5litepod-2"),
        (
            ResourceConfig.with_tpu(["v5litepod-8", "v6e-8"]),
            r"v5litepod-8 or v6e-8[\s\S]*one of them, or submit to Ray",
        ),
    ):
        with pytest.raises(UnsatisfiableResources, match=words):
            placement(resources)
    given = ResourceConfig(device=TpuConfig(variant="v4-32", topology="1x4x4"))
    assert placement(given).node_selector["cloud.google.com/gke-tpu-topology"] == "1x4x4"


def test_preemptible_jobs_prefer_cheap_nodes_and_others_refuse_them() -> None:
    cheap, safe = (placement(ResourceConfig(preemptible=answer)) for answer in (True, False))
    assert "cloud.google.com/gke-spot" in {toleration["key"] for toleration in cheap.tolerations}
    assert not safe.tolerations
    rules = json.dumps(safe.affinity)
    assert "requiredDuring" in rules and "DoesNotExist" in rules and "preferredDuring" not in rules


@pytest.mark.parametrize("name", ["Eval_7B.step", "x" * 100, "...", "-a-", "7"])
def test_job_ids_are_names_that_kubernetes_allows(name: str) -> None:
    job_id = new_job_id(name)
    assert job_id.replace("-", "").isalnum() and job_id == job_id.lower()
    assert job_id[0].isalpha()  # Services must begin with a letter
    assert len(f"{job_id}-123-slice-99-9999-abcde") <= 63  # a pod's name: attempt, slice, index, unique suffix
    assert dns_label("Eval_7B.step") == "eval-7b-step"


def test_image_comes_from_environment_then_resources_then_setting_and_is_required() -> None:
    request = JobRequest("a", Command("true"), resources=ResourceConfig(image="from-resources"))
    bare = JobRequest("a", Command("true"), resources=ResourceConfig())
    in_image = replace(request, environment=create_environment(docker_image="from-environment"))
    assert image_of(in_image, default="d") == "from-environment"
    assert image_of(request, default="d") == "from-resources"
    assert image_of(bare, default="d") == "d"
    with pytest.raises(UnsatisfiableResources, match=r"resources\.image"):
        image_of(bare, default=None)
    with pytest.raises(UnsatisfiableResources, match="Build them into the image"):
        image_of(replace(request, environment=create_environment(pip_packages=["numpy"])), default=None)


def test_callable_that_does_not_fit_a_secret_is_refused_with_its_size() -> None:
    request = JobRequest("a", Call(len, ("x" * LARGEST_SECRET_BYTES,)), resources=ResourceConfig())
    with pytest.raises(BadInput, match=r"call\.pickle has 1,000"):
        secret_content(request, job_id="a-1", vms=1, owner=OWNER)


def test_lease_that_no_pod_would_outlive_is_refused_before_the_cluster_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASSAY_JOB_LEASE_SECONDS", "60")
    settings.cache_clear()
    with pytest.raises(BadInput, match="ASSAY_JOB_LEASE_SECONDS of 180 or more"):
        client_from_address("no-such-context", "/ml")
