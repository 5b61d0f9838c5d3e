"""A replica: its agent, its engine server, and the ingress for a remote proxy."""
