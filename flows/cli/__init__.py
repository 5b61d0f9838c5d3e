"""The `assay` command: a file for each group of its commands."""
