"""A real Slurm on this machine: munged, slurmctld, 2 slurmds on ports of their own, nodes; optionally slurmdbd."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fakes.polling import eventually
from fakes.processes import end, free_port
from fakes.shared import shared
from faults.scenarios.processes import ancestors, command_line, variable_of
from resources.backends.slurm.client import SlurmClient
from resources.backends.slurm.slurm import Slurm

PARTITION = "main"
NODES = ("node-a", "node-b")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
_ACCOUNTING_PROGRAMS = ("slurmdbd", "sacct", "mariadbd", "mariadb-install-db")
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
MinJobAge={remembered_seconds}
SchedulerParameters=bf_interval=1,sched_min_interval=0
NodeName=node-a NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=32 RealMemory=512000 Gres=gpu:h100:2
NodeName=node-b NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=32 RealMemory=512000
PartitionName=main Nodes=node-a,node-b Default=YES PriorityTier=1
PartitionName=urgent Nodes=node-a,node-b PriorityTier=10 PreemptMode=OFF
"""
_WITH_ACCOUNTING = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge/socket
"""
_ACCOUNTING = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
"""
_REMEMBERED_SECONDS, _SOON_FORGOTTEN_SECONDS = 600, 10


def missing_programs() -> list[str]:
    return [name for name in _PROGRAMS if _program(name) is None]


def require_slurm() -> None:
    """Skips a test on a machine without Slurm's programs, and names the packages."""
    if missing := missing_programs():
        packages = "apt-get install slurmctld slurmd munge slurm-client"
        pytest.skip(f"no Slurm on this machine ({', '.join(missing)} missing; {packages})")


def require_accounting() -> None:
    """Skips a test on a machine without Slurm's accounting, and names the packages."""
    require_slurm()
    if missing := [name for name in _ACCOUNTING_PROGRAMS if _program(name) is None]:
        packages = "apt-get install slurmdbd mariadb-server"
        pytest.skip(f"no accounting of Slurm's on this machine ({', '.join(missing)} missing; {packages})")


@dataclass(frozen=True)
class SlurmCluster:
    folder: Path
    programs: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Running programs by name; a slurmd by the name of its node."""

    def client(
        self, folder: Path, *, partition: str = PARTITION, grace_seconds: float = 10.0, lease_seconds: float = 12.0
    ) -> SlurmClient:
        """Returns a client with short time-outs; its jobs lie in a folder of the test."""
        slurm = Slurm(partition, known_seconds=0.3)
        return SlurmClient(
            slurm, folder=folder, grace_seconds=grace_seconds, poll_seconds=0.3, lease_seconds=lease_seconds
        )

    def is_idle(self) -> bool:
        """Returns True once all nodes have registered; fails if a program of the cluster has ended."""
        for name, program in self.programs.items():
            assert program.poll() is None, f"{name} ended with {program.returncode}: see its log in {self.folder}"
        states = subprocess.run(["sinfo", "-h", "-o", "%T %D"], capture_output=True, text=True, check=False)
        return states.stdout == f"idle {len(NODES)}\n"

    def knows(self, slurm_id: str) -> bool:
        """Returns True until slurmctld has forgotten a job; it checks every 10 s."""
        return not subprocess.run(["scontrol", "show", "job", slurm_id], capture_output=True, check=False).returncode

    def has_set(self, slurm_id: str, setting: str) -> bool:
        """Sets a field of a job, such as StartTime=now; returns False if slurmctld refuses at this moment."""
        command = ("scontrol", "update", f"JobId={slurm_id}", setting)
        return not subprocess.run(command, capture_output=True, check=False).returncode

    def processes_on(self, node: str) -> list[int]:
        """Returns the slurmd of a node, the steps of jobs on it, and all their child processes."""
        pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
        configuration = str(self.folder / "slurm.conf")  # other tests have clusters with nodes of the same names
        mine = [pid for pid in pids if variable_of(pid, "SLURM_CONF") == configuration]
        tasks = [pid for pid in mine if variable_of(pid, "SLURMD_NODENAME") == node]
        steps = {pid for task in tasks for pid in ancestors(task) if "slurmstepd" in "".join(command_line(pid)[:1])}
        return [self.programs[node].pid, *steps, *tasks]

    def start_node(self, node: str) -> None:
        self.programs[node] = _started(self.folder, "slurmd", "-D", "-c", "-N", node)

    def command(self, *arguments: str) -> str:
        ended = subprocess.run(arguments, check=False, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout


def start_cluster(folder: Path, *, accounting: bool = False) -> Iterator[SlurmCluster]:
    """Starts a cluster of 2 idle nodes for the block. With `accounting`, slurmctld forgets jobs soon after their
    end.
    """
    for name in ("state", "munge", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    folder.chmod(0o755)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    for number in range(2):
        (folder / f"gpu{number}").symlink_to("/dev/null")  # slurmd requires a device, and checks only that it exists
    (folder / "gres.conf").write_text(f"NodeName=node-a Name=gpu Type=h100 File={folder}/gpu[0-1]\n")
    ports = [free_port() for _ in range(2 + len(NODES))]
    host, user = socket.gethostname().partition(".")[0], getpass.getuser()
    remembered_seconds = _SOON_FORGOTTEN_SECONDS if accounting else _REMEMBERED_SECONDS
    configuration = folder / "slurm.conf"
    configuration.write_text(
        _CONFIGURATION.format(host=host, ports=ports, folder=folder, user=user, remembered_seconds=remembered_seconds)
        + (_WITH_ACCOUNTING.format(folder=folder, port=ports[-1]) if accounting else "")
    )
    munge = folder / "munge"
    places = [f"--{name}={munge / name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    programs: dict[str, subprocess.Popen[bytes]] = {}
    cluster = SlurmCluster(folder, programs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(configuration))
        try:
            programs["munged"] = _started(folder, "munged", "--foreground", "--force", f"--key-file={key}", *places)
            eventually((munge / "socket").exists)
            if accounting:
                _start_accounting(folder, programs, _ACCOUNTING.format(folder=folder, port=ports[-1], user=user))
            programs["slurmctld"] = _started(folder, "slurmctld", "-D", "-c")
            for node in NODES:
                cluster.start_node(node)
            eventually(cluster.is_idle)
            yield cluster
        finally:
            subprocess.run(["scancel", "--full", "--signal=KILL", f"--user={os.getuid()}"], check=False)
            for process in reversed(programs.values()):
                end(process)


def _start_accounting(folder: Path, programs: dict[str, subprocess.Popen[bytes]], configuration: str) -> None:
    # the database listens on a socket in the folder only
    user = f"--user={getpass.getuser()}"
    database = folder / "database"
    install = ["mariadb-install-db", "--no-defaults", user, f"--datadir={database}", "--skip-test-db"]
    subprocess.run(
        [*install, "--auth-root-authentication-method=normal"], check=True, stdout=subprocess.DEVNULL, timeout=60
    )
    listening = folder / "database.socket"
    places = [f"--datadir={database}", f"--socket={listening}", f"--pid-file={folder}/database.pid"]
    quick = ["--skip-networking", "--innodb-flush-log-at-trx-commit=0"]
    programs["mariadbd"] = _started(folder, "mariadbd", "--no-defaults", user, *places, *quick)
    eventually(listening.exists)
    private = folder / "slurmdbd.conf"
    private.touch(mode=0o600)
    private.write_text(configuration)
    programs["slurmdbd"] = start_slurmdbd(folder)


def start_slurmdbd(folder: Path) -> subprocess.Popen[bytes]:
    process = _started(folder, "slurmdbd", "-D", MYSQL_UNIX_PORT=str(folder / "database.socket"))
    eventually(
        lambda: subprocess.run(["sacctmgr", "-n", "list", "cluster"], capture_output=True, check=False).returncode == 0
    )
    return process


def batch_pid(job_id: str) -> int:
    """Returns the process of a job's batch program on this machine."""
    programs = {int(folder.name): command_line(int(folder.name)) for folder in Path("/proc").glob("[0-9]*")}
    [pid] = [
        pid
        for pid, words in programs.items()
        if words[:1] == [sys.executable] and {"slurm_batch.py", job_id} <= {Path(word).name for word in words}
    ]
    return pid


def slurm_id(folder: Path, job_id: str) -> str:
    """Returns Slurm's number of a job of a client with that folder."""
    return (folder / "jobs" / job_id / "slurm_id").read_text()


@shared
def shared_slurm() -> Iterator[SlurmCluster]:
    with tempfile.TemporaryDirectory(prefix="assay-slurm-", ignore_cleanup_errors=True) as folder:
        yield from start_cluster(Path(folder))


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"]))


def _started(folder: Path, name: str, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    path = _program(name)
    assert path is not None
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [path, *arguments],
            cwd=folder,  # core dumps of crashes land in it
            env={**os.environ, **variables},
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
