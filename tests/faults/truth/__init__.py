"""Lies: answers with status 200 that are not the model's answer to the request, and their effect on evaluations."""
