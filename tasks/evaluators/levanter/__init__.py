"""Evaluation by Levanter, which loads the checkpoint itself."""
