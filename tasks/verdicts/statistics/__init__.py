"""Intervals and tests that are valid for few, clustered or weighted questions, and for ratios of sums."""
