"""Commands about the places that evaluations run in: clusters of regions, and work pools of Prefect."""
