"""Commands about the machines of evaluations: clusters of regions, and work pools of Prefect."""
