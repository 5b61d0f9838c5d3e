"""Requests to Prefect's server: its client, flow runs, progress and work pools."""
