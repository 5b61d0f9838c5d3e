"""lm-eval."""
