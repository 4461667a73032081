"""What is remembered of a publisher that was given up and may return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from mq.mesh.incoming import Source


class Ended(NamedTuple):
    """Where a stream ended, of a publisher that was given up and may return.

    Attributes:
        newest: Sequence of the last message that came, or before the retained one that
            was still to come: newer retained messages are wanted.
        owed: The last sequence that was owed until then: what was published after it
            is lost, unless it comes.
        reason: Why this member gave it up; "" where it gave this member up.
    """

    newest: int
    owed: int
    reason: str = ""

    @classmethod
    def of(cls, source: Source) -> Ended:
        owed = max(source.newest, source.first - 1)
        waiting = source.newest < source.retained
        fate = source.session.fate
        reason = "" if fate is None or fate.superseded else fate.reason
        return cls(source.retained - 1 if waiting else owed, owed, reason)


NOTHING_CAME: Final = Ended(-1, -1)
