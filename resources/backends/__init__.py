"""One module per backend that runs jobs."""
