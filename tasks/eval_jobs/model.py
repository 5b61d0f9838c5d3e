"""The model of a job as a local folder: fetched once, with tokenizer and weights in the same folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from resources.errors import BadInput, StorageError
from resources.settings import variable
from resources.storage import storage
from resources.storage.files import replace_json
from tasks.eval_jobs.job_file import MlflowArtifact, ModelSource
from tasks.spec.names import name_of, step_of

_FETCHED = "fetched.json"
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("tokenizer.model", "vocab.json", "merges.txt", "tekken.json"),
)
_HUB = "https://huggingface.co"
_SECONDS = 60.0


def model_name(source: ModelSource) -> str:
    """Returns the run name of a model for records and reports."""
    if (artifact := source.mlflow_artifact) is not None:
        return f"{name_of(artifact.artifact_path)[0]}-{artifact.run_id[:8]}"
    return name_of(source.uri)[0]


def fetch_model(source: ModelSource, *, scratch: Path, note: Callable[[str], None]) -> str:
    """Returns the folder of the job's model, below `scratch` unless it is local already.

    A completed fetch of the same model is reused.
    """
    if source.is_local:
        return storage.absolute(source.uri)
    description = source.model_dump()
    marker = scratch / _FETCHED
    if marker.is_file() and (done := json.loads(marker.read_bytes()))["source"] == description:
        note(f"{source.uri} is in {done['folder']}")
        return done["folder"]
    target = _place_below(scratch, source)
    note(f"fetching {source.uri} to {target}")
    shutil.rmtree(target, ignore_errors=True)  # of another source, or of a partial fetch
    storage.copy_to_local(source.uri, target)
    folder = target
    if (artifact := source.mlflow_artifact) is not None:
        folder = _with_tokenizer(target, artifact, note=note)
    replace_json(marker, {"source": description, "folder": str(folder)})
    return str(folder)


def _place_below(scratch: Path, source: ModelSource) -> Path:
    if (artifact := source.mlflow_artifact) is not None:
        return scratch / artifact.artifact_path.strip("/")
    last = storage.basename(source.uri)
    run = scratch / "checkpoints" / name_of(source.uri)[0]
    return run / "hf" / last if step_of(last) is not None else run


def _with_tokenizer(target: Path, artifact: MlflowArtifact, *, note: Callable[[str], None]) -> Path:
    folder = _within(target, artifact.model_directory, field="model_directory")
    if artifact.tokenizer_directory is not None:
        tokenizer_folder = _within(target, artifact.tokenizer_directory, field="tokenizer_directory")
        for file in (tokenizer_folder / name for name in _TOKENIZER_FILES):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    elif artifact.tokenizer_hf_repo is not None:
        note(f"fetching the tokenizer of {artifact.tokenizer_hf_repo}")
        for name, content in _tokenizer_of(artifact.tokenizer_hf_repo).items():
            (folder / name).write_bytes(content)
    return folder


def _within(target: Path, name: str | None, *, field: str) -> Path:
    folder = target / name if name else target
    if not folder.is_dir():
        folders = ", ".join(sorted(path.name for path in target.iterdir() if path.is_dir()))
        raise BadInput(
            expected=f"a folder of the artifact as model_config.mlflow_artifact.{field}",
            found=f"{name}, which it has not; folders there: {folders or 'none'}",
            remedy="correct it in the job's file",
        )
    return folder


def _tokenizer_of(repository: str) -> dict[str, bytes]:
    address = f"{(variable('HF_ENDPOINT') or _HUB).rstrip('/')}/{quote(repository)}/resolve/main/"
    files = {name: content for name in _TOKENIZER_FILES if (content := _downloaded(address + name)) is not None}
    if not {"tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json"} & set(files):
        raise BadInput(
            expected=f"a tokenizer in {repository}, as model_config.mlflow_artifact.tokenizer_hf_repo names it",
            found="no such repository, or none in it, or it needs a token (HF_TOKEN)",
            remedy="correct the name, or log the tokenizer with the model and name tokenizer_directory",
        )
    return files


def _downloaded(address: str) -> bytes | None:
    token = variable("HF_TOKEN")
    request = Request(address, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urlopen(request, timeout=_SECONDS) as answer:
            return answer.read()
    except HTTPError as error:
        if error.code in (401, 403, 404):
            return None
        problem = f"{error.code} {error.reason}"
    except (URLError, OSError) as error:
        problem = str(error)
    raise StorageError(
        expected=f"the hub to give {address}",
        found=problem,
        remedy="try again; without a way to the hub, log the tokenizer with the model and name tokenizer_directory",
    )
