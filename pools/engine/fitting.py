"""Tensors of a checkpoint, held against its config before an engine starts with it or reloads it.

Headers and the config are sufficient: `programs/check_tensors.py` builds the model without memory for its weights. The
answer is stored on this machine, for all checkpoints with the same config, names and shapes. Without an answer, the
engine decides.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from pathlib import Path

from pools.config import InferencePoolConfig
from pools.engine.engines import CHECK_PROGRAM
from pools.engine.launch import Launcher, ServedCheckpoint, check_job
from pools.weights.model_files import read_tensors
from resources.errors import AssayError, ModelUnusable
from resources.jobs.jobs import Client
from resources.settings import settings
from resources.storage import storage
from resources.storage.regular_files import read_cached

_OTHERWISE = {"config_format", "hf_config_path", "hf_overrides", "load_format", "model_impl", "quantization"}
"""Engine arguments by which vLLM makes another model of a config, or reads other files."""
_LONGEST_SECONDS = 120.0  # 0.1 s from a warm server; a cold start takes 5 to 15 s

_log = logging.getLogger("assay.agent")


def require_fitting(
    checkpoint: ServedCheckpoint, config: InferencePoolConfig, *, launcher: Launcher, client: Client
) -> None:
    """Raises ModelUnusable if matrices of a checkpoint's language model are missing, or have other shapes."""
    if _OTHERWISE & config.model.engine_kwargs.keys():
        return
    shapes = {name: list(tensor.shape) for name, tensor in read_tensors(checkpoint.files).items()}
    about = [launcher.identity, CHECK_PROGRAM.read_text(), checkpoint.digests.config, sorted(shapes.items())]
    name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]
    path = settings().cache_dir / "fitting" / f"{name}.json"
    try:
        why = json.loads(read_cached(path))["why"]
    except (OSError, ValueError, TypeError, KeyError):
        why = _asked(checkpoint, shapes, path, launcher=launcher, client=client)
    if why is not None:
        raise ModelUnusable(
            expected=f"tensors in {checkpoint.name} with the names and shapes that its config.json makes",
            found=str(why),
            remedy="export it again, with the config.json of these weights and the names of this architecture",
        )


def _asked(
    checkpoint: ServedCheckpoint, shapes: dict[str, list[int]], path: Path, *, launcher: Launcher, client: Client
) -> str | None:
    with tempfile.TemporaryDirectory(prefix="assay-fitting-") as folder:
        order, answer = Path(folder) / "order.json", Path(folder) / "answer.json"
        order.write_text(json.dumps({"folder": str(checkpoint.folder), "shapes": shapes}))
        launch = launcher.check(order, answer)
        if launch is None:
            return None
        job = client.submit(check_job(launch))
        try:
            job.wait(_LONGEST_SECONDS, raise_on_failure=False)
            content = json.loads(answer.read_bytes())
        except AssayError:  # it takes too long
            job.terminate()
            return None
        except (OSError, ValueError):
            _log.info("the tensors of %s were not checked: %s", checkpoint.name, job.logs(3).strip())
            content = {"why": None}
        storage.write_bytes(str(path), json.dumps(content).encode())
        return content["why"]
