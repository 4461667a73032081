"""The transports: one file a backend, loaded by `mq.registry` when asked for."""
