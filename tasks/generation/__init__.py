"""Bulk generation: workers send sharded prompts to a pool, and write each shard's answers once."""
