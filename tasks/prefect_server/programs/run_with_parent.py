"""Runs a Python module, and ends with the process that started it, whatever that died of.

    python run_with_parent.py MODULE [ARGUMENT ...]

Standard input is held open by that process. Needs the standard library only.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
import threading
import time

_GRACE_SECONDS = 10.0


def _watch() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    gc.set_threshold(200_000)  # a fifth of the server's start goes to looking for garbage among what it imports
    threading.Thread(target=_watch, daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
