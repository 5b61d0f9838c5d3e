"""Options of HELM, beyond the run entries."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field

from resources.errors import StorageError
from resources.storage import storage
from resources.storage.storage import content_digest
from tasks.spec.evaluators import EvaluatorOptions

_WHOLE_PATH = re.compile(r"=([/~][^,\"'\s}]*)")


class HelmOptions(EvaluatorOptions):
    """Options of HELM."""

    title: ClassVar = "HELM"
    reads_tokenizer: ClassVar = True

    name: Literal["helm"] = "helm"
    """Selects HELM."""
    run_specs_path: str | None = None
    """HOCON file of run entries, local, gs:// or s3://. A benchmark then names the entries that agree with task_kwargs;
    `all` names every entry. Models in it are ignored."""
    priority: int | None = Field(default=None, ge=1)
    """Only entries of the file with this priority or a lower number."""
    groups: tuple[str, ...] = ()
    """Only runs that belong to one of these groups of HELM."""
    num_train_trials: int | None = Field(default=None, ge=1)
    """Times each question is asked, with other examples in front; the run entry's own when unset."""
    num_threads: int | None = Field(default=None, ge=1)
    """Requests at once; when unset, as many as the endpoint works on, but at most 64."""
    request_retries: int = Field(default=2, ge=0)
    """Retries of a failed request, within seconds."""
    exit_on_error: bool = False
    """End at the first request without an answer or run that fails, instead of finishing the others."""
    skip_completed_runs: bool = True
    """Take over runs that an earlier attempt at the same cell has finished."""
    failed_control: Literal["withhold", "note"] = "withhold"
    """If a run's grader scores none of its own right answers: withhold the score, or only note it."""
    site: bool = True
    """Keep HELM's web site of the results (2 MB)."""

    def score_inputs(self) -> dict[str, Any]:
        """Returns the options that can change a score, as opposed to speed, retries and handling of errors."""
        specs = content_digest(self.run_specs_path, length=16) if self.run_specs_path is not None else None
        inputs = {
            "run_specs": specs,
            "priority": self.priority,
            "groups": list(self.groups),
            "num_train_trials": self.num_train_trials,
        }
        data = self._named_files() if specs is not None else {}
        return {**inputs, "run_specs_data": data} if data else inputs

    def _named_files(self) -> dict[str, str]:
        try:
            path = self.run_specs_path
            entries = storage.read_bytes(path, within="/").decode() if path is not None else ""
        except (OSError, ValueError, StorageError):  # refused where it is needed
            return {}
        paths = sorted(set(_WHOLE_PATH.findall(entries)))
        return {path: digest for path in paths if (digest := content_digest(path)) is not None}


OPTIONS = HelmOptions
