"""The two demos."""
