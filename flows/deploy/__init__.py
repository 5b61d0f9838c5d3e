"""Deployments of flows and policies, and the watcher that says when a checkpoint is complete."""
