"""Faults of a pool, tried on the deterministic engine, or on real engines by `make faults`."""
