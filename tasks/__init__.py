"""The retried, observed Prefect steps that flows chain; evaluators; records."""
