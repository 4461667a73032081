"""The cases, one module for each part of the contract; importing them fills `CASES`."""

from mq.testing.suite import (  # isort: skip  (the order of the contract)
    delivery,
    credit,
    latest,
    payloads,
    sharing,
    membership,
    addresses,
    program,
    faults,
    lifetime,
    calls,
    waits,
    interrupts,
    handlers,
    edges,
)

__all__ = [
    "delivery",
    "credit",
    "latest",
    "payloads",
    "sharing",
    "membership",
    "addresses",
    "program",
    "faults",
    "lifetime",
    "calls",
    "waits",
    "interrupts",
    "handlers",
    "edges",
]
