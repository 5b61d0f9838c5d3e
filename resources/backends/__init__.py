"""Backends that run jobs, each in its own folder; a setting selects by name."""
