"""Signs of life beside a call that takes long.

TensorPipe tells nobody of a part of a tensor, so over a slow wire a large one would
pass for silence. But the kernel counts what the peer's has acknowledged: as long as
that grows, the sender says so over the socket beside the connection.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

from mq import addresses
from mq.stream.sockets import acked_bytes, copy_of

if TYPE_CHECKING:
    from transports._torchrpc_under_way import Call, UnderWay

SIGN_SECONDS: Final = 0.2
"""How often what is under way is looked at."""
SIGN: Final[dict[str, Any]] = {"moving": True}
"""The note that says so."""
_DESCRIPTORS: Final = "/proc/self/fd"


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
        self._oldest: Call | None = None
        self._acked = 0
        self._heard_at: float | None = None

    def heard(self) -> None:
        """The peer says that what it sends goes on arriving here."""
        self._heard_at = time.monotonic()

    def quiet_seconds(self) -> float | None:
        """For how long it has not said so; None: it never has."""
        return None if self._heard_at is None else time.monotonic() - self._heard_at

    def are_due(self) -> bool:
        """Whether what is sent has moved, and not for an answer, since last asked."""
        before, self._oldest = self._oldest, self._calls.oldest()
        if self._oldest is None or self._oldest is not before:
            return False
        acked, self._acked = self._acked, _acked_bytes(self.url)
        return self._acked > acked


def _acked_bytes(url: str) -> int:
    """Of all that this process has sent to an address, what the peer's kernel has."""
    host, port = addresses.split_host_port(url.partition("://")[2]) or ("", 0)
    remote = host.strip("[]"), port
    if not port or not os.path.isdir(_DESCRIPTORS):
        return 0
    fds = [int(name) for name in os.listdir(_DESCRIPTORS)]
    return sum(acked_bytes(fd) or 0 for fd in fds if _remote(fd) == remote)


def _remote(fd: int) -> tuple[str, int] | None:
    """Where a socket leads to; None: it is none, or to nowhere."""
    try:
        with copy_of(fd) as sock:
            host, port = sock.getpeername()[:2]
    except (OSError, ValueError):
        return None
    return host, port
