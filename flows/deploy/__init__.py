"""Deployments of flows and policies, and the watcher that reports complete checkpoints."""
