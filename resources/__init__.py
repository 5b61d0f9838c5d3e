"""Compute requests, and clients of the backends that provide compute. Plain Python, no Prefect."""
