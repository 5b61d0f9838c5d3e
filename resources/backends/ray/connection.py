"""This process's connection to a Ray cluster, and calls to controllers that end in time even if the cluster dies."""

from __future__ import annotations

import atexit
import logging
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from resources.backends.ray.orders import DETACHED, NAMESPACE, classify_ray
from resources.errors import AssayError, BackendUnavailable
from resources.jobs.addresses import is_loopback
from resources.jobs.packaging import own_code
from resources.settings import set_process_environment_defaults

_ANSWER_POLL_SECONDS = 3.0
_PROBE_SECONDS = 3.0
_CONNECTING_TRIES = 3
_LEAVING_SECONDS = 5.0
_ANSWER_SECONDS = 90.0  # a controller starts in 2 s, on two busy cores in 30 s
_NOT_WITH_THE_HEAD = {"RAY_gcs_rpc_server_reconnect_timeout_s": "31536000"}
"""Without it Ray kills this process, without unwinding, when the head has been unreachable for 60 s."""
_HEAD = {"node:__internal_head__": 0.001}
_MANY = 100_000  # maximum of concurrent calls to a controller; most of them wait in its loop


class ControllerGone(BackendUnavailable):
    """The controller of a job has ended, and its jobs with it."""


class RayConnection:
    """A connected driver with its handles on controllers; `address` is as in `RayClient`."""

    def __init__(self, ray: Any, address: str) -> None:
        self._ray = ray
        self._asked = address
        self._own: Any = None
        self._lock = threading.Lock()
        self._through_client = address.startswith("ray://")
        self._is_replaced = False
        self._connect()

    def is_open(self) -> bool:
        """Returns True if this process still has the connection that it made."""
        return self._ray.is_initialized() and self._context_key() == self._key

    def is_replaced(self) -> bool:
        """Returns True if another cluster now answers at the address: its head was restarted, and the jobs are gone.

        Ray itself keeps calling the old cluster, and kills the process after some answers of the new cluster.
        """
        if not (self._is_replaced or self._through_client):
            with suppress(BackendUnavailable, self._ray.exceptions.RpcError):
                _probe(self.address, self._asked)  # fails fast: the next line would retry for 40 s
                self._is_replaced = self._id_of_cluster() != self._cluster_id
        return self._is_replaced

    def is_on(self, addresses: list[str]) -> bool:
        """Returns True if `addresses` consists of the address of this machine."""
        return not self._through_client and addresses == [self._ray.util.get_node_ip_address()]

    def own_controller(self) -> Any:
        """Returns the controller for jobs that end with this process; starts it on first use."""
        with self._lock:
            if self._own is None:
                self._own = self._controller(f"controller-{self._key[1]}", lifetime=None)
            return self._own

    def detached_controller(self) -> Any:
        """Returns the controller for jobs that outlive their drivers, shared by drivers with equal code of Assay."""
        return self._controller(f"{DETACHED}-{own_code().digest[:12]}", lifetime="detached")

    def forget_own_controller(self) -> None:
        """Drops the handle, so that the next use starts a new controller."""
        with self._lock:
            self._own = None

    def controllers(self, *, detached_only: bool = False) -> list[Any]:
        """Returns all controllers of the cluster, this process's own first."""
        self._probe()
        with _reported(self._ray, self._asked):
            actors = self._ray.util.list_named_actors(all_namespaces=True)
        names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
        prefix = DETACHED if detached_only else "controller-"
        controllers = []
        for name in sorted(names, key=lambda name: name != f"controller-{self._key[1]}"):
            with suppress(ValueError):  # it has ended since the listing
                if name.startswith(prefix):
                    controllers.append(self._ray.get_actor(name, namespace=NAMESPACE))
        return controllers

    def ask(self, controller: Any, method: str, **arguments: Any) -> Any:
        """Calls a method of a controller and returns its answer; waits 90 s, plus `seconds` if that is an argument.

        Raises `ControllerGone` if the controller has ended, and what the method raises for users.
        """
        reference: Any = None
        deadline = time.monotonic() + _ANSWER_SECONDS + arguments.get("seconds", 0.0)
        while True:
            try:
                if self._is_replaced:
                    raise self._gone("the head was restarted")
                if reference is None:
                    reference = controller.call.remote(method, pickle.dumps(arguments))
                answer = pickle.loads(self._ray.get(reference, timeout=_ANSWER_POLL_SECONDS))
                break
            except self._ray.exceptions.GetTimeoutError as error:
                self._probe()
                if time.monotonic() > deadline:
                    raise unavailable(self._asked, "its controller does not answer") from error
            except self._ray.exceptions.ActorUnavailableError as error:  # lost connection: the controller may be alive
                self._probe()
                if time.monotonic() > deadline:
                    raise unavailable(self._asked, str(error)) from error
                reference = None
                time.sleep(0.2)
            except self._ray.exceptions.ActorDiedError as error:
                self._probe()
                raise self._gone(_first_line(error)) from error
            except (ConnectionError, RuntimeError, self._ray.exceptions.RayError) as error:
                raise unavailable(self._asked, f"{classify_ray(error)[1]}"[:500]) from error
        if isinstance(answer, AssayError):
            raise answer
        return answer

    def _controller(self, name: str, *, lifetime: str | None) -> Any:
        from resources.backends.ray import workers as ray_workers

        self._probe()
        self._ray.cloudpickle.register_pickle_by_value(ray_workers)
        code = own_code()
        with _reported(self._ray, self._asked):
            return (
                self._ray.remote(ray_workers.ControllerShell)
                .options(
                    name=name,
                    namespace=NAMESPACE,
                    lifetime=lifetime,
                    get_if_exists=True,
                    num_cpus=0,
                    resources=_HEAD,
                    max_concurrency=_MANY,
                    max_restarts=0,
                )
                .remote(code.digest, code.content)
            )

    def _connect(self) -> None:
        if not self._ray.is_initialized():
            bootstrap_address = self._bootstrap_address()
            _probe(bootstrap_address, self._asked)  # fails fast: ray.init would retry for minutes
            # A head with a user's token requires it; `ray.init` only sends it to clusters that it discovers itself.
            if self._through_client and is_loopback(_host(bootstrap_address)):
                self._ray._private.worker.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
            set_process_environment_defaults(_NOT_WITH_THE_HEAD)
            with _sigterm_kept(), _reported(self._ray, self._asked):
                self._init()
        self._through_client = self._ray.util.client.ray.is_connected()
        if self._through_client:
            _leave_in_time(self._ray)
        context = self._ray.get_runtime_context()
        self.address: str = context.gcs_address
        """Address of the cluster for processes inside it."""
        self._cluster_id = None if self._through_client else self._id_of_cluster()
        self._key = self._context_key()

    def _id_of_cluster(self) -> Any:
        return self._ray._raylet.GcsClient(self.address).cluster_id

    def _init(self) -> None:
        for left in reversed(range(_CONNECTING_TRIES)):
            try:
                self._ray.init(
                    address=self._asked, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
                )
                return
            except ConnectionAbortedError:  # the Ray Client server starts a process per client, which may die
                if left == 0:
                    raise
                self._ray.shutdown()

    def _bootstrap_address(self) -> str:
        address = self._asked
        if address == "auto":
            with _reported(self._ray, address):
                address = self._ray._private.services.get_ray_address_from_environment(address, None)
        if address.startswith("ray://"):
            return address.removeprefix("ray://")
        return self._ray._private.services.canonicalize_bootstrap_address(address)

    def _context_key(self) -> tuple[str, str]:
        context = self._ray.get_runtime_context()
        return context.gcs_address, context.get_job_id()

    def _probe(self) -> None:
        if not self._ray.is_initialized():
            raise unavailable(self._asked, "this process is not connected to it any more")
        _probe(self._asked.removeprefix("ray://") if self._through_client else self.address, self._asked)
        if self.is_replaced():
            raise self._gone("the head was restarted")

    def _gone(self, reason: str) -> ControllerGone:
        return ControllerGone(
            expected="the controller of the job, an actor on the head of the Ray cluster",
            found=f"it has ended, and its jobs with it: {reason}",
            remedy="Submit the job again.",
        )


def unavailable(address: str, problem: str) -> BackendUnavailable:
    """Returns the error for an unusable cluster."""
    return BackendUnavailable(
        expected=f"a Ray cluster at {address}, of the same version as ours",
        found=problem,
        remedy="Look with `ray status` whether it is up, and correct the address. "
        "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN where it requires a token.",
    )


def _probe(host_and_port: str, asked: str) -> None:
    try:
        port = int(host_and_port.rpartition(":")[2])
        socket.create_connection((_host(host_and_port), port), timeout=_PROBE_SECONDS).close()
    except (OSError, ValueError) as error:
        raise unavailable(asked, f"nothing answers at {host_and_port}: {error}") from error


@contextmanager
def _reported(ray: Any, address: str) -> Iterator[None]:
    try:
        yield
    except AssayError:
        raise
    except (ConnectionError, RuntimeError, TimeoutError, ray.exceptions.RayError) as error:
        raise unavailable(address, f"{type(error).__name__}: {_first_line(error)}") from error


@cache
def _leave_in_time(ray: Any) -> None:
    ending = threading.Event()

    def leave() -> None:
        ending.wait()
        ray.shutdown()

    leaving = threading.Thread(target=leave, name="leave-ray", daemon=True)  # no thread can be started at exit
    leaving.start()

    def at_the_end() -> None:
        ending.set()
        leaving.join(_LEAVING_SECONDS)
        if leaving.is_alive():
            atexit.unregister(ray._private.worker.shutdown)

    atexit.register(at_the_end)  # registered after Ray's own handler, so called before it


def _host(host_and_port: str) -> str:
    return host_and_port.rpartition(":")[0].strip("[]")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
