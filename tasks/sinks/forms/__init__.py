"""Records in external formats: Every Eval Ever, and leaderboards of the Hugging Face hub."""
