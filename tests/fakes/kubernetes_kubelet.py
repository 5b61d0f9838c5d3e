"""Fake of a node: runs the containers of a pod as processes of this machine, and reports as a kubelet does.

There are no namespaces: mounted paths are replaced by folders in the pod's command. When its first process ends,
leftover processes are found by a resource limit that every process inherits, regardless of environment and session, and
killed, as a kernel ends a pid namespace.
"""

from __future__ import annotations

import base64
import itertools
import os
import resource
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_MARKS = itertools.count(os.getpid() % 800 * 1000 + 1)  # several clusters may run at once
_LIMIT = resource.RLIMIT_MSGQUEUE  # nothing here opens a message queue
_DONE = {"terminated": {"exitCode": 0, "reason": "Completed"}}


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class RunningPod:
    """The processes of a pod; keeps its manifest up to date."""

    def __init__(
        self, pod: dict[str, Any], folder: Path, *, image_variables: dict[str, str], entrypoint: tuple[str, ...] = ()
    ) -> None:
        self.pod = pod
        self.folder = folder
        self.uid = pod["metadata"]["uid"]
        self._image_variables, self._entrypoint = image_variables, entrypoint
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._mark = next(_MARKS)
        self._kill_at: float | None = None
        self.ended = False
        self.began: dict[str, int] = {}
        """Start of each container, in nanoseconds."""
        self._waiting = list(pod["spec"].get("initContainers", ()))
        for volume in pod["spec"].get("volumes", ()):
            (folder / "volumes" / volume["name"]).mkdir(parents=True, exist_ok=True)

    def mount(self, volume: str, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            path = self.folder / "volumes" / volume / name
            if not path.exists() or path.read_bytes() != content:
                path.with_name(f".{name}").write_bytes(content)
                path.with_name(f".{name}").replace(path)

    def start(self) -> None:
        """Starts the init containers in order, each when its predecessor has ended or is a sidecar, then the main."""
        spec, status = self.pod["spec"], self.pod["status"]
        for container in self._waiting:
            name = container["name"]
            if self._processes.get(name) is None and (failed := self._start(container)) is not None:
                self._finish(failed, of=name)
                return
            if container.get("restartPolicy") != "Always" and (code := self._processes[name].poll()) != 0:
                if code is not None:
                    self._finish({"exitCode": code, "reason": "Error"}, of=name)
                return
        status["initContainerStatuses"] = [
            _status(container["name"], {"running": {"startedAt": now()}} if container.get("restartPolicy") else _DONE)
            for container in self._waiting
        ]
        failed = self._start(spec["containers"][0])
        state = {"running": {"startedAt": now()}} if failed is None else {"terminated": failed}
        status |= {"containerStatuses": [_status(self._main, state)], "startTime": now(), "phase": "Running"}
        if failed is not None:
            self._finish(failed)

    @property
    def _main(self) -> str:
        return self.pod["spec"]["containers"][0]["name"]

    def log_path(self, container: str) -> Path:
        return self.folder / f"{container}.log"

    def has_started(self, container: str) -> bool:
        return self.log_path(container).exists()

    def look(self) -> None:
        """Detects the end of the first process, and kills processes past their grace."""
        if self.ended:
            return
        if (process := self._processes.get(self._main)) is None:
            self.start()
            return
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self.kill()
        if (code := process.poll()) is not None:
            code = code if code >= 0 else 128 - code
            self._finish({"exitCode": code, "reason": "Completed" if code == 0 else "Error"})

    def terminate(self, grace_seconds: float) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + grace_seconds
            if (process := self._processes.get(self._main)) is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def kill(self, reason: str | None = None) -> None:
        """Kills all processes, as the kernel kills a control group; `reason` becomes the container's reason."""
        self._kill_all()
        if (process := self._processes.get(self._main)) is not None:
            process.wait()
        if reason is not None and not self.ended:
            self._finish({"exitCode": 137, "reason": reason})

    def remove(self) -> None:
        self.kill()
        for process in self._processes.values():
            process.wait()
        self.ended = True
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_all(self) -> None:
        _kill_marked(self._mark, reaped_by_us={process.pid for process in self._processes.values()})

    def _finish(self, terminated: dict[str, Any], *, of: str | None = None) -> None:
        self._kill_all()
        for process in self._processes.values():
            process.wait()
        message = self.folder / "termination"
        termination_message = {"message": message.read_text()} if message.exists() else {}
        status = self.pod["status"]
        ended = {**terminated, **termination_message, "finishedAt": now()}
        part = "containerStatuses" if of is None else "initContainerStatuses"
        status[part] = [_status(of or self._main, {"terminated": ended})]
        status["phase"] = "Succeeded" if terminated["exitCode"] == 0 else "Failed"
        self.ended = True

    def _value(self, variable: dict[str, Any]) -> str:
        if field := variable.get("valueFrom", {}).get("fieldRef"):
            return self.pod["metadata"]["labels"][field["fieldPath"].partition("'")[2].removesuffix("']")]
        return variable.get("value", "")

    def _start(self, container: dict[str, Any]) -> dict[str, Any] | None:
        places = {
            mount["mountPath"]: str(self.folder / "volumes" / mount["name"]) for mount in container["volumeMounts"]
        }
        places[container.get("terminationMessagePath", "/dev/termination-log")] = str(self.folder / "termination")

        def mapped(word: str) -> str:
            place = next((path for path in places if word == path or word.startswith(f"{path}/")), "")
            return places[place] + word.removeprefix(place) if place else word

        argv = [mapped(word) for word in [*(container.get("command") or self._entrypoint), *container.get("args", ())]]
        variables = {variable["name"]: mapped(self._value(variable)) for variable in container.get("env", ())}
        self.began[container["name"]] = time.time_ns()
        with self.log_path(container["name"]).open("ab", buffering=0) as log:
            try:
                self._processes[container["name"]] = subprocess.Popen(
                    argv,
                    cwd=container.get("workingDir", self.folder),
                    env={**self._image_variables, **variables},
                    preexec_fn=lambda: resource.setrlimit(_LIMIT, (self._mark, resource.getrlimit(_LIMIT)[1])),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                return {"exitCode": 128, "reason": "StartError", "message": f"exec: {error}"}
        return None


def volume_files(source: dict[str, Any]) -> dict[str, bytes]:
    if source["kind"] == "Secret":
        return {name: base64.b64decode(text) for name, text in source.get("data", {}).items()}
    return {name: text.encode() for name, text in source.get("data", {}).items()}


def _status(name: str, state: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "state": state, "ready": "running" in state, "restartCount": 0, "image": "", "imageID": ""}


def _kill_marked(mark: int, *, reaped_by_us: set[int]) -> None:
    # also kills processes started meanwhile; returns when none is left
    deadline = time.monotonic() + 10
    killed: set[int] = set()
    while time.monotonic() < deadline:
        pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
        marked = {pid for pid in pids if _has(pid, mark)}
        for pid in marked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= marked - reaped_by_us
        if not marked - reaped_by_us and not any(Path(f"/proc/{pid}").exists() for pid in killed):
            return
        time.sleep(0.005)


def _has(pid: int, mark: int) -> bool:
    # through the kernel: reading a file of /proc per process takes long while the server's lock is held
    try:
        return resource.prlimit(pid, _LIMIT)[0] == mark
    except OSError:  # gone, or of another user
        return False
