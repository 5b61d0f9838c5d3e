"""Checkpoints of a run: found, ordered, chosen."""
