"""The calls of a connection that were made and are not answered yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mq.devices import Piece, is_to_come
from transports._torchrpc_outboxes import Inline, Parcel


@dataclass(slots=True, eq=False)
class Call:
    """A call, and whether its answer will be noticed by itself.

    Attributes:
        events: After which its tensors on devices hold their bytes.
        parcels: What the peer copies meanwhile.
    """

    future: Any
    nbytes: int
    events: list[Any] = field(default_factory=list)
    parcels: Sequence[Parcel] = ()
    watched: bool = False


class UnderWay:
    """They, in the order in which they were made.

    Args:
        notice: Called when one that is watched is answered: in a thread of
            TensorPipe's, or at once.

    Attributes:
        waiting: The parcel that must be filled before the next call is made.
    """

    def __init__(self, notice: Callable[[object], None]) -> None:
        self.waiting: Parcel | Inline | None = None
        self._notice = notice
        self._calls: list[Call] = []

    def __len__(self) -> int:
        return len(self._calls)

    def add(
        self,
        future: Any,
        nbytes: int,
        pieces: Sequence[Piece] = (),
        parcels: Sequence[Parcel] = (),
    ) -> None:
        """One was made, with these tensors on devices."""
        events = [piece.ready for piece in pieces if piece.ready is not None]
        self._calls.append(Call(future, nbytes, events, parcels))

    def watch(self) -> None:
        """Have all of them noticed when they are answered.

        Only where something waits for that: a callback runs Python in a thread of
        TensorPipe's, just when the mesh's thread wants to run.
        """
        for call in self._calls:
            if not call.watched:
                call.future.add_done_callback(self._notice)
                call.watched = True

    def oldest(self, least: int) -> Call | Parcel | Inline | None:
        """The one that has waited longest for its answer, or what must come before it.

        Of those with tensors on devices, and those of at least so many bytes.
        """
        if self.waiting is not None:
            return self.waiting
        large = (c for c in self._calls if c.nbytes >= least or c.events)
        return next((call for call in large if not call.future.done()), None)

    def waits_for_devices(self) -> bool:
        """Whether tensors of some of them are still to be filled."""
        if self.waiting is not None:
            return True
        waiting = (call for call in self._calls if not call.future.done())
        return any(is_to_come(event) for call in waiting for event in call.events)

    def answered(self) -> list[Call]:
        """Those that are answered, until `remove`; they may be so in any order."""
        return [call for call in self._calls if call.future.done()]

    def remove(self, call: Call) -> None:
        """It has been seen to."""
        self._calls.remove(call)
