"""One replica: its agent, its engine server, and the ingress of a proxy elsewhere."""
