"""Checkpoints as files: inspection, digests, and local copies."""
