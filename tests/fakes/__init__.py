"""Fake services and programs for tests."""
