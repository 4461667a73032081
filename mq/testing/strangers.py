"""Who does not know the secret and goes on all the same, as no member would.

Functions for `Member.ask`. They speak the handshake over the transport's own link, so
that each end is seen to check for itself what the other has to prove.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

from mq import registry
from mq.mesh import wire
from mq.mesh.handshake import Handshake, Refusal
from mq.mesh.poller import Poller
from mq.testing.waiting import STEP
from mq.transport import Event, Link, What

_SECRET: Final = b"not the group's"


def _open(backend: str, options: dict[str, Any]) -> tuple[Link, Poller, list[str]]:
    own = registry.option_names(backend)
    link = registry.create(backend, {k: v for k, v in options.items() if k in own})
    poller = Poller()
    return link, poller, link.open(poller, [], None)


def _events(link: Link, poller: Poller) -> Iterator[Event]:
    deadline = time.monotonic() + STEP
    while time.monotonic() < deadline:
        yield from link.poll()
        poller.wait(0.05)
    raise AssertionError(f"the peer of a stranger did not hang up within {STEP} s")


def knock(
    worker: object, backend: str, options: dict[str, Any], addresses: list[str]
) -> list[int]:
    """Dial a member and greet it, whatever it proves and with a proof that is none.

    Returns:
        The kinds of its frames, up to the one after the greeting.
    """
    link, poller, _ = _open(backend, options)
    shake = Handshake(_SECRET, dialler=True)
    heard: list[int] = []
    try:
        conn = link.dial(link.rank(addresses, same_host=True)[0])
        for event in _events(link, poller):
            if event.what is What.LOST:
                break
            if event.what is What.OPENED:
                conn.try_send(shake.hello())
            elif event.what is What.READABLE and (message := conn.receive()):
                frame = bytes(message[0])
                heard.append(frame[0])
                if frame[0] != wire.CHALLENGE:
                    break
                shake.check_challenge(frame)
                conn.try_send(shake.seal(wire.GREETING, Refusal("", "")))
        conn.close()
    finally:
        link.close()
        poller.close()
    return heard


def open_door(worker: Any, backend: str, options: dict[str, Any]) -> str:
    """Listen, as a member would; where, for `attach_to`."""
    worker.door = _open(backend, options)
    address: str = worker.door[2][0]
    return address


def answer(worker: Any) -> list[int]:
    """Be dialled once, and answer with a proof that is none.

    Returns:
        The kinds of the frames that came, up to the one after HELLO.
    """
    link, poller, _ = worker.door
    del worker.door
    shake = Handshake(_SECRET, dialler=False)
    heard: list[int] = []
    try:
        for event in _events(link, poller):
            if event.what is What.LOST and heard:
                break
            if event.what is What.READABLE and (message := event.conn.receive()):
                frame = bytes(message[0])
                heard.append(frame[0])
                if frame[0] != wire.HELLO:
                    break
                event.conn.try_send(shake.challenge(frame))
    finally:
        link.close()
        poller.close()
    return heard
