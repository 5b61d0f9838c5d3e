"""Plans a run of a repository on the hub, with a branch for each checkpoint, served by a fake hub on this machine.

    make bench NAME=plan_hub
    python tests/benchmarks/plan_hub.py [--revisions 300] [--delay-ms 50]

Measures seconds and requests until every checkpoint has a name, a verdict and a digest: on a machine that has not seen
the repository, in the next process, and with a new branch. For comparison, the hub's own file system lists the files
of each branch, without digests. Each answer is delayed, as by a network.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.side_by_side import Comparison

from fakes.hub import FakeHub, forget_hub, running_hub, use_hub
from fakes.models import write_nano_llama
from fakes.tokenizers import write_byte_tokenizer
from resources.settings import settings
from tasks.checkpoints.run_snapshot import snapshot_run, with_digests

RUN = "acme/series"


def serve(pipe: Connection, folder: Path, revisions: int, delay_ms: float) -> None:
    """Runs the fake hub; answers each message with the requests since the last, after adding a branch if it says so."""
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    weights = files["model.safetensors"]

    def revision(number: int) -> dict[str, bytes]:
        return {**files, "model.safetensors": weights[:-4] + number.to_bytes(4, "little")}

    branches = {f"step{number * 1000}-tokens{number}B": revision(number) for number in range(1, revisions + 1)}
    with running_hub({}, {f"models/{RUN}": {"main": revision(revisions), **branches}}) as hub:
        hub.delay_seconds = delay_ms / 1000
        pipe.send(hub.url)
        while (message := pipe.recv()) is not None:
            if message:
                hub.revisions[f"models/{RUN}"][message] = revision(2 * revisions)
            pipe.send((len(hub.requests), hub.large_bytes))
            hub.requests.clear()
            hub.large_bytes = 0


def timed(pipe: Connection, action: Callable[[], Any]) -> dict[str, float]:
    """Returns the seconds of an action in a new process's state, its requests, and the bytes of weights it read."""
    forget_hub()
    pipe.send("")
    pipe.recv()
    began = time.perf_counter()
    action()
    seconds = time.perf_counter() - began
    pipe.send("")
    requests, large_bytes = pipe.recv()
    return {"seconds": round(seconds, 2), "requests": requests, "bytes_of_weights": large_bytes}


def planned(revisions: int) -> None:
    """Finds and digests every checkpoint."""
    seen = with_digests(f"hf://{RUN}", snapshot_run(f"hf://{RUN}"), reference=None)
    assert len({each.digest for each in seen if each.complete}) == revisions, [each.problems for each in seen[:2]]


def listed_by_client() -> None:
    """Lists each branch with the client's own file system."""
    from huggingface_hub import HfApi, HfFileSystem

    files = HfFileSystem(skip_instance_cache=True)
    for branch in HfApi().list_repo_refs(RUN).branches:
        assert files.find(f"{RUN}@{branch.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--revisions", type=int, default=300)
    parser.add_argument("--delay-ms", type=float, default=50)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        root = Path(scratch)
        folder = write_byte_tokenizer(write_nano_llama(root / "model"))
        patch.setenv("ASSAY_CACHE_DIR", str(root / "cache"))
        settings.cache_clear()
        ours, theirs = context.Pipe()
        arguments = (theirs, folder, options.revisions, options.delay_ms)
        process = context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        use_hub(FakeHub({}, url=ours.recv()), patch, home=root / "hf")
        client = timed(ours, listed_by_client)
        figures = {"cold": timed(ours, lambda: planned(options.revisions))}
        figures["unchanged"] = timed(ours, lambda: planned(options.revisions))
        ours.send("step9999000-tokens9999B")
        ours.recv()
        figures["new_branch"] = timed(ours, lambda: planned(options.revisions + 1))
        ours.send(None)
        process.join(30)
    settings.cache_clear()
    for name, spent in figures.items():
        facts = {"revisions": options.revisions, "delay_ms": options.delay_ms, "spent": spent, "client": client}
        title = f"plan_hub.{name}"
        print(Comparison(title, "s", spent["seconds"], client["seconds"], better="less", facts=facts).as_json())


if __name__ == "__main__":
    main()
