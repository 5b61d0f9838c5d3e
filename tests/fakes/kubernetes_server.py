"""Fake of a Kubernetes API server with its controllers, for the real `kubernetes` client over real HTTP.

Every manifest is checked strictly against the published schemas. It has Jobs and JobSets with their controllers, Kueue
queues with admission by the test, pods that run as processes of this machine, logs, deletion with grace and
propagation, owners and their garbage collection, and a scheduler for labels. Tests can inject refusals.
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
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from fakes.kubernetes_controller import advance_job, advance_jobset, can_go, headless_service, new_pod_status, place
from fakes.kubernetes_http import Refused, handler_of
from fakes.kubernetes_kubelet import RunningPod, now, volume_files
from fakes.kubernetes_schemas import ValidationError, validate

KINDS = {
    "jobs": "Job", "pods": "Pod", "configmaps": "ConfigMap", "secrets": "Secret", "services": "Service",
    "nodes": "Node", "jobsets": "JobSet", "localqueues": "LocalQueue",
}  # fmt: skip
RESOURCES = {kind: resource for resource, kind in KINDS.items()}
_GROUPS = {"jobs": "batch", "jobsets": "jobset.x-k8s.io", "localqueues": "kueue.x-k8s.io"}
_PATH = re.compile(
    r"/(?:api/v1|apis/(batch|jobset\.x-k8s\.io|kueue\.x-k8s\.io)/(?:v1|v1alpha2|v1beta1))"
    r"(?:/namespaces/([\w-]+))?/(\w+)(?:/([\w.-]+))?(?:/(log))?"
)
QUEUE = "kueue.x-k8s.io/queue-name"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_VERSION = "1.34"
_LARGEST_BYTES = 1 << 20
_TICK_SECONDS = 0.04


@dataclass
class Refusal:
    verb: str
    resource: str
    code: int
    times: int = 1
    retry_after: float | None = None


class KubernetesServer:
    """A cluster of a single node or of the given nodes, in a folder; images have `entrypoint` and `variables`."""

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
        self.installed = {"jobset.x-k8s.io", "kueue.x-k8s.io"}
        self.pod_slots = 1000
        self.refusals: list[Refusal] = []
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
        """Variables of every container: a PATH with this interpreter, this repository, and access to the cluster."""
        path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])
        root = Path(__file__).parents[2]
        place = {"HOME": str(self.folder), "PYTHONPATH": str(root), "KUBECONFIG": str(self.kubeconfig)}
        return {"PATH": path, **place, **self._variables}

    # Actions of tests.

    def pods(self, job_id: str) -> list[dict[str, Any]]:
        with self.lock:
            return [
                pod for (kind, _), pod in self.objects.items()
                if kind == "pods" and pod["metadata"]["labels"].get("assay-evals/job") == job_id
            ]  # fmt: skip

    def evict(self, pod: dict[str, Any], reason: str = "EvictionByEvictionAPI") -> None:
        """Evicts a pod as a drained node or a reclaimed Spot node does: a condition first, then a graceful deletion."""
        with self.lock:
            pod["status"].setdefault("conditions", []).append(
                {"type": "DisruptionTarget", "status": "True", "reason": reason, "lastTransitionTime": now()}
            )
        self.delete("pods", pod["metadata"]["name"], {})

    def run_out_of_memory(self, pod: dict[str, Any]) -> None:
        with self.lock:
            self.running[pod["metadata"]["uid"]].kill("OOMKilled")

    def lose_node_of(self, pod: dict[str, Any]) -> None:
        """Loses a node without notice: its pods are removed by force, and their outcome is unknown."""
        self.delete("pods", pod["metadata"]["name"], {"gracePeriodSeconds": 0})

    def add_queue(self, name: str) -> None:
        self.objects["localqueues", name] = {"kind": "LocalQueue", "metadata": {"name": name}}

    def admit(self, job_id: str) -> None:
        self._queued(job_id)["spec"]["suspend"] = False

    def take_back(self, job_id: str) -> None:
        """Suspends a running attempt, as Kueue does for a workload of higher priority."""
        self._queued(job_id)["spec"]["suspend"] = True

    def _queued(self, job_id: str) -> dict[str, Any]:
        with self.lock:
            return next(
                item for (_, name), item in self.objects.items()
                if job_id in name and QUEUE in item["metadata"].get("labels", {})
            )  # fmt: skip

    # The API.

    def handle(self, verb: str, path: str, token: str, body: dict[str, Any] | None) -> Any:
        parts = urlsplit(path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if token != f"Bearer {self._token}":
            raise Refused(401, "Unauthorized")
        match = _PATH.fullmatch(parts.path)
        if match is None or _GROUPS.get(match[3]) != match[1] or match[1] not in {None, "batch", *self.installed}:
            raise Refused(404, f"the server could not find the requested resource {parts.path}")
        _, _, resource, name, log = match.groups()
        with self.lock:
            self._refuse_if_ordered(verb, f"{resource}/log" if log else resource)
            if log:
                return self.log(name, query)
            if verb == "GET" and not name:
                items = [item for (kind, _), item in self.objects.items() if kind == resource and _matches(item, query)]
                return {"kind": f"{KINDS[resource]}List", "items": items, "metadata": {}}
            if verb == "POST":
                return self.create(resource, body or {})
            if (item := self.objects.get((resource, name or ""))) is None:
                raise Refused(404, f'{resource} "{name}" not found')
            if verb == "PATCH":
                return self._patch(resource, item, body or {})
            if verb == "DELETE":
                self.delete(resource, name or "", body or {})
            return item

    def create(self, resource: str, manifest: dict[str, Any]) -> dict[str, Any]:
        try:
            validate(manifest, _VERSION)
        except ValidationError as error:
            raise Refused(422, f"{manifest.get('kind')} is invalid: {list(error.path)}: {error.message}") from None
        name = manifest["metadata"]["name"]
        _check_names(manifest)
        if sum(len(text) for text in manifest.get("data", {}).values()) > _LARGEST_BYTES * 4 / 3:
            raise Refused(422, f"{name}: Too long: must have at most {_LARGEST_BYTES} bytes")
        if (resource, name) in self.objects:
            raise Refused(409, f'{resource} "{name}" already exists', reason="AlreadyExists")
        for owner in manifest["metadata"].get("ownerReferences", ()):
            parent = self.objects.get((RESOURCES[owner["kind"]], owner["name"]), {})
            if parent.get("metadata", {}).get("uid") != owner["uid"]:
                return manifest  # the garbage collector would delete it at once
        self.manifests.append(json.loads(json.dumps(manifest)))
        manifest["metadata"] |= {"uid": secrets.token_hex(8), "creationTimestamp": now(), "namespace": "default"}
        if resource == "pods":
            manifest["status"] = new_pod_status()
        self.objects[resource, name] = manifest
        return self._changed(manifest)

    def delete(self, resource: str, name: str, options: dict[str, Any]) -> None:
        with self.lock:
            item = self.objects[resource, name]
            if resource not in {"jobs", "jobsets", "pods"}:
                del self.objects[resource, name]
                return
            item["metadata"].setdefault("deletionTimestamp", now())
            if resource == "pods":
                given = options.get("gracePeriodSeconds")
                grace = item["spec"].get("terminationGracePeriodSeconds", 30) if given is None else given
                pod = self.running.get(item["metadata"]["uid"])
                if grace == 0:
                    self._remove_pod(item)
                elif pod is not None and not pod.ended:
                    pod.terminate(grace)
            self._changed(item)

    def log(self, name: str, query: dict[str, str]) -> Iterator[bytes]:
        pod = self.objects.get(("pods", name))
        if pod is None:
            raise Refused(404, f'pods "{name}" not found')
        running, container = self.running.get(pod["metadata"]["uid"]), query.get("container", "")
        if running is None or not running.has_started(container):
            raise Refused(400, f'container "{container}" in pod "{name}" is waiting to start: ContainerCreating')
        lines = _lines(running.log_path(container).read_bytes())
        began = running.began[container] if query.get("timestamps") == "true" else None
        stamped = [_stamped(line, began, number) for number, line in enumerate(lines)]
        if since := query.get("sinceTime"):
            stamped = [line for line in stamped if line.decode(errors="replace") >= since.removesuffix("Z")]
        tail = b"".join(stamped[-int(query["tailLines"]) :] if "tailLines" in query else stamped)
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

    def _patch(self, resource: str, item: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
        if resource == "jobs" and set(change.get("spec", {})) - {"suspend", "parallelism", "activeDeadlineSeconds"}:
            raise Refused(422, "Job is invalid: field is immutable")
        if QUEUE in item["metadata"].get("labels", {}) and "suspend" in change.get("spec", {}):
            raise Refused(403, "only Kueue suspends and resumes queued jobs")
        _merge(item, change)
        return self._changed(item)

    def _refuse_if_ordered(self, verb: str, resource: str) -> None:
        for refusal in self.refusals:
            if (refusal.verb, refusal.resource) == (verb, resource) and refusal.times > 0:
                refusal.times -= 1
                message = f'{resource} is forbidden: User "tester" cannot do this'
                reason = "Conflict" if refusal.code == 409 else ""
                raise Refused(refusal.code, message, reason=reason, retry_after=refusal.retry_after)

    def _changed(self, item: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        return item

    # The controllers.

    def _control(self) -> None:
        while not self._closing.wait(_TICK_SECONDS):
            with self.lock:
                for (resource, _), item in list(self.objects.items()):
                    if resource == "jobs":
                        self._control_job(item)
                    elif resource == "jobsets":
                        self._control_jobset(item)
                    elif resource == "pods":
                        self._control_pod(item)

    def _control_job(self, job: dict[str, Any]) -> None:
        pods = self._owned("pods", job)
        for pod in advance_job(job, pods):
            self.create("pods", pod)
        suspended = job["spec"].get("suspend") and not job["status"].get("conditions")
        if suspended or "deletionTimestamp" in job["metadata"]:
            self._delete_all("pods", pods)
        self._remove_if_deleted("jobs", job, rest=pods)

    def _control_jobset(self, jobset: dict[str, Any]) -> None:
        jobs = self._owned("jobs", jobset)
        missing, unwanted = advance_jobset(jobset, jobs)
        if ("services", jobset["metadata"]["name"]) not in self.objects and "deletionTimestamp" not in jobset[
            "metadata"
        ]:
            self.create("services", headless_service(jobset))
        for job in missing:
            self.create("jobs", job)
        deleted = "deletionTimestamp" in jobset["metadata"]
        self._delete_all("jobs", [job for job in jobs if deleted or job["metadata"]["name"] in unwanted])
        self._remove_if_deleted("jobsets", jobset, rest=jobs)

    def _owned(self, resource: str, parent: dict[str, Any]) -> list[dict[str, Any]]:
        uid = parent["metadata"]["uid"]
        return [
            item for (kind, _), item in self.objects.items()
            if kind == resource and any(owner["uid"] == uid for owner in item["metadata"].get("ownerReferences", ()))
        ]  # fmt: skip

    def _delete_all(self, resource: str, items: list[dict[str, Any]]) -> None:
        for each in items:
            if "deletionTimestamp" not in each["metadata"]:
                self.delete(resource, each["metadata"]["name"], {})

    def _remove_if_deleted(self, resource: str, item: dict[str, Any], *, rest: list[dict[str, Any]]) -> None:
        if "deletionTimestamp" in item["metadata"] and not rest:
            del self.objects[resource, item["metadata"]["name"]]
            self._collect_garbage(item["metadata"]["uid"])

    def _collect_garbage(self, owner: str) -> None:
        for (resource, name), item in list(self.objects.items()):
            if any(reference["uid"] == owner for reference in item["metadata"].get("ownerReferences", ())):
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
        # None while a required volume is missing
        files: dict[str, dict[str, bytes]] = {}
        for volume in pod["spec"].get("volumes", ()):
            if secret := volume.get("secret"):
                source, optional = self.objects.get(("secrets", secret["secretName"])), False
            elif config_map := volume.get("configMap"):
                source = self.objects.get(("configmaps", config_map["name"]))
                optional = config_map.get("optional", False)
                if source is not None and (
                    chosen := {item["key"]: item["path"] for item in config_map.get("items", ())}
                ):
                    data = {path: source["data"][key] for key, path in chosen.items() if key in source["data"]}
                    source = {**source, "data": data}
            else:
                continue
            if source is not None:
                files[volume["name"]] = volume_files(source)
            elif not optional:
                return None
        return files

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
            "users": [{"name": "tester", "user": {"token": self._token}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "tester"}}],
        }
        path = self.folder / "kubeconfig"
        path.write_text(yaml.safe_dump(content))
        return path


def _lines(content: bytes) -> list[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def _stamped(line: bytes, began: int | None, number: int) -> bytes:
    # the time follows from the position in the log, so that it stays the same
    if began is None:
        return line
    seconds, rest = divmod(began + number, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z ".encode() + line


def _matches(item: dict[str, Any], query: dict[str, str]) -> bool:
    tags = item["metadata"].get("labels", {})
    selectors = [part.partition("=") for part in query.get("labelSelector", "").split(",") if part]
    return all(tags.get(name) == value for name, _, value in selectors)


def _check_names(manifest: dict[str, Any]) -> None:
    metadata = manifest["metadata"]
    digit_first = manifest["kind"] == "Service" and not metadata["name"][0].isalpha()
    if not _NAME.fullmatch(metadata["name"]) or len(metadata["name"]) > 63 or digit_first:
        raise Refused(422, f"metadata.name: Invalid value: {metadata['name']!r}")
    for value in metadata.get("labels", {}).values():
        if len(value) > 63 or not re.fullmatch(r"([A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)?", value):
            raise Refused(422, f"metadata.labels: Invalid value: {value!r}")


def _merge(target: dict[str, Any], change: dict[str, Any]) -> None:
    for name, value in change.items():
        if isinstance(value, dict) and isinstance(target.get(name), dict):
            _merge(target[name], value)
        elif value is None:
            target.pop(name, None)
        else:
            target[name] = value
