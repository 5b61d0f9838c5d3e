"""Retried and observed Prefect steps that flows chain; evaluators; records."""
