"""TensorPipe's listener, which somebody's connection may close for good."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

from mq.stream.sockets import copy_of, inode, listening
from transports._torchrpc_calls import rpc
from transports._torchrpc_endings import is_in
from transports._torchrpc_net import remote_of

_SILENT_SECONDS: Final = 3600


class Listener:
    """Where an agent is reached, as long as it is.

    TensorPipe closes it over any connection that ends before its first message is
    there in whole, as that of a port scanner or of a health check does; then nobody new
    reaches the agent. TensorPipe's own clients speak first. So the kernel keeps to
    itself who has said nothing, and forgets who is cut off meanwhile (RST); but whoever
    closes in order (FIN) gets through.

    Args:
        url: The agent's; of one that has none nothing is known.
    """

    def __init__(self, url: str) -> None:
        remote = remote_of(url)
        self._fd = -1 if remote is None else listening(remote)
        self._inode = inode(self._fd)
        if self._inode:
            with contextlib.suppress(OSError), copy_of(self._fd) as sock:
                option = socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT
                sock.setsockopt(*option, _SILENT_SECONDS)

    @property
    def is_closed(self) -> bool:
        """Whether it was open and is not any more, though the agent is not ending.

        `rpc.shutdown` closes it first of all.
        """
        return inode(self._fd) != self._inode and not is_in(rpc.shutdown)
