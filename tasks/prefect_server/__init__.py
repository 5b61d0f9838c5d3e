"""What Prefect's server is asked and told."""
