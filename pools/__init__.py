"""Replicas of a model family behind a single OpenAI-compatible endpoint. Plain Python, no Prefect."""
