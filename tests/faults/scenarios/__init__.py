"""Faults of a pool under load, and their effects on clients."""
