"""Inspect: tasks of the UK AI Security Institute's framework, asked of an endpoint."""
