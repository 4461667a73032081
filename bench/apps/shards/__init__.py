"""A model in two processes: staged through host memory, direct, and on bare RPC."""
