"""Runs a real Iris cluster on this machine: controller, autoscaler and workers in a single process, jobs as processes.

Reads commands from standard input and ends with it: `restart` stops the controller and starts another on the same port
and database, `stop` and `start` do half of that, `lose <worker>` marks a machine as lost; it answers each with a line,
`ready`. The cluster marks a machine as lost after the first attempt that failed before it was seen running; Iris does
so after the tenth.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path


def main(port: int) -> None:
    """Runs a cluster with machines that have room for many jobs, and 2 simulated TPU slices of 4 small machines."""
    from datetime import timedelta

    gc.disable()  # a fifth of the time of these imports
    sys.modules["kubernetes"] = None  # pyright: ignore[reportArgumentType]; another fifth, and Iris does without
    from iris.cluster.backends.local.cluster import LocalCluster, make_local_cluster_config
    from iris.cluster.controller import service, worker_health
    from iris.cluster.types import WorkerId
    from iris.rpc import config_pb2

    gc.freeze()
    gc.enable()

    service.FRESHNESS_WINDOW = timedelta(days=36500)  # it refuses clients built over 14 days ago
    worker_health.WorkerHealthTracker.__init__.__kwdefaults__["build_threshold"] = 1  # pyright: ignore
    config = make_local_cluster_config(2)
    config.controller.local.port = port
    config.storage.remote_state_dir = f"file://{Path.home()}/state"  # else deleted with the first controller
    machine = config.scale_groups["local-cpu"].resources
    machine.cpu_millicores, machine.memory_bytes, machine.disk_bytes = 900_000, 900 * 2**30, 90 * 2**40
    slices = config.scale_groups["local-tpu"]
    slices.name, slices.num_vms, slices.max_slices = "local-tpu", 4, 2
    kind = config_pb2.ACCELERATOR_TYPE_TPU, "v5litepod-16"
    slices.resources.device_type, slices.resources.device_variant = kind
    slices.slice_template.accelerator_type, slices.slice_template.accelerator_variant = kind
    slices.resources.device_count, slices.resources.cpu_millicores = 4, 100_000
    slices.resources.memory_bytes, slices.resources.disk_bytes = 256 * 2**30, 2**40
    cluster = LocalCluster(config)
    for line in sys.stdin:
        if line.strip() in {"stop", "restart"}:
            cluster.stop()
        if line.strip() in {"start", "restart"}:
            cluster.start()
        if line.startswith("lose ") and (controller := cluster._controller):
            controller.request_worker_eviction([WorkerId(line.split()[1])])
        print("ready", flush=True)
    cluster.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
