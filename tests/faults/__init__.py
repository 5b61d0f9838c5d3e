"""What can go wrong under a pool, tried on the deterministic engine, or on real ones by `make faults`."""
