"""Actors: objects that live in a process of a job. Built on jobs; jobs and backends do not depend on actors."""
