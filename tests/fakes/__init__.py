"""Stand-ins that tests run instead of what they stand for."""
