"""Sinks: where results are announced, beside the records themselves."""
