"""Behaviour of a pool when something goes wrong under load, and what its clients see of it."""
