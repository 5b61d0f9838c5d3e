"""Specifications of evaluations: configurations, suites, benchmarks, options and sinks, as data."""
