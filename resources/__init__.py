"""Requests for compute, and the clients that get it. Plain Python, no Prefect."""
