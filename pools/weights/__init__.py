"""Checkpoints as files: what a folder holds, its digests, and local copies of it."""
