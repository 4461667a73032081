"""The transports: one public module a backend, loaded by `mq.registry` when asked for.

Modules whose names begin with `_` and a backend's are parts of that one.
"""
