"""Every error this library raises.

Each class is an `MQError` and the builtin that a caller would expect, so both
``except mq.MQError`` and ``except TimeoutError`` work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MOST_SHOWN: Final = 10
"""Topics that are named where messages are missing; of the rest it is said how many."""


class MQError(Exception):
    """Root of all errors of this library; never raised itself."""


class UnknownTransport(MQError, LookupError):
    """No transport is registered under this name."""


class TransportUnavailable(MQError, RuntimeError):
    """The transport's library is missing, or it cannot work on this host."""


class ConnectTimeout(MQError, TimeoutError):
    """`connect` could not greet every member in time."""


class ConnectRefused(MQError, ConnectionRefusedError):
    """A member of the group refused this one: its name, version, group or backend.

    Or what another version has left where members meet shows that they do not fit.
    """


class PublishTimeout(MQError, TimeoutError):
    """`publish` found no credit in time; nobody got the message.

    Attributes:
        members: Names of the members that `publish` was waiting for.
    """

    def __init__(self, message: str, members: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.members = tuple(members)


class RecvTimeout(MQError, TimeoutError):
    """No message arrived in time."""


class FlushTimeout(MQError, TimeoutError):
    """Some published messages have not reached their subscribers in time."""


class SubscribeTimeout(MQError, TimeoutError):
    """Some members have not acknowledged a subscription, which stays in force."""


class MembersTimeout(MQError, TimeoutError):
    """Fewer members or subscribers than waited for were there in time."""


class Closed(MQError):
    """The queue is closed, or was closed while a call was waiting."""


class MessagesLost(MQError):
    """A publisher and this member gave each other up; messages are missing.

    Raised by `recv` once per publisher; the queue goes on afterwards.

    Attributes:
        sender: Name of the publisher.
        topics: Topics of which messages are missing.
        count: How many messages are missing, over all those topics.
        reason: Why this member gave the publisher up; "" where that gave up first.
    """

    def __init__(
        self, sender: str, topics: Sequence[str], count: int, reason: str = ""
    ) -> None:
        names = ", ".join(map(repr, topics[:MOST_SHOWN]))
        if len(topics) > MOST_SHOWN:
            names += f" and {len(topics) - MOST_SHOWN} other topics"
        why = (
            f"this member gave {sender!r} up: {reason}"
            if reason
            else "this member was silent for longer than peer_timeout and was "
            "forgotten; raise peer_timeout if such stalls are normal here"
        )
        super().__init__(
            f"{count} message(s) from {sender!r} on {names} were lost: {why}"
        )
        self.sender = sender
        self.topics = tuple(topics)
        self.count = count
        self.reason = reason

    def __reduce__(
        self,
    ) -> tuple[type[MessagesLost], tuple[str, tuple[str, ...], int, str]]:
        """So that it can be sent to another process."""
        return MessagesLost, (self.sender, self.topics, self.count, self.reason)


class MessageTooLarge(MQError, ValueError):
    """A message is larger than some subscriber's `max_message_bytes`.

    Raised by `publish`; and once by `recv` for a retained one that was there before
    this member subscribed. The queue goes on afterwards.

    Attributes:
        topic: Of that retained message; "" where `publish` raised it.
    """

    topic = ""

    @classmethod
    def retained(
        cls, sender: str, topic: str, nbytes: int, limit: int
    ) -> MessageTooLarge:
        """What a subscriber raises that has a limit of so many bytes."""
        error = cls(
            f"the retained message of {sender!r} on {topic!r} has {nbytes} bytes; this "
            f"member's max_message_bytes is {limit}, so it was not sent. Raise "
            "max_message_bytes here or have smaller parts published"
        )
        error.topic = topic
        return error


class CodecError(MQError, ValueError):
    """A payload cannot be encoded, or received bytes cannot be decoded.

    Attributes:
        sender: Name of the publisher of what `recv` could not decode; "" elsewhere.
        topic: Its topic; "" elsewhere.
    """

    def __init__(self, message: str, sender: str = "", topic: str = "") -> None:
        super().__init__(message)
        self.sender = sender
        self.topic = topic


class UntrustedPayload(CodecError):
    """Received bytes ask for a type that this member does not accept."""


class AuthenticationFailed(MQError, PermissionError):
    """A peer or rendezvous service did not prove that it knows the secret."""


class ForkedProcess(MQError, RuntimeError):
    """A queue was used in a forked child of the process that connected it."""


class PeerLost(MQError, ConnectionError):
    """A peer or a rendezvous service is gone.

    Attributes:
        peer: Name or address of what was lost.
    """

    def __init__(self, message: str, peer: str = "") -> None:
        super().__init__(message)
        self.peer = peer


def first_line(error: BaseException) -> str:
    """What an engine's error says, for one of ours: torch's go on for a screen."""
    return str(error).partition("\n")[0][:200].rstrip(".")
