"""The chart in deployments/helm: rendered by Helm itself, valid by the published schemas, with minimal rights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import helm_python
import pytest
import yaml

from fakes.kubernetes_schemas import validate
from fakes.polling import eventually
from pools.config import InferencePoolConfig
from resources.backends.kubernetes.cluster import Resource

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deployments" / "helm" / "assay"
VALUES: dict[str, Any] = {
    "images": {"orchestrator": "r.example/assay-orchestrator:1", "engine": "r.example/assay-cuda:1"},
    "imagePullSecrets": [{"name": "registry"}],
    "prefect": {"apiUrl": "http://prefect:4200/api", "apiKeySecret": {"name": "prefect", "key": "api-key"}},
    "secrets": {"HF_TOKEN": {"name": "hub", "key": "token"}},
    "regions": "# Regions\nprices: {}\n",
    "workers": [{"region": "us-central1", "workPool": "pool-us"}, {"region": "europe-west4", "workPool": "pool-eu"}],
    "jobsServiceAccount": {"annotations": {"iam.gke.io/gcp-service-account": "evaluations@p.example"}},
    "pool": {
        "enabled": True,
        "trustNetwork": True,
        "config": {"model": {"path": "gs://bucket/run", "name": "run"}},
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-l4"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    },
}


def rendered(**changes: Any) -> dict[tuple[str, str], dict[str, Any]]:
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render({**VALUES, **changes}, name="team", namespace="evaluations")
    documents = [document for text in files.values() for document in yaml.safe_load_all(text) if document]
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


def pod_of(deployment: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    return pod, container


def test_helm_accepts_the_chart_with_the_version_of_assay() -> None:
    report = helm_python.lint(CHART, VALUES, strict=True, kube_version="v1.34.0")
    assert [message for message in report["messages"] if message["severity"] > 1] == report["errors"] == []
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (about["version"], about["appVersion"]) == (version, version)


@pytest.mark.parametrize("version", ["1.29", "1.34"])
@pytest.mark.parametrize("claim", ["", "downloads"])
def test_everything_that_the_chart_makes_is_valid(version: str, claim: str) -> None:
    manifests = rendered(pool={**VALUES["pool"], "scratchClaim": claim})
    for document in manifests.values():
        validate(document, version)
    assert [name for kind, name in manifests if kind == "Deployment"] == [
        "team-pool-warm",
        "team-worker-us-central1",
        "team-worker-europe-west4",
    ]


def test_values_of_the_how_to_make_what_it_says() -> None:
    page = (ROOT / "docs" / "how-to" / "run-on-a-cluster.md").read_text()
    values = yaml.safe_load(page.partition("# Values of the chart\n")[2].partition("```")[0])
    manifests = rendered(**values)
    assert {("Service", "team-pool-warm"), ("Deployment", "team-worker-us-west4")} <= set(manifests)
    InferencePoolConfig.model_validate(yaml.safe_load(manifests["ConfigMap", "team-pool-warm"]["data"]["pool.yaml"]))


def test_chart_without_values_makes_the_service_account_of_jobs_only() -> None:
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render({}, name="team", namespace="evaluations")
    kinds = [document["kind"] for text in files.values() for document in yaml.safe_load_all(text) if document]
    assert kinds == ["ServiceAccount", "Role", "RoleBinding"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"imagse": {}}, "imagse"),
        ({"secrets": {"HF_TOKEN": "hf_do_not_show"}}, "HF_TOKEN"),
        ({"workers": [{"region": "us-central1"}]}, "workPool"),
        ({"prefect": {"apiUrl": ""}}, "prefect.apiUrl: the address"),
        ({"images": {"engine": "a", "orchestrator": ""}}, "images.orchestrator: the image of workers"),
        ({"pool": {**VALUES["pool"], "trustNetwork": False}}, "pool.trustNetwork: prompts"),
    ],
)
def test_values_that_are_wrong_or_missing_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(helm_python.HelmError, match=words), helm_python.Chart.load(CHART) as chart:
        chart.validate_schema({**VALUES, **changes})
        chart.render({**VALUES, **changes}, name="team", namespace="evaluations")


def test_roles_grant_what_our_client_asks_for_and_are_bound_to_their_service_accounts() -> None:
    manifests = rendered()
    rules = manifests["Role", "team-jobs"]["rules"]
    granted = {resource for rule in rules for resource in rule["resources"]}
    assert granted == {*get_args(Resource), "pods/log"} - {"nodes"}  # the right to read nodes is optional
    assert all("*" not in rule["verbs"] + rule["resources"] for rule in rules)
    for name in ("team-jobs", "team-worker"):
        binding = manifests["RoleBinding", name]
        assert binding["roleRef"]["name"] == name and ("ServiceAccount", name) in manifests
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": "evaluations"}]


def test_pods_have_no_privileges_and_their_keys_come_from_secrets() -> None:
    for (kind, name), document in rendered().items():
        if kind != "Deployment":
            continue
        pod, container = pod_of(document)
        assert pod["serviceAccountName"] == ("team-jobs" if "pool" in name else "team-worker")
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["fsGroup"] == 1000
        assert container["securityContext"]["readOnlyRootFilesystem"]
        secrets = {
            variable["name"]: tuple(variable["valueFrom"]["secretKeyRef"].values())
            for variable in container["env"]
            if "valueFrom" in variable
        }
        assert secrets == {"PREFECT_API_KEY": ("prefect", "api-key"), "HF_TOKEN": ("hub", "token")}
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_worker_serves_its_regions_work_pool_with_the_regions_file() -> None:
    manifests = rendered()
    _, container = pod_of(manifests["Deployment", "team-worker-europe-west4"])
    assert container["command"][2:] == [
        *("prefect", "worker", "start", "--pool", "pool-eu", "--type", "kubernetes", "--with-healthcheck")
    ]
    assert {"name": "ASSAY_REGIONS", "value": "/etc/assay/regions/regions.yaml"} in container["env"]
    assert manifests["ConfigMap", "team-regions"]["data"] == {"regions.yaml": VALUES["regions"]}


def test_service_reaches_the_port_that_the_pools_proxy_listens_at() -> None:
    manifests = rendered()
    config = InferencePoolConfig.model_validate(
        yaml.safe_load(manifests["ConfigMap", "team-pool-warm"]["data"]["pool.yaml"])
    )
    assert config.model.path == "gs://bucket/run"
    deployment, service = manifests["Deployment", "team-pool-warm"], manifests["Service", "team-pool-warm"]
    _, container = pod_of(deployment)
    assert (config.proxy_host, [{"name": "http", "containerPort": config.proxy_port}]) == (
        "0.0.0.0",
        container["ports"],
    )
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


def test_pools_container_keeps_the_pool_up_and_ends_it_with_the_pod(tmp_path: Path) -> None:
    _, container = pod_of(rendered()["Deployment", "team-pool-warm"])
    fake_assay = tmp_path / "assay"
    fake_assay.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    fake_assay.chmod(0o755)
    given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    variables = {**given, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(["sh", "-c", *container["args"]], env=variables) as program:
        calls = tmp_path / "calls"
        eventually(lambda: calls.exists() and "env warm" in calls.read_text())
        program.send_signal(signal.SIGTERM)
        assert program.wait(20) == 0
    expected = ["up --config /etc/assay/pool/pool.yaml --name warm --idle-minutes 10080", "env warm", "down warm"]
    assert calls.read_text().splitlines() == [f"pool {line}" for line in expected]
    command = [sys.executable, "-m", "flows.cli.app", "pool", "up", "--help"]
    options = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert options.returncode == 0 and {"--config", "--name", "--idle-minutes"} <= set(options.stdout.split())
