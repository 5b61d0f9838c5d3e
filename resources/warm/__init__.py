"""Programs that are imported once and forked for every run."""
