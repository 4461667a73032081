"""Signs of life beside a call that takes long.

TensorPipe tells nobody of a part of a tensor, so over a slow wire a large one would
pass for silence. But the kernel counts what the peer's has acknowledged: as long as
that grows, the sender says so over the socket beside the connection. It does so, too,
as long as a GPU has yet to fill such a tensor: all behind it waits for that.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from mq.stream.sockets import acked_bytes, connected
from transports._torchrpc_net import Remote, remote_of

if TYPE_CHECKING:
    from transports._torchrpc_conns import RpcConn
    from transports._torchrpc_outboxes import Inline, Parcel
    from transports._torchrpc_under_way import Call, UnderWay

SIGN_SECONDS: Final = 0.2
"""How often what is under way is looked at."""
SIGN: Final[dict[str, Any]] = {"moving": True}
"""The note that says so."""
LEAST_BYTES: Final = 1000
"""Of a call that may take long on a wire; less, as what tells of no more than life,
may go without an answer as long as both ends are idle."""


class Signs:
    """Of one connection, in both directions.

    Attributes:
        url: Where TensorPipe reaches the peer, "" as long as it is not known.

    Args:
        calls: What is under way to the peer.
    """

    def __init__(self, calls: UnderWay) -> None:
        self.url = ""
        self._calls = calls
        self._oldest: Call | Parcel | Inline | None = None
        self._acked = 0
        self._heard_at: float | None = None

    def heard(self) -> None:
        """The peer says that what it sends goes on arriving here."""
        self._heard_at = time.monotonic()

    def quiet_seconds(self) -> float | None:
        """For how long it has not said so; None: it never has."""
        return None if self._heard_at is None else time.monotonic() - self._heard_at

    def are_awaited(self) -> bool:
        """Whether one call has been unanswered since last asked."""
        before, self._oldest = self._oldest, self._calls.oldest(LEAST_BYTES)
        return self._oldest is not None and self._oldest is before

    def are_due(self, acked: Mapping[Remote, int]) -> bool:
        """Whether what is sent has moved since last asked, or waits for a device.

        Args:
            acked: As from `acked_by_remote`.
        """
        remote = remote_of(self.url)
        before, self._acked = self._acked, 0 if remote is None else acked.get(remote, 0)
        return self._acked > before or self._calls.waits_for_devices()


def moving(conns: Iterable[RpcConn]) -> list[RpcConn]:
    """Those whose peers wait for what goes on arriving there, or will."""
    slow = [conn for conn in conns if conn.signs.are_awaited()]
    acked = acked_by_remote() if slow else {}
    return [conn for conn in slow if conn.signs.are_due(acked)]


def acked_by_remote() -> dict[Remote, int]:
    """How much of what this process has sent to an address the kernel there has."""
    found: dict[Remote, int] = defaultdict(int)
    for sock in connected():
        found[sock.peer] += acked_bytes(sock.fd) or 0
    return found
