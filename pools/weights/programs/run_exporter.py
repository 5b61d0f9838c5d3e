"""Runs the exporter of a training framework, a module, by an interpreter that has it.

A job is a line of JSON on stdin; the program ends when stdin does. It writes lines of JSON: `bytes`, written into the
folder `target` since the last line. All that the module prints goes to stderr.
"""

import json
import os
import runpy
import sys
import threading
import time
from pathlib import Path

REPORT_SECONDS = 2.0


def end_with_parent() -> None:
    """Ends this process when its stdin ends."""
    while os.read(0, 1):  # sys.stdin has a buffer with a lock, which the interpreter takes when it ends
        pass
    os._exit(1)


def report(target: Path, out: int) -> None:
    """Writes how many bytes were written into a folder since the last line, again and again."""
    before = 0
    while True:
        time.sleep(REPORT_SECONDS)
        written = sum(path.stat().st_size for path in target.glob("*"))
        os.write(out, f"{json.dumps({'bytes': max(0, written - before)})}\n".encode())
        before = max(before, written)


def main() -> None:
    """Does the job on stdin."""
    job = json.loads(sys.stdin.readline())
    out = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=end_with_parent, daemon=True).start()
    threading.Thread(target=report, args=(Path(job["target"]), out), daemon=True).start()
    sys.argv = [job["module"], *job["arguments"]]
    runpy.run_module(job["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
