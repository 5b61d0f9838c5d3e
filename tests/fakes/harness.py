"""A harness program with a selectable behaviour: `python harness.py <behaviour> <output folder>`.

Needs the standard library only. Writes its findings into `results.json`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(behaviour: str, output: Path) -> int:
    print(f"asked 1/2 with key {os.environ.get('OPENAI_API_KEY')}", flush=True)
    match behaviour:
        case "succeed":
            (output / "no_proxy.txt").write_text(os.environ.get("no_proxy", ""))
            counts = {"requested": 2, "answered": 2, "scored": 2}
        case "look_around":
            (output / "variables.json").write_text(json.dumps(sorted(os.environ)))
            counts = {"requested": 2, "answered": 2, "scored": 2}
        case "answer_fewer":
            counts = {"requested": 2, "answered": 1, "scored": 1}
        case "fail":
            print("the reason it gives", file=sys.stderr)
            return 3
        case "refuse":
            refusal = f"no right to ask with {os.environ.get('OPENAI_API_KEY')}"
            texts = {"expected": "something else", "found": refusal, "remedy": "ask differently"}
            (output / "refused.json").write_text(json.dumps({"kind": "UnknownBenchmark", **texts}))
            return 1
        case "refuse_in_latin_1":
            (output / "refused.json").write_bytes('{"kind": "UnknownBenchmark", "found": "caf\xe9"}'.encode("latin-1"))
            return 1
        case "refuse_at_length":
            texts = {"expected": "a", "found": "b" * (1 << 21), "remedy": "c"}
            (output / "refused.json").write_text(json.dumps({"kind": "UnknownBenchmark", **texts}))
            return 1
        case "print_garbage":
            sys.stdout.buffer.write(bytes(range(256)) * 100)
            (output / "results.json").write_bytes(b"\xff{")
            return 0
        case "hang":
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            (output / "pids").write_text(f"{os.getpid()} {child.pid}")
            time.sleep(600)
            return 0
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
            return 0
        case _:
            return 64
    Path("here").touch()  # in the working folder
    (output / "results.json").write_text(json.dumps(counts))
    print("asked 2/2", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
