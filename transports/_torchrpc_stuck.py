"""TensorPipe's sockets on which TCP waits, after an outage of the wire.

Each time that TCP repeats what nobody has acknowledged it waits twice as long before
the next. TensorPipe keeps such a connection, and has no other to the same agent. So
when the peer greets again, which shows that the wire carries again, it is ended.
"""

from __future__ import annotations

from typing import Final

from mq.stream.sockets import connected, repeats, shut
from transports._torchrpc_net import remote_of

REPEATS: Final = 2
"""In vain, of what is in no hurry: by then six tenths of a second have passed."""


def end_stuck(url: str, own_url: str) -> bool:
    """End the connections with an agent's host on which TCP waits.

    Those that the host has made to this process's agent, too, as answers wait there;
    they may be those of other agents of that host, which the same outage has stopped.

    Args:
        url: Where TensorPipe reaches the agent.
        own_url: Where it reaches this process's; "" where that is not known.

    Returns:
        Whether any was one to the agent itself.
    """
    remote, own = remote_of(url), remote_of(own_url)
    found = False
    if remote is None:
        return False
    for sock in connected():
        is_remote = sock.peer == remote
        accepted = own is not None and (sock.peer[0], sock.own[1]) == (
            remote[0],
            own[1],
        )
        if (is_remote or accepted) and repeats(sock.fd, sock.inode) >= REPEATS:
            shut(sock.fd, sock.inode)
            found |= is_remote
    return found
