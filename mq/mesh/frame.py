"""A frame that a session keeps until the peer has received it."""

from __future__ import annotations

from mq.mesh.outgoing import Feed, Outgoing


class Frame:
    """A numbered frame that the peer has not received yet.

    Attributes:
        parts: What follows the header in the head.
        completes: Subscriptions and the last message of each that this frame completes.
        message, chunk: The large message and the index of its chunk that is the body.
    """

    __slots__ = (
        "chunk",
        "completes",
        "flags",
        "kind",
        "message",
        "number",
        "parts",
        "sent_before",
    )

    def __init__(
        self,
        kind: int,
        number: int,
        parts: list[bytes],
        flags: int = 0,
        completes: list[tuple[Feed, int]] | None = None,
        message: Outgoing | None = None,
        chunk: int = 0,
    ) -> None:
        self.kind = kind
        self.number = number
        self.parts = parts
        self.flags = flags
        self.completes = completes
        self.message = message
        self.chunk = chunk
        self.sent_before = False
