"""Backends that run jobs: a folder each, chosen by the name in a setting."""
