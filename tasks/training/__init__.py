"""Trainings by Levanter as jobs, and the cells that arrive from them."""
