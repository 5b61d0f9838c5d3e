"""Trains a language model with Levanter. Executed by the interpreter of the levanter environment.

    python run_levanter_train.py <job file>

The job file, in the working directory, holds `train_config`, the configuration of `levanter.main.train_lm`; `trained`,
a file in any store that is written after the training, or null; and `digest`, which is recorded in it. A configuration
that Levanter cannot read is reported in `refused.json`. The training ends when standard input is closed.
"""

# ruff: noqa: E402 - what is imported arranges things for the exit, which are to come before ours

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

EXIT_CODE = [1]  # of an exception or of `refusals_into`


def end_without_teardown() -> None:
    """Ends this process without the interpreter's teardown. Teardown stops threads while they hold locks: a progress
    bar's close waited for the lock of logging, and a failed training never ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE[0])


if __name__ == "__main__":
    atexit.register(end_without_teardown)  # registered first, so called last

gc.disable()  # until all is imported: collection takes a fifth of the time and finds no garbage
sys.path.append(str(Path(__file__).parents[2] / "evaluators" / "programs"))  # for `refusals`
import draccus
import fsspec
import jax
from fray import LocalClient
from fray.current_client import set_current_client
from levanter.main import train_lm
from refusals import Refused, refusals_into

gc.freeze()
gc.enable()

LONGEST_REASON = 2000


def main(arguments: list[str]) -> None:
    """Trains."""
    end_with_parent()
    job = json.loads(Path(arguments[0]).read_text())
    config = read(job["train_config"])
    # By default caches are built by further jobs of an Iris cluster, which lack this environment.
    with set_current_client(LocalClient()):
        train_lm.main(config)
    if job["trained"] and jax.process_index() == 0:
        done = {"run_id": config.trainer.id, "steps": config.trainer.num_train_steps, "digest": job["digest"]}
        opened: Any = fsspec.open(job["trained"], "w")
        with opened as file:
            json.dump(done, file)


def read(content: dict[str, Any]) -> train_lm.TrainLmConfig:
    """Returns the configuration, parsed as by Levanter's own command."""
    try:
        return draccus.decode(train_lm.TrainLmConfig, content)
    except Exception as error:
        with refusals_into(Path()):
            raise Refused(
                expected="a configuration that Levanter's train_lm reads",
                found=f"{type(error).__name__}: {error}"[:LONGEST_REASON],
                remedy="Correct train_config",
            ) from error


def end_with_parent() -> None:
    """Ends this process as soon as its parent has ended for any reason."""
    if sys.stdin is None or sys.stdin.isatty():
        return

    def watch() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])
    EXIT_CODE[0] = 0
