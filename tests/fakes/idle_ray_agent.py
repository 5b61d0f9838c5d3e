"""Replaces an unused agent of a Ray node by a script that reports itself alive and ends with the node.

An agent for the dashboard uses more processor time for imports and metrics than a small job, and an agent for runtime
environments imports as much as a worker. A node needs of an agent only its ports and its heartbeat.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

NODE = os.getppid()
FOLDER = Path(next(argument.partition("=")[2] for argument in sys.argv if argument.startswith("--session-dir=")))
NOTHING_THERE = 9
"""A port, for nodes that require a port."""
PORTS = {
    "agent.py": {"metrics_agent_port": -1, "metrics_export_port": -1, "dashboard_agent_listen_port": -1},
    "main.py": {"runtime_env_agent_port": NOTHING_THERE},
}
"""Agent types by the script of the real agent."""

for name, port in PORTS[Path(sys.argv[1]).name].items():
    new = FOLDER / f"new_{name}_{os.environ['RAY_NODE_ID']}"
    new.write_text(str(port))
    new.rename(FOLDER / f"{name}_{os.environ['RAY_NODE_ID']}")
while os.getppid() == NODE:
    time.sleep(0.5)
