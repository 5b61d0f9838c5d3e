"""The pool's proxy: a process that routes requests to replicas byte for byte, and holds them while none is ready.

`python -m pools.proxy` runs it; `client` is the pool's client for it.
"""
