"""Kills each process of a real evaluation in turn; `make chaos`."""
