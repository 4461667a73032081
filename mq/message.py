"""What the application sees of a message, and the rules for topics and histories."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from mq.options import whole

MAX_TOPIC_BYTES: Final = 255
RESERVED_PREFIX: Final = "mq."
MAX_SUBSCRIPTIONS: Final = 65536
"""Of one member; its peers take no more."""


class Message(NamedTuple):
    """A received message.

    A NamedTuple, because it is made once per message: 0.3 us against 1.3 us for a
    frozen dataclass.

    Attributes:
        topic: The topic it was published on.
        payload: What was published; private to the receiver and writable.
        sender: Name of the publishing member.
        sequence: Number of the message among those of its publisher and topic, from 0.
        incarnation: Tells lives of a member of the same name apart; `sequence` restarts
            with it.
        published_at: When it was published, by the publisher's clock, in Unix seconds.
        nbytes: Size of the encoded message in bytes.
    """

    topic: str
    payload: Any
    sender: str
    sequence: int
    incarnation: str
    published_at: float
    nbytes: int


MOST_KEPT: Final = 2**31 - 1
"""Of each publisher; who asks for more gets this."""


class History(NamedTuple):
    """How much of a topic a slow subscriber keeps: all, or the newest n."""

    keep: int | None

    def __repr__(self) -> str:
        return "mq.KEEP_ALL" if self.keep is None else f"mq.keep_last({self.keep})"


KEEP_ALL: Final = History(None)
"""Lose nothing: a slow subscriber makes publishers wait."""


def keep_last(n: int) -> History:
    """Keep the newest `n` messages of each publisher; never make a publisher wait.

    Raises:
        TypeError: `n` is no whole number.
        ValueError: It is less than 1.
    """
    return History(_kept("n of mq.keep_last", n))


def check_history(history: History) -> int | None:
    """How many messages it keeps, as peers take it; None: all.

    Raises:
        TypeError: It is no history, or one of no whole number.
        ValueError: Its number is less than 1.
    """
    if not isinstance(history, History):
        raise TypeError(f"history is mq.KEEP_ALL or mq.keep_last(n), not {history!r}")
    return None if history.keep is None else _kept("keep of mq.History", history.keep)


def _kept(what: str, number: int) -> int:
    return min(whole(what, number, 1), MOST_KEPT)


class _Clear:
    def __repr__(self) -> str:
        return "mq.CLEAR"

    def __reduce__(self) -> str:
        """A copy, also in another process, is the same."""
        return "CLEAR"


CLEAR: Final = _Clear()
"""Publish this with ``retain=True`` to drop the retained message of a topic."""


def check_topics(count: int) -> None:
    """Raises: ValueError, if a member cannot have so many subscriptions."""
    if count > MAX_SUBSCRIPTIONS:
        raise ValueError(
            f"a member subscribes to {MAX_SUBSCRIPTIONS} topics at most; unsubscribe "
            "from some, or let one topic carry what belongs together"
        )


def check_topic(topic: str) -> str:
    """A topic as a plain string, whatever subclass it is of, which goes on the wire.

    Raises:
        TypeError: The topic is no string.
        ValueError: It is empty, longer than 255 bytes, not encodable, reserved, or has
            control characters.
    """
    if not isinstance(topic, str):
        raise TypeError(f"a topic is a str, not {type(topic).__name__}")
    try:
        raw = topic.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"topic {topic!r} cannot be encoded as UTF-8") from error
    if not 1 <= len(raw) <= MAX_TOPIC_BYTES:
        raise ValueError(f"a topic has 1 to 255 bytes, {topic[:40]!r} has {len(raw)}")
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in topic):
        raise ValueError(f"topic {topic!r} has control characters")
    if topic.startswith(RESERVED_PREFIX):
        raise ValueError(f"topic {topic!r}: names beginning with 'mq.' are reserved")
    return str.__str__(topic)
