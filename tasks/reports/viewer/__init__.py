"""Viewer of questions and answers behind published scores: data for a page, the page, and its server."""
