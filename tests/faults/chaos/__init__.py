"""A real evaluation of which each process is killed in turn; `make chaos`."""
