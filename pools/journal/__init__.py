"""The journal: a store of answered requests, so that no request is answered by an engine twice without need.

`keys` says which requests are the same, `store` is what the proxy calls.
"""
