"""Compares transports with the bare library and with the hardware's limits."""
