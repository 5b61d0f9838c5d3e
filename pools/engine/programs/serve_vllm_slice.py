"""A host's part of vLLM on a TPU slice of several VMs. Executed by the vLLM environment of each VM.

    python serve_vllm_slice.py <hosts> <rank> <address of host 0> <port of host 0> <own address> <chips> [<arguments>]

tpu-inference reaches further hosts by Ray, and takes every TPU of the Ray cluster that it finds. So the slice gets its
own Ray cluster, separate from a cluster that may run its jobs: each host is a node of it, and on host 0, once all nodes
have joined, vLLM serves.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

_START_SECONDS = 600.0
_POLL_SECONDS = 0.2
_ENDING_SECONDS = 5.0  # of the ten seconds that a job has by default
_RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats")


def main(arguments: list[str]) -> None:
    """Runs a node of the slice's Ray cluster, and on host 0 also the server."""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # the default handler would leave the folder
    hosts, rank, head, port, own, chips, *served = arguments
    address = f"[{head}]:{port}" if ":" in head else f"{head}:{port}"
    if rank == "0":
        place = ["--head", f"--port={port}", "--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
    else:
        place = [f"--address={address}"]
        wait_for_port(head, int(port))
    with tempfile.TemporaryDirectory(prefix="assay-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        # The folder's path is short, since sockets in it have limited names.
        node = [f"--node-ip-address={own}", f"--resources={json.dumps({'TPU': float(chips)})}", f"--temp-dir={folder}"]
        ray_process = subprocess.Popen([*_RAY, *place, *node])
        try:
            if rank != "0":
                sys.exit(ray_process.wait())
            wait_for_nodes(int(hosts), address, ray_process)
            os.environ["RAY_ADDRESS"] = address
            sys.argv = ["vllm", *served]
            runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
        finally:
            end(ray_process)


def end(ray_process: subprocess.Popen[bytes]) -> None:
    """Ends a Ray node and its children before its folder is deleted."""
    ray_process.terminate()
    try:
        ray_process.wait(_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        ray_process.kill()


def free_port() -> int:
    """Returns a free port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def wait_for_port(host: str, port: int) -> None:
    """Returns once the port accepts connections; ends the process after a time limit."""
    while not _is_late():
        try:
            return socket.create_connection((host, port), _POLL_SECONDS).close()
        except OSError:
            time.sleep(_POLL_SECONDS)
    sys.exit(f"RuntimeError: host 0 of the slice does not listen at {host}:{port}")


def wait_for_nodes(hosts: int, address: str, ray_process: subprocess.Popen[bytes]) -> None:
    """Returns once the Ray cluster has this number of nodes with TPUs; ends the process after a time limit."""
    ray: Any = importlib.import_module("ray")
    nodes = 0
    while not _is_late() and ray_process.poll() is None:
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False)
            nodes = sum(node["Alive"] and node["Resources"].get("TPU", 0) > 0 for node in ray.nodes())
        except (ConnectionError, RuntimeError, TimeoutError, ValueError):  # it is still starting
            nodes = 0
        if nodes == hosts:
            return ray.shutdown()
        time.sleep(_POLL_SECONDS)
    sys.exit(f"RuntimeError: {nodes} of {hosts} hosts of the slice have come")


def _is_late(began: float = time.monotonic()) -> bool:
    return time.monotonic() - began > _START_SECONDS


if __name__ == "__main__":
    main(sys.argv[1:])
