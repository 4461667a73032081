"""Plain TCP between processes and hosts: the standard library alone.

What frames messages and keeps connections is `mq.stream`, on which third parties may
build, too: this is the whole of a transport.
"""

from __future__ import annotations

from typing import ClassVar

from mq.stream.tcp import TcpStreamLink
from mq.transport import Capabilities


class TcpLink(TcpStreamLink):
    """Messages over TCP sockets, not encrypted."""

    capabilities: ClassVar[Capabilities] = Capabilities(reach="network")
    scheme = "tcp"
