"""How much memory the receiver of large messages takes, that keeps none of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mq
from mq import registry
from mq.settings import memory_bytes
from mq.testing import Group

NBYTES = 640_000_000
MESSAGES = 5
SECONDS = 100.0
NEEDED = 8 * NBYTES
"""Free memory: both ends have two or three messages, `shm` another two."""


def publish(queue: mq.MQ) -> None:
    payload = np.ones(NBYTES, np.uint8)
    for number in range(MESSAGES):
        payload[-1] = number
        queue.publish("t", payload, timeout=SECONDS)
    queue.flush(SECONDS)


def receive(queue: mq.MQ) -> list[int]:
    """The last element of each message, of which none is kept."""
    return [int(queue.recv(SECONDS).payload[-1]) for _ in range(MESSAGES)]


def kept(path: str, field: str) -> int:
    """A size of /proc in bytes."""
    lines = Path(path).read_text().splitlines()
    return next(1024 * int(li.split()[1]) for li in lines if li.startswith(field + ":"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "field"),
    [
        ("zmq:ipc", "VmHWM"),
        ("zmq:tcp", "VmHWM"),
        ("tcp", "VmHWM"),
        ("shm", "RssAnon"),
    ],
)
def test_a_receiver_takes_less_than_three_messages(backend: str, field: str) -> None:
    """One that is read, one that arrives; over `shm` none but the receiver's copy.

    There the peak would count the publisher's memory, too, which both have mapped; so
    what is private is looked at again and again.
    """
    free = min(kept("/proc/meminfo", "MemAvailable"), memory_bytes())
    if free < NEEDED:
        pytest.skip(f"needs {NEEDED >> 20} MiB of memory, {free >> 20} are free")
    group = Group(backend, registry.capabilities(backend), {})
    try:
        a, b = group.members("a", "b")
        b.subscribe("t")
        sending, receiving = a.begin(publish), b.begin(receive)
        status, peak = f"/proc/{b.pid}/status", 0
        while not receiving.done(0.005):
            peak = max(peak, kept(status, field))
        peak = max(peak, kept(status, field))
        assert receiving.result() == list(range(MESSAGES))
        sending.result(SECONDS)
        group.close()
    finally:
        group.end()

    assert NBYTES < peak < 3 * NBYTES
