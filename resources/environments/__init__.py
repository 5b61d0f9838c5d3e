"""Environments built by uv from the pinned lists beside this file."""
