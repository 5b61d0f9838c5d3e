"""Variables that Ray reads when it is imported; import this before anything that imports ray."""

from __future__ import annotations

import os

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # to find a Ray on 127.0.0.1
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # else the server for Ray Client sometimes dies as it forks
os.environ.setdefault("RAY_worker_niceness", "0")  # else 15: on a busy machine tests would wait for all other processes
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # else a worker for every CPU, of which few are used
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else depends on a token in the home folder
