"""The file of an evaluation job: evaluation, model, resources and tracking."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, Discriminator, Field, Tag, field_validator, model_validator

from resources.config import Config, Device, JsonObject
from resources.errors import UnsatisfiableResources
from resources.gke import accelerator_label, gke_device
from resources.storage import storage
from tasks.eval_jobs.helm import HelmArguments, helm_arguments
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.names import name_of
from tasks.spec.sinks import Sinks
from tasks.spec.suites import SuiteName, SuiteRequest

_NEVER_SET = ("model_path", "pool_name", "base_url", "served_model_name")
UNSET_MODEL = "/model-of-the-job"
"""Placeholder for the model's path until the job has fetched it."""


def _matching(pattern: str, expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"expected {expected}, found {text!r}")
        return text

    return AfterValidator(check)


_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_Name = Annotated[str, _matching(_LABEL, "a name of lower-case letters, digits and dashes")]
_GoogleLabel = Annotated[str, _matching(f"(?i){_LABEL}", "a name as GKE's labels have it")]
_Size = Annotated[str, AfterValidator(str.strip), _matching(r"(?i)\d+(\.\d+)?\s*[kmgt](ib?)?", "a size such as 16Gi")]
_Image = Annotated[
    str, _matching(r"[\w.-]+(:\d+)?(/[\w.-]+)*", "the name of an image without its tag (put the tag in image_tag)")
]
_Bucket = Annotated[str, _matching("gs://.*", "an address that begins with gs:// (other places go into path)")]
_ImageTag = Annotated[str, _matching(r"[\w][\w.-]{0,127}|sha256:[0-9a-f]{64}", "a tag, or a digest sha256:…")]


def _inside(path: str) -> str:
    if path.startswith("/") or not path.strip() or ".." in PurePosixPath(path).parts:
        raise ValueError(f"expected a folder within the run's artifacts, found {path!r}")
    return path


_Folder = Annotated[str, AfterValidator(_inside)]


@contextmanager
def _as_value_errors() -> Iterator[None]:
    try:
        yield
    except UnsatisfiableResources as error:
        raise ValueError(f"expected {error.expected}, found {error.found}: {error.remedy}") from None


class ComputeConfig(Config):
    """Resources of the job's pod."""

    accelerator: str | None = None
    """GKE's name of a GPU or TPU (nvidia-tesla-t4, nvidia-l4, tpu-v6e-slice), a model (T4), or a slice (v6e-4)."""
    count: int | None = Field(default=None, ge=1)
    """GPUs, or chips of the TPU slice; when unset, 1 GPU, or the chips of the slice or topology."""
    topology: str | None = None
    """Arrangement of a TPU's chips, such as 2x4."""
    cpu: int = Field(default=4, ge=1)
    """CPU cores."""
    memory: _Size = "16Gi"
    """Memory, such as 16Gi."""
    disk: _Size = "50Gi"
    """Size of the scratch volume."""
    machine_family: _GoogleLabel | None = None
    """Machine series of the node, such as g2 or n2."""
    compute_class: _GoogleLabel | None = None
    """Compute class of Autopilot, such as Performance or Accelerator."""
    spot: bool = False
    """Use a Spot node, which is cheaper and may be preempted."""

    @field_validator("accelerator")
    @classmethod
    def _is_one_of_gke(cls, name: str | None) -> str | None:
        if name is None or name.strip().lower() in ("", "none", "cpu"):
            return None
        with _as_value_errors():
            accelerator_label(name)
        return name

    @model_validator(mode="after")
    def _device_exists(self) -> ComputeConfig:
        _ = self.device
        return self

    @property
    def device(self) -> Device:
        """The accelerator of a pod; raises ValueError if GKE has no such accelerator."""
        with _as_value_errors():
            return gke_device(self.accelerator, count=self.count, topology=self.topology)


class MlflowConfig(Config):
    """The tracking server."""

    tracking_uri: str
    """Address of the tracking server, such as http://10.0.0.15:5000."""


class MlflowArtifact(Config):
    """A model that was logged to a run in MLflow."""

    run_id: str
    """Id of the run."""
    artifact_path: _Folder
    """Path of the artifact within the run: a folder."""
    model_directory: _Folder | None = None
    """Folder within the artifact with config and weights; the artifact itself when unset."""
    tokenizer_directory: _Folder | None = None
    """Folder within the artifact with the tokenizer, if that is elsewhere."""
    tokenizer_hf_repo: str | None = None
    """Repository of the Hugging Face hub with the tokenizer, if the artifact has none."""

    @model_validator(mode="after")
    def _check_single_tokenizer(self) -> MlflowArtifact:
        if self.tokenizer_directory is not None and self.tokenizer_hf_repo is not None:
            raise ValueError("expected one of tokenizer_directory and tokenizer_hf_repo, found both: leave either out")
        return self


class ModelSource(Config):
    """The model: from MLflow, from a bucket, or from any other location of checkpoints."""

    mlflow_artifact: MlflowArtifact | None = None
    """A model that was logged to a run in MLflow."""
    gs_uri: _Bucket | None = None
    """A checkpoint in Hugging Face layout in a bucket, gs://…."""
    path: str | None = None
    """A checkpoint anywhere else: s3://…, models:/…, or a folder of this machine for `--local`."""

    @model_validator(mode="after")
    def _check_single_source(self) -> ModelSource:
        given = [name for name in ("mlflow_artifact", "gs_uri", "path") if getattr(self, name) is not None]
        if len(given) != 1:
            names = " and ".join(given) or "none of them"
            raise ValueError(f"expected one of mlflow_artifact, gs_uri and path, found {names}: name a single model")
        return self

    @property
    def uri(self) -> str:
        """The model's URI; for an artifact, of the folder that is downloaded."""
        if (artifact := self.mlflow_artifact) is not None:
            return f"runs:/{artifact.run_id}/{artifact.artifact_path.strip('/')}"
        return str(self.gs_uri or self.path)

    @property
    def name(self) -> str:
        """The run name of the model for records and reports."""
        if (artifact := self.mlflow_artifact) is not None:
            return f"{name_of(artifact.artifact_path)[0]}-{artifact.run_id[:8]}"
        return name_of(self.uri)[0]

    @property
    def is_local(self) -> bool:
        """True if the model is a local folder of the machine that runs the job."""
        return self.path is not None and storage.is_local(self.path)


class TrackingConfig(Config):
    """The run in MLflow."""

    experiment_name: str
    """Name of the experiment; created if it does not exist."""
    run_name: str | None = None
    """Name of the run; the evaluation's when unset."""
    description: str | None = None
    """Text that MLflow shows with the run."""
    tags: JsonObject = {}
    """Tags of any depth: nested keys are joined by dots, and lists are written as JSON."""


class HelmRun(Config):
    """HELM with a file of run entries, by default `run_specs.conf` next to this file."""

    args: tuple[str, ...] = ()
    """Arguments of `helm-run`."""
    suite: str | None = None
    """Name of HELM's suite, written as a tag."""
    engine_kwargs: JsonObject = {}
    """Engine arguments as vLLM names them, such as max_model_len."""
    evaluation_path: str | None = None
    """Folder for records, gs:// or s3://; the pod's scratch volume when unset: only MLflow keeps the results."""

    @property
    def options(self) -> HelmArguments:
        """The parsed arguments; raises ValueError for an unsupported argument."""
        return helm_arguments(self.args)

    @model_validator(mode="after")
    def _arguments_have_a_meaning(self) -> HelmRun:
        _ = self.options
        return self


class JobEvaluation(EvaluationConfig):
    """An evaluation by a single evaluator, as in EvaluationConfig without the model and its server."""

    model_path: str = UNSET_MODEL
    """The job's model; do not set."""


class JobSuite(SuiteRequest):
    """A suite, as in SuiteRequest without the model and its server."""

    suite: SuiteName
    """Name of a suite, or a YAML file with a suite in the container."""
    model_path: str = UNSET_MODEL
    """The job's model; do not set."""


def _kind_of(content: Any) -> str:
    is_suite = "suite" in content if isinstance(content, dict) else isinstance(content, JobSuite)
    return "JobSuite" if is_suite else "JobEvaluation"


class KubernetesConfig(Config):
    """The cluster's settings of the job."""

    namespace: _Name = "default"
    """Namespace of the Job."""
    service_account: _Name = "kubernetes"
    """Service account of the pod, which must be able to read the model."""
    workload_identity: bool = False
    """Run only on nodes with workload identity; not needed on Autopilot, where all nodes have it."""
    ttl_seconds: int = Field(default=1800, ge=0)
    """Time that the finished Job is kept, with its pods and their logs."""
    backoff_limit: int = Field(default=3, ge=0)
    """Number of failed pods after which the Job fails; pods of preempted or drained nodes do not count."""
    queue_name: _Name | None = None
    """Kueue queue in which the Job waits for admission; it starts at once when unset."""
    storage_class: _Name = "standard-rwo"
    """Storage class of the scratch volume; premium-rwo is GKE's faster class."""
    secrets: dict[str, str] = {}
    """Environment variables from Secrets of the cluster: MLFLOW_TRACKING_PASSWORD: secret/key."""

    @field_validator("secrets")
    @classmethod
    def _are_references(cls, secrets: dict[str, str]) -> dict[str, str]:
        for variable, reference in secrets.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", variable) or not re.fullmatch(r"[a-z0-9.-]+/[\w.-]+", reference):
                # The reference is left out: it may be the key itself, entered by mistake.
                raise ValueError(f"{variable}: expected a variable, and secret/key, such as mlflow/password")
        return secrets


class JobFile(Config):
    """An evaluation job."""

    version: str
    """Version of this file, chosen by its author."""
    image: _Image
    """Container image without its tag."""
    image_tag: _ImageTag
    """Tag or digest (sha256:…) of the image; `latest` may be a different image tomorrow."""
    compute_config: ComputeConfig = ComputeConfig()
    """Resources of the job's pod."""
    helm: HelmRun | None = None
    """HELM with a file of run entries; or use `evaluation`."""
    evaluation: (
        Annotated[
            Annotated[JobSuite, Tag("JobSuite")] | Annotated[JobEvaluation, Tag("JobEvaluation")],
            Discriminator(_kind_of),
        ]
        | None
    ) = None
    """Any evaluator with its benchmarks, as in EvaluationConfig, a suite, as in SuiteRequest, or `helm`."""
    mlflow_config: MlflowConfig
    """The tracking server."""
    model: ModelSource = Field(validation_alias=AliasChoices("model_config", "model"))
    """The model. Written `model_config`."""
    tracking_config: TrackingConfig
    """The run in MLflow."""
    sinks: Sinks = ()
    """Further sinks for the results."""
    kubernetes_config: KubernetesConfig = KubernetesConfig()
    """The cluster's settings of the job."""

    @model_validator(mode="before")
    @classmethod
    def _helm_under_evaluation(cls, values: Any) -> Any:
        match values:
            case {"evaluation": {"helm": helm, **others}} if not others and values.get("helm") is None:
                return {**values, "helm": helm, "evaluation": None}
        return values

    @field_validator("evaluation")
    @classmethod
    def _leaves_the_model_to_the_job(cls, evaluation: Any) -> Any:
        given = [name for name in _NEVER_SET if name in getattr(evaluation, "model_fields_set", ())]
        if given:
            raise ValueError(f"found {' and '.join(given)}: leave it out, model_config names the model")
        if getattr(evaluation, "sinks", ()):
            raise ValueError("found sinks: name them next to `evaluation`")
        return evaluation

    @model_validator(mode="after")
    def _check_single_evaluation(self) -> JobFile:
        if (self.helm is None) == (self.evaluation is None):
            given = "neither" if self.helm is None else "both"
            raise ValueError(f"expected one of helm and evaluation, found {given}: name a single evaluation")
        return self

    @property
    def request(self) -> HelmRun | JobSuite | JobEvaluation:
        """The evaluation: `helm`, or that of `evaluation`."""
        evaluation = self.helm or self.evaluation
        assert evaluation is not None
        return evaluation

    @property
    def image_reference(self) -> str:
        return f"{self.image}{'@' if self.image_tag.startswith('sha256:') else ':'}{self.image_tag}"


def advice(job: JobFile) -> list[str]:
    """Returns warnings about valid settings that are probably mistakes."""
    warnings, path = [], job.request.evaluation_path
    if job.image_tag == "latest":
        warnings.append("image_tag: latest is another image tomorrow; name a commit or a digest (sha256:…)")
    if (problem := only_here(job)) is not None:
        warnings.append(f"{problem}, so the job runs only here: assay eval-job run FILE --local")
    elif "evaluation_path" not in job.request.model_fields_set or path is None or storage.is_local(path):
        warnings.append("evaluation_path is unset: records end with the pod, and only MLflow keeps the results")
    return warnings


def only_here(job: JobFile) -> str | None:
    """Returns the model's folder or tracking store that a pod cannot reach; None if the job can run in a pod."""
    if job.model.is_local:
        return f"model_config.path: {job.model.path} is a folder"
    if not job.mlflow_config.tracking_uri.startswith(("http://", "https://")):
        return f"mlflow_config.tracking_uri: {job.mlflow_config.tracking_uri} is no server"
    return None
