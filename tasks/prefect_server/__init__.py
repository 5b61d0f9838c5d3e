"""Prefect server: client, flow runs, progress and work pools."""
