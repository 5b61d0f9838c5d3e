"""Engines: supported kinds, starting them, and requests to running engines."""
