"""Claims: which run evaluates which cell."""
