"""The harnesses Assay drives: each a pure pair of `command` and `parse`."""
