"""Evaluation jobs: one YAML file, rendered to manifests for GKE, run in a container or here."""
