"""What is remembered of a publisher that was given up and may return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from mq.mesh.incoming import Source


class Ended(NamedTuple):
    """Where a stream ended, of a publisher that was given up and may return.

    Attributes:
        newest: Sequence of the last message that came, or before the retained one that
            was still to come: newer retained messages are wanted. That one, too, unless
            there was no memory or device for it: it would end the next session as it
            ended this.
        owed: The last sequence that was owed until then: what was published after it
            is lost, unless it comes.
        reason: Why this member gave it up; "" where it gave this member up.
        starved: Whether the retained message is lost for lack of that.
    """

    newest: int
    owed: int
    reason: str = ""
    starved: bool = False

    @classmethod
    def of(cls, source: Source) -> Ended:
        owed = max(source.newest, source.first - 1)
        waiting = source.newest < source.retained
        fate = source.session.fate
        reason = "" if fate is None or fate.superseded else fate.reason
        starved = waiting and source.starved == source.retained
        newest = source.retained - (not starved) if waiting else owed
        return cls(newest, owed, reason, starved)


NOTHING_CAME: Final = Ended(-1, -1)
