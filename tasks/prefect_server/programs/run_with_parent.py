"""Runs a Python module, and ends it when the parent process ends for any reason.

    python run_with_parent.py MODULE [ARGUMENT ...]

The parent holds standard input open. Needs the standard library only.
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
    gc.set_threshold(200_000)  # otherwise a fifth of the server's start is garbage collection of its imports
    threading.Thread(target=_watch, daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
