"""Evaluation jobs: a YAML file, rendered to manifests for GKE, run in a container or locally."""
