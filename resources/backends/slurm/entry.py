"""Entry point of the Slurm backend."""

from __future__ import annotations

from resources.backends.slurm.client import SlurmClient
from resources.backends.slurm.slurm import Slurm
from resources.errors import BadInput


def client_from_address(host: str, path: str, **options: str) -> SlurmClient:
    """Returns the client of the partition `host` (empty: the cluster's default); `options` are options of `sbatch`."""
    if path.strip("/"):
        raise BadInput(expected="slurm://partition", found=f"slurm://{host}{path}", remedy="Correct ASSAY_JOBS.")
    return SlurmClient(Slurm(host, options=options))
