"""The entry to the Slurm backend: a client for a partition."""

from __future__ import annotations

from resources.backends.slurm.client import SlurmClient
from resources.backends.slurm.slurm import Slurm
from resources.errors import BadInput


def client_from_address(host: str, path: str, **options: str) -> SlurmClient:
    """Returns the client of a partition.

    Args:
        host: the partition; the cluster's default one when empty.
        path: empty.
        options: of `sbatch`, such as account and time.
    """
    if path.strip("/"):
        raise BadInput(expected="slurm://partition", found=f"slurm://{host}{path}", remedy="Correct ASSAY_JOBS.")
    return SlurmClient(Slurm(host, options=options))
