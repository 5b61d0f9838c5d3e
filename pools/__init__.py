"""Replicas of one model family behind one OpenAI-compatible endpoint. Plain Python, no Prefect."""
