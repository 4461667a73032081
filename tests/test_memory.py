"""How calls take shared memory, or wait for it, while others go on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shared_memory import SlowSystem

import mq
from mq.mesh.lead import Lead
from mq.mesh.waiting import Waits

MIB = 1 << 20


def large(mebibytes: int) -> np.ndarray[Any, Any]:
    """An array that lies in a block of that size."""
    return np.zeros(mebibytes * MIB - 256, np.uint8)


def in_thread(call: Callable[[], object]) -> threading.Thread:
    """A thread that makes a call, already started."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_a_publish_that_waited_takes_new_memory_without_the_lock(
    slow: SlowSystem,
) -> None:
    """It may take seconds, for which nobody else could do anything with the queue."""
    options: dict[str, Any] = {"group": f"memory-{os.getpid()}", "shm_bytes": 4 * MIB}
    with mq.connect("shm", **options) as a, mq.connect("shm", **options) as b:
        b.subscribe("t", zero_copy=True)
        a.publish("t", large(3))
        held = [b.recv(30.0).payload]
        publishing = in_thread(lambda: a.publish("t", large(2), timeout=60.0))
        while not a.stats()["shared"][0]["waits"]:
            time.sleep(0.001)
        held.clear()
        assert slow.asked.acquire(timeout=60.0)
        asking = in_thread(a.stats)
        asking.join(10.0)
        assert not asking.is_alive()
        slow.go_on()
        assert len(b.recv(30.0).payload) == 2 * MIB - 256
        publishing.join(30.0)


def test_who_waits_for_memory_is_told_that_other_does_not_come(
    slow: SlowSystem,
) -> None:
    """Which counted while it was being taken."""
    options: dict[str, Any] = {"group": f"memory-{os.getpid()}", "shm_bytes": 4 * MIB}
    with mq.connect("shm", **options) as a:
        lender = a._driver.memory.lender
        assert lender is not None
        slow.error = KeyboardInterrupt
        slow.take(lender, 3 * MIB)
        assert lender.take(3 * MIB) is None
        told: list[bool] = []
        with a._lead.lock:
            a._lead._listeners.add(lambda: told.append(a._lead.lock.locked()))
        slow.go_on()
        assert told == [True]


@pytest.mark.parametrize("changes", [0, 1])
def test_who_waits_looks_again_at_what_changed_while_it_looked(
    monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    """It had no lock then, so that it could not be told."""
    mesh: Any = SimpleNamespace(
        changed=0, poll=lambda *ready, **options: None, next_deadline=lambda: 0.0
    )
    mesh.batch_deadline = mesh.next_deadline
    poller: Any = SimpleNamespace(wake=None, wake_fd=-1, register=None, unregister=None)
    lead = Lead(mesh, poller, "a queue")
    mesh.replaced = ""
    calls: list[str] = []

    def reached() -> bool:
        calls.append("look")
        mesh.changed += changes if len(calls) == 1 else 0
        return calls.count("look") == 2

    monkeypatch.setattr(lead, "sleep", lambda until: calls.append("sleep"))
    topic: Any = SimpleNamespace(name="t", stats=SimpleNamespace(blocked_seconds=0.0))
    with lead.lock:
        assert Waits(lead).wait_for(topic, reached, list, str, None)
    assert calls == (["look", "look"] if changes else ["look", "sleep", "look"])
