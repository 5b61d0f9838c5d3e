"""Stand-in for a Kubernetes API server with its controllers, for the real `kubernetes` client over real HTTP.

Every manifest is checked against the published schemas, strictly. There are Jobs with their controller, pods that run
as processes of this machine, logs, deletion with grace and propagation, owners and their garbage collection, and a
scheduler that knows labels. Refusals can be ordered.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

from fakes.kubernetes_controller import advance_job, can_go, new_pod_status, place
from fakes.kubernetes_http import Refused, handler_of
from fakes.kubernetes_kubelet import RunningPod, now, volume_files

KINDS = {
    "jobs": "Job", "pods": "Pod", "configmaps": "ConfigMap", "secrets": "Secret", "services": "Service", "nodes": "Node"
}  # fmt: skip
_PATH = re.compile(r"/(?:api/v1|apis/batch/v1)(?:/namespaces/([\w-]+))?/(\w+)(?:/([\w.-]+))?(?:/(log))?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_VERSION = "1.34"
_LARGEST_BYTES = 1 << 20
_TICK_SECONDS = 0.04

kubernetes_validate.utils.schema_contents = cache(
    kubernetes_validate.utils.schema_contents
)  # 1.5 MB, read for each object


@dataclass
class Refusal:
    """A refusal that the server is to answer some requests with."""

    verb: str
    resource: str
    code: int
    times: int = 1
    retry_after: float | None = None


class KubernetesServer:
    """A cluster of one node, or of the nodes given, in a folder; `entrypoint` and `variables` are those of images."""

    def __init__(
        self,
        folder: Path,
        *,
        nodes: dict[str, dict[str, str]] | None = None,
        entrypoint: tuple[str, ...] = (),
        variables: dict[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._entrypoint, self._variables = entrypoint, variables or {}
        self.lock = threading.RLock()
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.running: dict[str, RunningPod] = {}
        self.missing_images: set[str] = set()
        self.lost_nodes: set[str] = set()
        self.pod_slots = 1000
        self.refusals: list[Refusal] = []
        self.requests: list[tuple[str, str]] = []
        self.manifests: list[dict[str, Any]] = []
        self._version = 0
        self._closing = threading.Event()
        self._token = secrets.token_hex(8)
        for name, tags in (nodes or {"node-1": {}}).items():
            self.objects["nodes", name] = {"kind": "Node", "metadata": {"name": name, "labels": tags}, "status": {}}
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self))
        self._http.daemon_threads = True
        self.kubeconfig = self._write_kubeconfig()
        self._threads = [
            threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True),
            threading.Thread(target=self._control, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing.set()
        self._http.shutdown()
        for thread in self._threads:
            thread.join()
        self._http.server_close()
        for pod in self.running.values():
            pod.remove()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def image_variables(self) -> dict[str, str]:
        """Variables of every container: a PATH with this interpreter, our code, and a way into the cluster."""
        path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])
        root = Path(__file__).parents[2]
        place = {"HOME": str(self.folder), "PYTHONPATH": str(root), "KUBECONFIG": str(self.kubeconfig)}
        return {"PATH": path, **place, **self._variables}

    # What tests order.

    def pods(self, job_id: str) -> list[dict[str, Any]]:
        with self.lock:
            return [
                pod for (kind, _), pod in self.objects.items()
                if kind == "pods" and pod["metadata"]["labels"].get("assay-evals/job") == job_id
            ]  # fmt: skip

    def evict(self, pod: dict[str, Any], reason: str = "EvictionByEvictionAPI") -> None:
        """As when a node is drained, or a Spot node is taken away: a condition first, then a graceful deletion."""
        with self.lock:
            pod["status"].setdefault("conditions", []).append(
                {"type": "DisruptionTarget", "status": "True", "reason": reason, "lastTransitionTime": now()}
            )
        self.delete("pods", pod["metadata"]["name"], {})

    def run_out_of_memory(self, pod: dict[str, Any]) -> None:
        with self.lock:
            self.running[pod["metadata"]["uid"]].kill("OOMKilled")

    def lose_node_of(self, pod: dict[str, Any]) -> None:
        """The node is gone without a word: its pods are removed, by force, and nobody knows how they ended."""
        self.delete("pods", pod["metadata"]["name"], {"gracePeriodSeconds": 0})

    # What the API does.

    def handle(self, verb: str, path: str, token: str, body: dict[str, Any] | None) -> Any:
        parts = urlsplit(path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if token != f"Bearer {self._token}":
            raise Refused(401, "Unauthorized")
        if (match := _PATH.fullmatch(parts.path)) is None or match[2] not in KINDS:
            raise Refused(404, f"the server could not find the requested resource {parts.path}")
        _, resource, name, log = match.groups()
        with self.lock:
            self.requests.append((verb, resource))
            self._refuse_if_ordered(verb, f"{resource}/log" if log else resource)
            if log:
                return self.log(name, query)
            if verb == "GET" and not name:
                items = [item for (kind, _), item in self.objects.items() if kind == resource and _matches(item, query)]
                return {"kind": f"{KINDS[resource]}List", "items": items, "metadata": {}}
            if verb == "POST":
                return self.create(resource, body or {})
            if (found := self.objects.get((resource, name or ""))) is None:
                raise Refused(404, f'{resource} "{name}" not found')
            if verb == "PATCH":
                return self._patch(resource, found, body or {})
            if verb == "DELETE":
                self.delete(resource, name or "", body or {})
            return found

    def create(self, resource: str, manifest: dict[str, Any]) -> dict[str, Any]:
        try:
            kubernetes_validate.validate(manifest, _VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise Refused(422, f"{manifest.get('kind')} is invalid: {list(error.path)}: {error.message}") from None
        name = manifest["metadata"]["name"]
        _check_names(manifest)
        if sum(len(text) for text in manifest.get("data", {}).values()) > _LARGEST_BYTES * 4 / 3:
            raise Refused(422, f"{name}: Too long: must have at most {_LARGEST_BYTES} bytes")
        if (resource, name) in self.objects:
            raise Refused(409, f'{resource} "{name}" already exists', reason="AlreadyExists")
        for owner in manifest["metadata"].get("ownerReferences", ()):
            if self.objects.get(("jobs", owner["name"]), {}).get("metadata", {}).get("uid") != owner["uid"]:
                return manifest  # the garbage collector would take it at once
        self.manifests.append(json.loads(json.dumps(manifest)))
        manifest["metadata"] |= {"uid": secrets.token_hex(8), "creationTimestamp": now(), "namespace": "default"}
        if resource == "pods":
            manifest["status"] = new_pod_status()
        self.objects[resource, name] = manifest
        return self._changed(manifest)

    def delete(self, resource: str, name: str, options: dict[str, Any]) -> None:
        with self.lock:
            found = self.objects[resource, name]
            if resource not in {"jobs", "pods"}:
                del self.objects[resource, name]
                return
            found["metadata"].setdefault("deletionTimestamp", now())
            if resource == "pods":
                given = options.get("gracePeriodSeconds")
                grace = found["spec"].get("terminationGracePeriodSeconds", 30) if given is None else given
                pod = self.running.get(found["metadata"]["uid"])
                if grace == 0:
                    self._remove_pod(found)
                elif pod is not None and not pod.ended:
                    pod.terminate(grace)
            self._changed(found)

    def log(self, name: str, query: dict[str, str]) -> Iterator[bytes]:
        pod = self.objects.get(("pods", name))
        if pod is None:
            raise Refused(404, f'pods "{name}" not found')
        running, container = self.running.get(pod["metadata"]["uid"]), query.get("container", "")
        if running is None or not running.has_started(container):
            raise Refused(400, f'container "{container}" in pod "{name}" is waiting to start: ContainerCreating')
        lines = _lines(running.log_path(container).read_bytes())
        began = running.began[container] if query.get("timestamps") == "true" else None
        found = [_stamped(line, began, number) for number, line in enumerate(lines)]
        if since := query.get("sinceTime"):
            found = [line for line in found if line.decode(errors="replace") >= since.removesuffix("Z")]
        tail = b"".join(found[-int(query["tailLines"]) :] if "tailLines" in query else found)
        tail = tail[: int(query["limitBytes"])] if "limitBytes" in query else tail
        return (
            self._following(running, container, tail, lines, began) if query.get("follow") == "true" else iter([tail])
        )

    def _following(
        self, pod: RunningPod, container: str, tail: bytes, lines: list[bytes], began: int | None
    ) -> Iterator[bytes]:
        yield tail
        number, begun = len(lines), bool(lines) and not lines[-1].endswith(b"\n")
        with pod.log_path(container).open("rb") as log:
            log.seek(sum(map(len, lines)))
            while True:
                ended = pod.ended
                if chunk := log.read():
                    for line in _lines(chunk):
                        yield line if begun else _stamped(line, began, number)
                        number, begun = number + (not begun), not line.endswith(b"\n")
                elif ended or self._closing.wait(_TICK_SECONDS):
                    return

    def _patch(self, resource: str, found: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
        if resource == "jobs" and set(change.get("spec", {})) - {"suspend", "parallelism", "activeDeadlineSeconds"}:
            raise Refused(422, "Job is invalid: field is immutable")
        _merge(found, change)
        return self._changed(found)

    def _refuse_if_ordered(self, verb: str, resource: str) -> None:
        for refusal in self.refusals:
            if (refusal.verb, refusal.resource) == (verb, resource) and refusal.times > 0:
                refusal.times -= 1
                message = f'{resource} is forbidden: User "somebody" cannot do this'
                reason = "Conflict" if refusal.code == 409 else ""
                raise Refused(refusal.code, message, reason=reason, retry_after=refusal.retry_after)

    def _changed(self, found: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        return found

    # What the controllers do.

    def _control(self) -> None:
        while not self._closing.wait(_TICK_SECONDS):
            with self.lock:
                for (resource, _), found in list(self.objects.items()):
                    if resource == "jobs":
                        self._control_job(found)
                    elif resource == "pods":
                        self._control_pod(found)

    def _control_job(self, job: dict[str, Any]) -> None:
        uid = job["metadata"]["uid"]
        pods = [
            pod for (kind, _), pod in self.objects.items()
            if kind == "pods" and pod["metadata"]["ownerReferences"][0]["uid"] == uid
        ]  # fmt: skip
        for pod in advance_job(job, pods):
            self.create("pods", pod)
        if "deletionTimestamp" in job["metadata"]:
            for pod in pods:
                if "deletionTimestamp" not in pod["metadata"]:
                    self.delete("pods", pod["metadata"]["name"], {})
            if not pods:
                del self.objects["jobs", job["metadata"]["name"]]
                self._collect_garbage(uid)

    def _collect_garbage(self, owner: str) -> None:
        for (resource, name), found in list(self.objects.items()):
            if any(reference["uid"] == owner for reference in found["metadata"].get("ownerReferences", ())):
                self.delete(resource, name, {})

    def _control_pod(self, pod: dict[str, Any]) -> None:
        uid, status = pod["metadata"]["uid"], pod["status"]
        running = self.running.get(uid)
        if running is not None:
            running.look()
        if "deletionTimestamp" in pod["metadata"] and (running is None or running.ended) and can_go(pod, self.objects):
            self._remove_pod(pod)
        elif running is None:
            nodes = [node for (kind, _), node in self.objects.items() if kind == "nodes"]
            if len(self.running) >= self.pod_slots:
                nodes = []
            if place(pod, nodes, missing_images=self.missing_images) and (files := self._volumes(pod)) is not None:
                image = {"image_variables": self.image_variables, "entrypoint": self._entrypoint}
                running = RunningPod(pod, self.folder / uid, **image)
                for volume, content in files.items():
                    running.mount(volume, content)
                self.running[uid] = running
                running.start()
        elif status["phase"] == "Running":
            for volume, content in (self._volumes(pod) or {}).items():
                running.mount(volume, content)

    def _volumes(self, pod: dict[str, Any]) -> dict[str, dict[str, bytes]] | None:
        """Files by volume; None while one that is not optional is missing."""
        found: dict[str, dict[str, bytes]] = {}
        for volume in pod["spec"].get("volumes", ()):
            if secret := volume.get("secret"):
                source, optional = self.objects.get(("secrets", secret["secretName"])), False
            elif config_map := volume.get("configMap"):
                source = self.objects.get(("configmaps", config_map["name"]))
                optional = config_map.get("optional", False)
            else:
                continue
            if source is not None:
                found[volume["name"]] = volume_files(source)
            elif not optional:
                return None
        return found

    def _remove_pod(self, pod: dict[str, Any]) -> None:
        if (running := self.running.pop(pod["metadata"]["uid"], None)) is not None:
            running.remove()
        self.objects.pop(("pods", pod["metadata"]["name"]), None)

    def _write_kubeconfig(self) -> Path:
        server = f"http://127.0.0.1:{self._http.server_address[1]}"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": server}}],
            "users": [{"name": "somebody", "user": {"token": self._token}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "somebody"}}],
        }
        path = self.folder / "kubeconfig"
        path.write_text(yaml.safe_dump(content))
        return path


def _lines(content: bytes) -> list[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def _stamped(line: bytes, began: int | None, number: int) -> bytes:
    """A line behind its time, if that is wanted: one that follows from its place in the log, so that it stays."""
    if began is None:
        return line
    seconds, rest = divmod(began + number, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z ".encode() + line


def _matches(found: dict[str, Any], query: dict[str, str]) -> bool:
    tags = found["metadata"].get("labels", {})
    wanted = [part.partition("=") for part in query.get("labelSelector", "").split(",") if part]
    return all(tags.get(name) == value for name, _, value in wanted)


def _check_names(manifest: dict[str, Any]) -> None:
    metadata = manifest["metadata"]
    digit_first = manifest["kind"] == "Service" and not metadata["name"][0].isalpha()
    if not _NAME.fullmatch(metadata["name"]) or len(metadata["name"]) > 63 or digit_first:
        raise Refused(422, f"metadata.name: Invalid value: {metadata['name']!r}")
    for value in metadata.get("labels", {}).values():
        if len(value) > 63 or not re.fullmatch(r"([A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)?", value):
            raise Refused(422, f"metadata.labels: Invalid value: {value!r}")


def _merge(found: dict[str, Any], change: dict[str, Any]) -> None:
    for name, value in change.items():
        if isinstance(value, dict) and isinstance(found.get(name), dict):
            _merge(found[name], value)
        elif value is None:
            found.pop(name, None)
        else:
            found[name] = value
