"""Policies: evaluations requested for runs, the cells that are missing, and their dispatch."""
