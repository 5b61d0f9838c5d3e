"""Code that Ray's workers run, sent by value: a shell for the controller, and a function for a process of a job.

Both unpack the driver's own code before they import any of it: a cluster needs Assay's dependencies, but not Assay, and
never runs another version of it. Arguments and answers are pickled bytes, so that they are read only after that.
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
    """Makes the packages in the zip `content` importable in this worker; `digest` is its SHA-256 in hexadecimal."""
    if "resources.backends" in sys.modules and digest in sys.modules["resources.backends"].__path__[0]:
        return
    folder = Path(tempfile.gettempdir()) / f"assay-code-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        folder = Path(tempfile.mkdtemp(prefix="assay-code-"))  # another user could have put code into the folder
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
    """Actor that supervises jobs, by `resources.backends.ray.controller.Controller`."""

    def __init__(self, digest: str, content: bytes) -> None:
        bring_code(digest, content)
        from resources.backends.ray import workers as ray_workers
        from resources.backends.ray.controller import Controller

        cloudpickle.register_pickle_by_value(ray_workers)
        code = [ray.put(content)]  # in a list, Ray fetches the object only on demand

        def start(place: Any, order: bytes, sent: Mapping[str, Any]) -> Any:
            task = ray.remote(ray_workers.run_on_node).options(**place.options, max_retries=0, name="assay")
            return task.remote(digest, code, order, dict(sent), ray.get_runtime_context().current_actor)

        self._controller = Controller(ray, start=start)

    async def call(self, method: str, arguments: bytes) -> bytes:
        """Calls a method of the controller with pickled keyword arguments; see `Controller.answer`."""
        return await self._controller.answer(method, arguments)


def run_on_node(digest: str, code: list[Any], order: bytes, sent: dict[str, Any], controller: Any) -> bytes:
    """Runs a pickled `ProcessOrder` in this worker, and returns the pickled `ProcessEnd`.

    `code` has a reference to the content of `digest`. `sent` are references as in `ControlledJob`; inside the pickled
    `order` they would lose their owner.
    """
    bring_code(digest, ray.get(code[0]))
    from resources.backends.ray.replica import run_process

    def ask(method: str, **arguments: Any) -> Any:
        answer = controller.call.remote(method, pickle.dumps(arguments))
        return pickle.loads(ray.get(answer, timeout=_GET_SECONDS + arguments.get("seconds", 0.0)))

    return pickle.dumps(run_process(pickle.loads(order), ask=ask, fetch=lambda name: ray.get(sent[name])))
