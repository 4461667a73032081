"""TensorPipe's sockets on which TCP waits, after an outage of the wire.

Each time that TCP repeats what nobody has acknowledged it waits twice as long before
the next. TensorPipe keeps such a connection, and has no other to the same agent. So
when the peer greets again, which shows that the wire carries again, it is ended.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from mq import addresses
from mq.stream.sockets import copy_of, inode, repeats, shut

REPEATS: Final = 2
"""In vain, of what is in no hurry: by then six tenths of a second have passed."""
_DESCRIPTORS: Final = "/proc/self/fd"


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
    remote, own = _split(url), _split(own_url)
    found = False
    if remote is None or not os.path.isdir(_DESCRIPTORS):
        return False
    for name in os.listdir(_DESCRIPTORS):
        fd = int(name)
        with contextlib.suppress(OSError, ValueError):  # it leads to no host
            known = inode(fd)
            with copy_of(fd) as sock:
                host, port = sock.getpeername()[:2]
                _, own_port = sock.getsockname()[:2]
            is_remote = (host, port) == remote
            accepted = own is not None and (host, own_port) == (remote[0], own[1])
            if (is_remote or accepted) and repeats(fd, known) >= REPEATS:
                shut(fd, known)
                found |= is_remote
    return found


def _split(url: str) -> tuple[str, int] | None:
    found = addresses.split_host_port(url.partition("://")[2])
    return None if found is None else (found[0].strip("[]"), found[1])
