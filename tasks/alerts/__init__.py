"""Drops of scores that neither questions nor training explain, and what people say of them."""
