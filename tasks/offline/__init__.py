"""Data for workers without a network: what is wanted, fetched, shared."""
