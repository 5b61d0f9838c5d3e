"""Drops of scores beyond the noise of questions and training, and their acknowledgements."""
