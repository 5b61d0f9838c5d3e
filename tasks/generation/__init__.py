"""Bulk generation: prompts in shards, asked of a pool by workers, and written once."""
