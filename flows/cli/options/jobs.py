"""Converts command-line options to a job on any backend."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import ValidationError

from flows.cli.options.groups import tpu_asked
from resources.backends.current import client_from_url, current_client
from resources.config import Config, CpuConfig, Device, GpuConfig, ResourceConfig, TpuConfig
from resources.errors import BadInput
from resources.jobs.jobs import Client, Entrypoint, JobRequest, create_environment
from resources.regions.ray_clusters import LOCAL, local_cluster
from resources.regions.region_table import ADDRESS_LINE
from resources.regions.regions import known_regions, regions_for, where_to_write
from resources.settings import settings, variable

if TYPE_CHECKING:
    from resources.backends.kubernetes.cluster import Cluster

_GPU = re.compile(r"(?:(?P<variant>[A-Za-z][\w-]*)(?::|$))?(?P<count>\d+)?")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


class SubmitOptions(Config):
    """The options of `assay submit`."""

    command: tuple[str, ...]
    """The program and its arguments."""
    name: str | None = None
    """Name of the job; the script's when unset."""
    cpu: int | None = None
    """CPU cores per replica; like ram and disk, the default for the device when unset."""
    ram: str | None = None
    """Memory per replica."""
    disk: str | None = None
    """Local disk per replica."""
    gpu: str | None = None
    """GPUs per replica: H100:8, H100, or 8 of any kind."""
    tpu: str | None = None
    """TPU slice per replica."""
    replicas: int = 1
    """Number of replicas."""
    regions: tuple[str, ...] = ()
    """Regions allowed, best first."""
    zone: str | None = None
    """Zone within the region."""
    preemptible: bool = True
    """Accept a preemptible machine."""
    image: str | None = None
    """Container image, on backends that run containers, in place of the working directory."""
    pip: tuple[str, ...] = ()
    """Requirements of an environment built for the job."""
    extras: tuple[str, ...] = ()
    """Extras of the project in the working directory; an entry may list several with commas."""
    variables: tuple[str, ...] = ()
    """`KEY=VALUE`, or `KEY` to pass on this process's value."""
    retries: int = 0
    """Number of failed attempts that are tried again."""
    preemption_retries: int = 100
    """Number of preempted attempts that are tried again."""
    outlives_parent: bool = True
    """Keep the job running when this command ends."""


def request_of(options: SubmitOptions, *, workspace: Path) -> JobRequest:
    """Returns the job for the options, with the code of `workspace`."""
    program, *arguments = options.command
    resources = _resources(options)
    return JobRequest(
        options.name or job_name(options.command),
        Entrypoint.from_binary(program, arguments),
        resources=resources,
        environment=create_environment(
            workspace=None if options.image else workspace,
            docker_image=options.image,
            pip_packages=options.pip,
            extras=[extra for entry in options.extras for extra in entry.split(",") if extra],
            env_vars=dict(_variable(variable) for variable in options.variables),
        ),
        max_retries_failure=options.retries,
        max_retries_preemption=options.preemption_retries,
        outlives_parent=options.outlives_parent,
    )


def client_of(*, backend: str | None, cluster: str | None) -> Client:
    """Returns the client of a backend's address or of a region's cluster; else the default client."""
    if backend and cluster:
        raise BadInput(
            expected="either --backend or --cluster",
            found=f"--backend {backend} --cluster {cluster}",
            remedy="Leave one of them out.",
        )
    if cluster:
        return client_from_url(_address_of(cluster))
    return client_from_url(backend) if backend else current_client()


def cluster_of(backend: str | None, *, namespace: str | None) -> Cluster:
    """Returns a namespace of a Kubernetes cluster: as given, else of ASSAY_JOBS, else of the kubeconfig."""
    usual = settings().jobs
    address = backend or (usual if usual and usual.startswith("kubernetes://") else None) or "kubernetes://"
    parts = urlsplit(address)
    named = parts.path.strip("/")
    if parts.scheme != "kubernetes" or (named and namespace and named != namespace):
        raise BadInput(
            expected="--backend kubernetes://context" + (f" with the namespace {namespace}" if namespace else ""),
            found=address,
            remedy="correct it, or leave it out for the kubeconfig's current context",
        )
    if find_spec("kubernetes") is None:
        raise BadInput(
            expected="the package kubernetes, which evaluation jobs need",
            found="it is not installed",
            remedy="Install the extra: pip install 'assay-evals[kubernetes]'",
        )
    from resources.backends.kubernetes.cluster import connect

    return connect(parts.netloc, namespace or named)


def job_name(command: tuple[str, ...]) -> str:
    """Returns a job name for a command: its first script's, else its program's."""
    scripts = [argument for argument in command[1:] if argument.endswith((".py", ".sh"))]
    stem = Path(scripts[0] if scripts else command[0]).stem
    return _NOT_IN_NAMES.sub("-", stem).strip("-._")[:60] or "job"


def _address_of(cluster: str) -> str:
    if cluster == LOCAL:
        return local_cluster().address
    region = known_regions().named(cluster)
    if region.backend_url:
        return region.backend_url
    raise BadInput(
        expected=f"ray_address or iris_address of {region.name} in the regions file",
        found="neither",
        remedy=f"{where_to_write(region.name, ADDRESS_LINE)}; or run assay cluster dashboard {region.name} in another "
        "terminal and submit with --backend ray://127.0.0.1:10001",
    )


def _resources(options: SubmitOptions) -> ResourceConfig:
    try:
        sizes = {name: size for name in ("cpu", "ram", "disk") if (size := getattr(options, name)) is not None}
        resources = ResourceConfig(
            **sizes,
            device=_device(options),
            replicas=options.replicas,
            regions=tuple(known_regions().named(name).name for name in options.regions) or None,
            zone=options.zone,
            preemptible=options.preemptible,
            image=options.image,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(
            expected=f"a sensible {'.'.join(str(part) for part in first['loc']) or 'set of resources'}",
            found=f"{first['msg']} ({first['input']!r})",
            remedy="Correct the option; assay submit --help describes each.",
        ) from error
    if options.regions:
        regions_for(resources)
    return resources


def _device(options: SubmitOptions) -> Device:
    if options.gpu and options.tpu:
        raise BadInput(
            expected="either --gpu or --tpu", found=f"--gpu {options.gpu} --tpu {options.tpu}", remedy="Omit either."
        )
    if options.tpu:
        return TpuConfig.model_validate(tpu_asked(options.tpu))
    if options.gpu is None:
        return CpuConfig()
    match = _GPU.fullmatch(options.gpu)
    if match is None or not options.gpu:
        raise BadInput(expected="--gpu H100, --gpu H100:8 or --gpu 8", found=options.gpu, remedy="Correct it.")
    return GpuConfig(variant=match["variant"] or "auto", count=int(match["count"] or 1))


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if name and given:
        return name, value
    inherited = variable(name) if name else None
    if inherited is None:
        raise BadInput(
            expected="-e KEY=VALUE, or -e KEY with KEY set here",
            found=f"-e {text}" + ("" if given else ", and it is not set"),
            remedy="Give the value, or export the variable before.",
        )
    return name, inherited
