"""The pipelines, readable like the README; and the `assay` command."""
