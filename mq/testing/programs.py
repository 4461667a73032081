"""What members do in several cases: functions that run there, with their queue."""

from __future__ import annotations

import hashlib
import logging
from typing import Any, Final, NamedTuple

import numpy as np

import mq
from mq import log
from mq.testing.waiting import STEP

_ODD: Final = 0x9E37_79B9_7F4A_7C15


class Received(NamedTuple):
    """A message without its payload, which may be large; `digest` stands for it."""

    topic: str
    sender: str
    sequence: int
    digest: Any


def pattern(number: int, nbytes: int) -> bytes:
    """Bytes that only `number` and `nbytes` decide; no 8 in a row come twice.

    So a part that arrives in another's place shows, whether of this message or another.
    """
    seed = hashlib.sha256(f"{number}/{nbytes}".encode()).digest()
    words = np.arange(nbytes // 8 + 1, dtype=np.uint64)
    words += np.frombuffer(seed, np.uint64, 1)
    words *= np.uint64(_ODD)  # a permutation: those that differed differ
    return bytes(words.data.cast("B")[:nbytes])


def digest(payload: Any) -> Any:
    """The payload itself, or a hash where it is bytes."""
    if isinstance(payload, bytes | bytearray):
        return len(payload), hashlib.sha256(payload).hexdigest()
    return payload


def publish_range(queue: mq.MQ, topic: str, start: int, stop: int) -> None:
    """Publish the numbers from `start` up to `stop`."""
    for number in range(start, stop):
        queue.publish(topic, number, timeout=STEP)


def publish_patterns(queue: mq.MQ, topic: str, sizes: list[int]) -> list[Any]:
    """Publish a pattern of each size; returns their digests."""
    for number, nbytes in enumerate(sizes):
        queue.publish(topic, pattern(number, nbytes), timeout=STEP)
    return [digest(pattern(number, nbytes)) for number, nbytes in enumerate(sizes)]


def receive(queue: mq.MQ, count: int, timeout: float = STEP) -> list[Received]:
    """The next `count` messages."""
    found = []
    for _ in range(count):
        message = queue.recv(timeout=timeout)
        found.append(
            Received(
                message.topic,
                message.sender,
                message.sequence,
                digest(message.payload),
            )
        )
    return found


def receive_until(queue: mq.MQ, last: Any, timeout: float = STEP) -> list[Received]:
    """All messages up to and including the one whose payload is `last`."""
    found: list[Received] = []
    while not found or found[-1].digest != last:
        found += receive(queue, 1, timeout)
    return found


def receive_or_errors(queue: mq.MQ, last: Any, timeout: float = STEP) -> list[Any]:
    """As `receive_until`, with each error that `recv` raised in its place.

    `MessagesLost` becomes ("lost", sender, topics, count), others ("error", name).
    """
    found: list[Any] = []
    while not found or getattr(found[-1], "digest", None) != last:
        found.append(_message_or_error(queue, timeout))
    return found


def _message_or_error(queue: mq.MQ, timeout: float) -> Any:
    try:
        return receive(queue, 1, timeout)[0]
    except mq.MessagesLost as lost:
        return "lost", lost.sender, lost.topics, lost.count
    except mq.CodecError as error:
        return "error", type(error).__name__


def fill(queue: mq.MQ, topic: str, limit: int = 100_000, nbytes: int = 0) -> int:
    """Publish numbers, or patterns, until a subscriber's credit is used up.

    Returns:
        How many were published.
    """
    for number in range(limit):
        payload: Any = pattern(number, nbytes) if nbytes else number
        if not _try_publish(queue, topic, payload):
            # A subscriber may give more once it has seen that this member publishes.
            queue.flush(STEP)
            if not _try_publish(queue, topic, payload):
                return number
    raise AssertionError(f"{limit} messages and no backpressure on {topic!r}")


def _try_publish(queue: mq.MQ, topic: str, payload: object) -> bool:
    try:
        queue.publish(topic, payload, timeout=0)
    except mq.PublishTimeout:
        return False
    return True


def nothing_waits(queue: mq.MQ) -> bool:
    """Whether `recv` has nothing to return now."""
    try:
        queue.recv(timeout=0)
    except mq.RecvTimeout:
        return True
    return False


class _Ear(logging.Handler):
    """Remembers what the log has said."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


_ears: Final[dict[mq.MQ, _Ear]] = {}


def listen(queue: mq.MQ) -> None:
    """Remember the library's warnings in this process from now on."""
    ear = _ears[queue] = _Ear()
    logging.getLogger("mq").addHandler(ear)


def heard(queue: mq.MQ) -> list[str]:
    """The warnings since `listen`; further ones are not remembered."""
    log.flush()
    ear = _ears.pop(queue)
    logging.getLogger("mq").removeHandler(ear)
    return ear.heard


def waiting_in_inbox(queue: Any) -> int:
    """How many messages and notices `recv` has not taken."""
    return int(queue.stats()["inbox"])


def topic_stats(queue: mq.MQ, topic: str) -> dict[str, Any]:
    """The counters of one topic; empty where nothing was counted."""
    counters: dict[str, Any] = queue.stats()["topics"].get(topic, {})
    return counters


def peer_stats(queue: mq.MQ, peer: str) -> dict[str, Any]:
    """The counters of one peer; empty where nothing was counted."""
    counters: dict[str, Any] = queue.stats()["peers"].get(peer, {})
    return counters
