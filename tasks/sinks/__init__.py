"""Sinks: destinations to publish results to, in addition to the records."""
