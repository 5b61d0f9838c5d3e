"""Contamination: flags per question, imported or found in training texts, and scores with and without them."""
