"""Faults that can occur under a pool, tried on the deterministic engine, or on real ones by `make faults`."""
