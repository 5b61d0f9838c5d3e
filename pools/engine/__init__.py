"""Engines: which there are, how one is started, and how a running one is talked to."""
