"""Discovery, ordering and selection of a run's checkpoints."""
