"""Environments that uv builds from the pinned lists in this folder."""
