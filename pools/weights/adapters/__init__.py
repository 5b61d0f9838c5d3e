"""Adapters as PEFT writes them: their base, and the tensors of it that they change."""
