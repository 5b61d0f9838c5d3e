"""HELM."""
