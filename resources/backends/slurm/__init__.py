"""The backend of Slurm clusters: a job is a batch job that starts its replicas with srun."""
