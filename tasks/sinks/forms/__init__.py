"""Records in the forms of others: Every Eval Ever, and leaderboards of the Hugging Face hub."""
