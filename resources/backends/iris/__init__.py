"""The Iris backend."""
