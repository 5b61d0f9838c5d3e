"""The journal: a store of answered requests, so that engines answer no request twice without need.

`keys` decides which requests are the same, `store` is the interface for the proxy.
"""
