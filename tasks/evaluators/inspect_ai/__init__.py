"""Inspect: tasks of the UK AI Security Institute's framework, run against an endpoint."""
