"""Messages that are read behind their writer, where not everybody can do that."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pytest

import mq
from mq.mesh.publisher import Publisher

DEADLINE = 30.0


def test_a_message_is_written_first_for_who_joined_and_only_views(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory was taken when all subscribers still copied it behind its writer."""
    monkeypatch.setattr("mq.mesh.publisher.cores", lambda: 8)
    monkeypatch.setattr("mq.mesh.publishing._most_followed_bytes", lambda: 1 << 24)
    group = f"followed-{os.getpid()}"
    payload = np.ones(1 << 20, np.uint8)
    written: list[bool] = []
    with (
        mq.connect("shm", group=group, name="a") as a,
        mq.connect("shm", group=group, name="b") as b,
        mq.connect("shm", group=group, name="c") as c,
    ):
        b.subscribe("t", timeout=DEADLINE)
        take, publish = a._driver.memory.take_in_turn, Publisher.publish

        def take_and_join(*arguments: Any) -> Any:
            found = take(*arguments)
            assert found[0] is not None
            assert found[0].counter is not None
            c.subscribe("t", zero_copy=True, timeout=DEADLINE)
            return found

        def look(publisher: Publisher, *arguments: Any) -> Any:
            block = arguments[-1]
            there = int.from_bytes(block.counter, sys.byteorder)
            written.append(there == len(block.area))
            return publish(publisher, *arguments)

        monkeypatch.setattr(a._driver.memory, "take_in_turn", take_and_join)
        monkeypatch.setattr(Publisher, "publish", look)
        a.publish("t", payload, timeout=DEADLINE)
        for queue in (b, c):
            assert queue.recv(DEADLINE).payload.all()
    assert written == [True]
