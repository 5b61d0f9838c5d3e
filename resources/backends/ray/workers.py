"""Code that Ray's workers run: a shell for the controller, and one for a process of a job, sent by value.

Both unpack the driver's own code before they import any of it, so a cluster needs the packages that we depend on, but
not us, and never runs another version of us. Arguments and answers are pickled inside, to be read after that.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import secrets
import shutil
import stat
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

_GET_SECONDS = 10.0


def bring_code(digest: str, content: bytes) -> None:
    """Makes our packages importable in this worker.

    Args:
        digest: SHA-256 of the zip, as hexadecimal digits.
        content: a zip that holds our packages.
    """
    if "resources.backends" in sys.modules and digest in sys.modules["resources.backends"].__path__[0]:
        return
    folder = Path(tempfile.gettempdir()) / f"assay-code-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        folder = Path(tempfile.mkdtemp(prefix="assay-code-"))  # somebody else could have put code there
    root = folder / digest
    if not root.is_dir():
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError("the code of Assay was damaged on its way to this node; submit the job again")
        unfinished = folder / f".{digest}.{secrets.token_hex(4)}"
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            archive.extractall(unfinished)
        try:
            unfinished.rename(root)
        except OSError:  # another worker was faster
            shutil.rmtree(unfinished, ignore_errors=True)
    sys.path.insert(0, str(root))


class ControllerShell:
    """The actor that supervises jobs: `resources.backends.ray.controller.Controller` does the work."""

    def __init__(self, digest: str, content: bytes) -> None:
        """Unpacks `content`, see `bring_code`, and passes it on to nodes later."""
        bring_code(digest, content)
        from resources.backends.ray import workers as ray_workers
        from resources.backends.ray.controller import Controller

        cloudpickle.register_pickle_by_value(ray_workers)
        code = [ray.put(content)]  # in a list: fetched where it is missing only

        def start(place: Any, order: bytes, sent: Mapping[str, Any]) -> Any:
            task = ray.remote(ray_workers.run_on_node).options(
                num_cpus=place.num_cpus,
                num_gpus=place.num_gpus,
                memory=place.memory,
                resources=dict(place.resources),
                scheduling_strategy=place.strategy,
                max_retries=0,
                name="assay",
            )
            return task.remote(digest, code, order, dict(sent), ray.get_runtime_context().current_actor)

        self._controller = Controller(ray, start=start)

    async def call(self, method: str, arguments: bytes) -> bytes:
        """Calls a method of the controller, with the pickled keyword arguments; see `Controller.answer`."""
        return await self._controller.answer(method, arguments)


def run_on_node(digest: str, code: list[Any], order: bytes, sent: dict[str, Any], controller: Any) -> bytes:
    """Runs one process of a job in this worker, and returns the pickled `ProcessEnd`.

    Args:
        digest: see `bring_code`.
        code: holds a reference to the content of that digest.
        order: a pickled `ProcessOrder`.
        sent: references to what lies in Ray's object store, see `ControlledJob`; pickled by us, they would lose their
            owner.
        controller: handle on the actor that started this.
    """
    bring_code(digest, ray.get(code[0]))
    from resources.backends.ray.replica import run_process

    def ask(method: str, **arguments: Any) -> Any:
        answer = controller.call.remote(method, pickle.dumps(arguments))
        return pickle.loads(ray.get(answer, timeout=_GET_SECONDS + arguments.get("seconds", 0.0)))

    return pickle.dumps(run_process(pickle.loads(order), ask=ask, fetch=lambda name: ray.get(sent[name])))
