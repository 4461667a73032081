"""What the application has let go of, or never had, keeps no memory in use."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mq
from mq.testing import STEP

MIB = 1 << 20

Pair = tuple[mq.MQ, mq.MQ]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A publisher with shared memory for one message, and who reads it in place."""
    group = f"letting-go-{os.getpid()}"
    with (
        mq.connect("shm", group=group, name="a", shm_bytes=MIB) as a,
        mq.connect("shm", group=group, name="b") as b,
    ):
        b.subscribe("t", zero_copy=True)
        yield a, b


def array_of(number: int, nbytes: int = MIB - 4096) -> np.ndarray[tuple[int], Any]:
    return np.full(nbytes, number, np.uint8)


def test_a_loop_over_the_queue_keeps_no_message(pair: Pair) -> None:
    """Neither in its body nor while it waits: its publisher might wait for that."""
    a, b = pair
    messages = iter(b)
    for number in range(3):
        a.publish("t", array_of(number), timeout=STEP)
        message = next(messages)
        view = weakref.ref(message.payload)
        assert message.payload[-1] == number
        del message
        assert view() is None


def test_an_asynchronous_loop_over_the_queue_keeps_none_either(pair: Pair) -> None:
    """It is a generator as well."""
    a, b = pair

    async def loop() -> None:
        messages = aiter(b)
        for number in range(3):
            await a.apublish("t", array_of(number), timeout=STEP)
            message = await anext(messages)
            view = weakref.ref(message.payload)
            assert message.payload[-1] == number
            del message
            assert view() is None

    asyncio.run(loop())
