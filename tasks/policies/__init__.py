"""Policies: what a team wants of a run, what is left of it, and who does it."""
