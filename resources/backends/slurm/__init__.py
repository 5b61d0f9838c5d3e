"""Slurm backend: a job is a batch job that starts its replicas with srun."""
