"""How many of torchrpc's calls are under way at a time."""

from __future__ import annotations

from typing import Any

import pytest
from torchrpc_links import rpc_conn

from mq.testing.link_world import World
from transports import _torchrpc_calls as calls
from transports import _torchrpc_net as net
from transports._torchrpc_conns import BATCH_BYTES, CALLS
from transports._torchrpc_control import Control
from transports.torchrpc import TorchRpcLink

BODY = memoryview(bytes(100_000))
FULL = BATCH_BYTES // len(BODY) + 1
"""Bodies of a batch that is closed."""


@pytest.mark.parametrize("is_near", [True, False])
def test_large_batches_leave_for_another_host_beside_any_number_of_calls(
    monkeypatch: pytest.MonkeyPatch, is_near: bool
) -> None:
    """A long wire holds more than a few; small ones wait, to be fewer."""
    monkeypatch.setattr(Control, "is_within_host", is_near)
    monkeypatch.setattr(net, "check_url", lambda *_: None)
    with World(TorchRpcLink) as world:
        dialled, accepted = world.connect()
        conn, theirs = rpc_conn(dialled), world.members[1].received
        under_way = [calls.Future[Any]() for _ in range(CALLS)]
        for future in under_way:
            conn._calls.add(future, 0)
        waiting = []
        for number in range(3 * FULL + 1):
            assert conn.try_send(b"%d" % number, BODY)
            waiting.append(len(conn._unsent))
        if is_near:
            assert waiting == [*range(1, 3 * FULL + 2)]
        else:
            assert waiting == [*range(1, FULL), 0] * 3 + [1]
            world.arrive(theirs.setdefault(accepted, []), 3 * FULL)
        for future in under_way:
            future.set_result(True)
        conn.notice()
        world.arrive(theirs.setdefault(accepted, []), 3 * FULL + 1)
        heads = [head for head, _ in theirs[accepted]]
        assert heads == [b"%d" % number for number in range(3 * FULL + 1)]
        assert conn._waiting == 0
