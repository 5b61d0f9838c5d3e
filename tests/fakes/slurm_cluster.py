"""A real Slurm of this machine: munged, slurmctld, and two slurmds on ports of their own, each a node."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fakes.polling import eventually
from fakes.processes import end, free_port
from fakes.shared import shared
from resources.backends.slurm.client import SlurmClient
from resources.backends.slurm.slurm import Slurm

PARTITION = "main"
NODES = ("node-a", "node-b")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
_CONFIGURATION = """
ClusterName=assay
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
ReturnToService=2
KillWait=10
MinJobAge=600
SchedulerParameters=bf_interval=1,sched_min_interval=0
NodeName=node-a NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=32 RealMemory=512000 Gres=gpu:h100:2
NodeName=node-b NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=32 RealMemory=512000
PartitionName=main Nodes=node-a,node-b Default=YES PriorityTier=1
PartitionName=urgent Nodes=node-a,node-b PriorityTier=10 PreemptMode=OFF
"""


def missing_programs() -> list[str]:
    """Programs of Slurm's that this machine lacks."""
    return [name for name in _PROGRAMS if _program(name) is None]


def require_slurm() -> None:
    """Skips a test on a machine without Slurm's programs, and says what to install."""
    if missing := missing_programs():
        packages = "apt-get install slurmctld slurmd munge slurm-client"
        pytest.skip(f"no Slurm on this machine ({', '.join(missing)} missing; {packages})")


@dataclass(frozen=True)
class SlurmCluster:
    """A running cluster."""

    folder: Path

    def client(
        self, folder: Path, *, partition: str = PARTITION, grace_seconds: float = 10.0, lease_seconds: float = 12.0
    ) -> SlurmClient:
        """A client with little patience, whose jobs lie in a folder of the test's."""
        slurm = Slurm(partition, known_seconds=0.3)
        return SlurmClient(
            slurm, folder=folder, grace_seconds=grace_seconds, poll_seconds=0.3, lease_seconds=lease_seconds
        )

    def command(self, *arguments: str) -> str:
        """Runs one of Slurm's commands as a user would."""
        return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout


def start_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """A cluster whose two nodes are idle; all of its programs end with the block."""
    for name in ("state", "munge", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    folder.chmod(0o755)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    for number in range(2):
        (folder / f"gpu{number}").symlink_to("/dev/null")  # slurmd wants a device, and looks at no more
    (folder / "gres.conf").write_text(f"NodeName=node-a Name=gpu Type=h100 File={folder}/gpu[0-1]\n")
    ports = [free_port() for _ in range(1 + len(NODES))]
    host = socket.gethostname().partition(".")[0]
    configuration = folder / "slurm.conf"
    configuration.write_text(_CONFIGURATION.format(host=host, ports=ports, folder=folder, user=getpass.getuser()))
    munge = folder / "munge"
    places = [f"--{name}={munge / name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(configuration)
    cluster = SlurmCluster(folder)
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.append(_started(folder, "munged", "--foreground", "--force", f"--key-file={key}", *places))
        eventually((munge / "socket").exists)
        started.append(_started(folder, "slurmctld", "-D", "-c"))
        started += [_started(folder, "slurmd", "-D", "-c", "-N", node) for node in NODES]
        eventually(lambda: cluster.command("sinfo", "-h", "-o", "%T %D") == f"idle {len(NODES)}\n")
        yield cluster
    finally:
        subprocess.run(["scancel", "--full", "--signal=KILL", f"--user={os.getuid()}"], check=False)
        for process in reversed(started):
            end(process)
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before


@shared
def shared_slurm() -> Iterator[SlurmCluster]:
    """The cluster of this test process."""
    with tempfile.TemporaryDirectory(prefix="assay-slurm-", ignore_cleanup_errors=True) as folder:
        yield from start_cluster(Path(folder))


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"]))


def _started(folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    path = _program(name)
    assert path is not None
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen([path, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0)
