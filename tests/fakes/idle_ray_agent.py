"""Stands in for an agent of a Ray node that nobody asks for anything: a script that says so, and ends with the node.

An agent for the dashboard imports and measures for more processor time than a small job takes, and one for runtime
environments imports as much as a worker. Of a real agent, a node needs to be told the ports, and that it is alive.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

NODE = os.getppid()
FOLDER = Path(next(argument.partition("=")[2] for argument in sys.argv if argument.startswith("--session-dir=")))
NOTHING_THERE = 9
"""A port, where a node wants to be told one."""
PORTS = {
    "agent.py": {"metrics_agent_port": -1, "metrics_export_port": -1, "dashboard_agent_listen_port": -1},
    "main.py": {"runtime_env_agent_port": NOTHING_THERE},
}
"""By the script of the real agent."""

for name, port in PORTS[Path(sys.argv[1]).name].items():
    new = FOLDER / f"new_{name}_{os.environ['RAY_NODE_ID']}"
    new.write_text(str(port))
    new.rename(FOLDER / f"{name}_{os.environ['RAY_NODE_ID']}")
while os.getppid() == NODE:
    time.sleep(0.5)
