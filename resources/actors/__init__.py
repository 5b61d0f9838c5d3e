"""Actors: objects that live in a process of a job. Built on jobs; nothing below knows them."""
