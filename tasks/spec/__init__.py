"""What is to be evaluated, and how: configurations, suites, benchmarks, options and sinks, as data."""
