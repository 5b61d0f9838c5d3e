"""Access to a namespace of a Kubernetes cluster; the only module that imports the `kubernetes` package."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import kubernetes
import urllib3
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from resources.errors import BackendUnavailable

Resource = Literal["jobs", "jobsets", "pods", "configmaps", "secrets", "services", "nodes", "localqueues"]

_CORE = "api/v1"
_GROUPS: dict[Resource, tuple[str, ...]] = {
    "jobs": ("apis/batch/v1",),
    "jobsets": ("apis/jobset.x-k8s.io/v1alpha2",),
    "localqueues": ("apis/kueue.x-k8s.io/v1beta2", "apis/kueue.x-k8s.io/v1beta1"),
}
"""API versions for resources outside the core group, preferred first."""

_CONNECT_SECONDS, _READ_SECONDS = 10.0, 60.0
_PATIENCE_SECONDS = 120.0  # an upgrade takes a zonal control plane down for minutes, a regional control plane never
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 8.0
_PAGE = 500
_LATER = {429, 500, 502, 503, 504}


class Cluster:
    """A namespace of a cluster, as JSON: a missing object is None, and creating an existing object has no effect.

    Requests that the server temporarily rejects (429 and 503, after their `Retry-After`; 409 on a write conflict) or
    that do not reach it are retried for two minutes.
    """

    def __init__(
        self, api: kubernetes.client.ApiClient, namespace: str, *, patience_seconds: float = _PATIENCE_SECONDS
    ) -> None:
        self._api = api
        self._patience_seconds = patience_seconds
        self.namespace = namespace

    def get(self, resource: Resource, name: str) -> dict[str, Any] | None:
        return self._json("GET", resource, name)

    def list(self, resource: Resource, selector: str = "") -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        query = {"limit": str(_PAGE), **({"labelSelector": selector} if selector else {})}
        while True:
            page = self._json("GET", resource, query=query) or {}
            items += page.get("items", [])
            if not (more := page.get("metadata", {}).get("continue")):
                return items
            query = {**query, "continue": more}

    def serves(self, resource: Resource) -> bool:
        """Returns True if the cluster has this kind of object: some are extensions of Kubernetes."""
        return self._json("GET", resource, query={"limit": "1"}) is not None

    def create(self, resource: Resource, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Creates an object and returns it; an existing object of that name is taken as the same and returned."""
        made = self._json("POST", resource, body=manifest)
        return made or self.get(resource, manifest["metadata"]["name"]) or dict(manifest)

    def patch(self, resource: Resource, name: str, change: Mapping[str, Any]) -> dict[str, Any] | None:
        """Merges `change` into an object and returns it; None if it does not exist."""
        return self._json("PATCH", resource, name, body=change)

    def delete(self, resource: Resource, name: str, *, grace_seconds: int | None = None) -> None:
        """Deletes an object with all dependents; returns before they are gone."""
        options: dict[str, Any] = {"propagationPolicy": "Foreground"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        self._json("DELETE", resource, name, body=options)

    def log(self, pod: str, container: str, *, since: str | None = None, max_lines: int | None = None) -> str | None:
        """Returns a container's lines so far, each after its time; None if it has not started, or its pod is gone.

        Only lines since a time (RFC 3339, whole seconds), and only the last `max_lines`.
        """
        chosen = {"sinceTime": since, "tailLines": max_lines}
        query = {name: str(value) for name, value in chosen.items() if value is not None}
        query |= {"container": container, "timestamps": "true"}
        answer = self._request("GET", "pods", f"{pod}/log", query=query, absent={400, 404})
        return None if answer is None else answer.data.decode(errors="replace")

    def follow_log(self, pod: str, container: str, *, max_lines: int, connected: threading.Event) -> Iterator[bytes]:
        """Yields a container's last lines, then new output until it ends; each line is prefixed with its time.

        Yields nothing if it has not started. Sets `connected` when the server has begun to answer.
        """
        query = {"container": container, "tailLines": str(max_lines), "follow": "true", "timestamps": "true"}
        answer = self._request("GET", "pods", f"{pod}/log", query=query, absent={400, 404}, stream=True)
        connected.set()
        if answer is None:
            return
        try:
            while chunk := answer.read1(64 * 1024):
                yield chunk
        except urllib3.exceptions.HTTPError as error:
            raise self._unavailable("GET", "pods", f"{pod}/log", str(error), status=None) from error
        finally:
            answer.close()

    def _json(
        self,
        verb: str,
        resource: Resource,
        name: str = "",
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        absent = {409} if verb == "POST" else {404}
        for group in _GROUPS.get(resource, (_CORE,)):
            answer = self._request(verb, resource, name, group=group, query=query, body=body, absent=absent)
            if answer is not None:
                return json.loads(answer.data)
        return None

    def _request(
        self,
        verb: str,
        resource: Resource,
        name: str,
        *,
        absent: set[int],
        group: str = _CORE,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        stream: bool = False,
    ) -> Any:
        inside = "" if resource == "nodes" else f"/namespaces/{self.namespace}"
        path = f"/{group}{inside}/{resource}" + (f"/{name}" if name else "")
        kind = "application/merge-patch+json" if verb == "PATCH" else "application/json"
        deadline, pause = time.monotonic() + self._patience_seconds, _FIRST_RETRY_SECONDS
        while True:
            retry_after = 0.0
            try:
                response: Any = self._api.call_api(
                    path,
                    verb,
                    query_params=list((query or {}).items()),
                    header_params={"Accept": "application/json, */*", "Content-Type": kind},
                    body=dict(body) if body else None,
                    auth_settings=["BearerToken"],
                    _preload_content=False,
                    _request_timeout=(_CONNECT_SECONDS, None if stream else _READ_SECONDS),
                )
                answer = response[0]  # a response of urllib3, because of `_preload_content=False`
                if not stream:
                    answer.read(cache_content=True)
                return answer
            except ApiException as error:
                conflict = _field_of(error, "reason") == "Conflict"  # also for quotas: their counters have many writers
                if error.status in absent and not conflict:
                    return None
                problem = f"{error.status} {_field_of(error, 'message') or error.reason}"
                if error.status not in _LATER and not conflict:
                    raise self._unavailable(verb, resource, name, problem, status=error.status) from error
                retry_after = _seconds(error)
            except urllib3.exceptions.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            wait = max(pause, retry_after)
            if time.monotonic() + wait > deadline:
                raise self._unavailable(verb, resource, name, problem, status=None)
            time.sleep(wait)
            pause = min(pause * 2, _LAST_RETRY_SECONDS)

    def _unavailable(
        self, verb: str, resource: Resource, name: str, problem: str, *, status: int | None
    ) -> BackendUnavailable:
        right = {"POST": "create", "GET": "get" if name else "list"}.get(verb, verb.lower())
        target = f"pods/{name.rpartition('/')[2]}" if name.endswith("/log") else resource
        remedies = {
            401: "Log in to the cluster again, such as with `gcloud container clusters get-credentials`.",
            403: f"Ask an administrator to grant the verb {right!r} on {target!r} in the namespace {self.namespace}.",
            422: "The cluster may be older than Kubernetes 1.29, which jobs need; or a policy there forbids this.",
            None: "See whether the cluster is up and can be reached from here, and try again.",
        }
        return BackendUnavailable(
            expected=f"the cluster {self._api.configuration.host} to let us {right} {target} {name}".rstrip(),
            found=problem,
            remedy=remedies.get(status, "Mend what the server names."),
        )


def connect(context: str, namespace: str) -> Cluster:
    """Connects to a namespace (empty: `default`) of a cluster.

    `context` is a context of the kubeconfig; empty means the cluster of this process's pod, else the current context.
    """
    configuration = kubernetes.client.Configuration()
    try:
        if context:
            kubernetes.config.load_kube_config(context=context, client_configuration=configuration)
        else:
            try:
                kubernetes.config.load_incluster_config(client_configuration=configuration)
            except ConfigException:
                kubernetes.config.load_kube_config(client_configuration=configuration)
    except ConfigException as error:
        raise BackendUnavailable(
            expected=f"a context {context!r} in the kubeconfig" if context else "a cluster around us, or a kubeconfig",
            found=str(error),
            remedy="See `kubectl config get-contexts`, and name a context: ASSAY_JOBS=kubernetes://context/namespace.",
        ) from error
    configuration.retries = False  # pyright: ignore[reportAttributeAccessIssue]  # `Cluster` retries by its own rules
    configuration.connection_pool_maxsize = 32  # logs of all pods of an attempt are followed at once
    return Cluster(kubernetes.client.ApiClient(configuration), namespace or "default")


def _field_of(error: ApiException, field: str) -> str:
    try:
        return str(json.loads(error.body or "")[field])
    except (ValueError, KeyError, TypeError):
        return ""


def _seconds(error: ApiException) -> float:
    try:
        return float((error.headers or {}).get("Retry-After", 0))
    except ValueError:  # a date; API servers send seconds
        return 0.0
