"""The sending end of a lane (`_torchrpc_lanes`): memory here, given away by places."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import torch

from mq.devices import Piece, aside, filled, is_reached

if TYPE_CHECKING:
    from transports._torchrpc_lanes import Lane
    from transports._torchrpc_sharing import Sharing

PLACES: Final = 8
HEADER_BYTES: Final = 512
"""Before each piece, for its stamp; keeps pieces where copies are fastest."""
INLINE_BYTES: Final = 64 << 10
"""Pieces up to here are copied by way of host memory."""
SPIN_SECONDS: Final = 100e-6
"""For so long the end of a copy is waited for, which mostly takes less."""

_stamps = itertools.count(secrets.randbits(62))
"""Nobody else's: a peer may take a handle of another process for that of this one."""


def place_bytes(nbytes: int) -> int:
    """The size of a place in an outbox of so many bytes."""
    return nbytes // PLACES // HEADER_BYTES * HEADER_BYTES


def views_of(
    memory: torch.Tensor, at: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stamp of a place, one number of 64 bits, and what comes after it."""
    place = memory[at : at + size]
    return place[:8].view(torch.int64), place[HEADER_BYTES:]


class Outbox:
    """Memory of this process that others have mapped; for all queues, and for good.

    What has been freed under those who have it mapped is undefined in CUDA. It has
    `PLACES` places, always the same, so that no stamp is in the middle of another.

    Args:
        memory: A tensor of uint8 with one dimension.
        handle: By which others map it.

    Attributes:
        views: Of each place, by where it begins.
    """

    def __init__(self, memory: torch.Tensor, handle: bytes) -> None:
        self.memory = memory
        self.handle = handle
        size = place_bytes(len(memory))
        self._free = [size * number for number in range(PLACES)]
        self.views = {at: views_of(memory, at, size) for at in self._free}
        self._places: dict[int, Lane] = {}
        self._waiting: dict[Lane, None] = {}
        self._lock = threading.Lock()

    @property
    def is_scarce(self) -> bool:
        """Whether few places are free."""
        return 2 * len(self._free) < PLACES

    def take(self, lane: Lane) -> int | None:
        """Where a place begins; None: the lane is told when there may be one.

        The more a lane has the more must be left to the others, so that several peers
        that read nothing hold nobody up.
        """
        with self._lock:
            mine = sum(owner is lane for owner in self._places.values())
            if 2 * (mine + 1) <= len(self._free) + 1:
                start = self._free.pop()
                self._places[start] = lane
                return start
            self._waiting[lane] = None
            return None

    def has(self, lane: Lane) -> bool:
        """Whether a place is a lane's."""
        with self._lock:
            return lane in self._places.values()

    def end(self, sharing: Sharing) -> None:
        """Forget all lanes of a link."""
        with self._lock:
            lanes = {*self._places.values(), *self._waiting}
        for lane in lanes:
            if lane.sharing is sharing:
                self.forget(lane)

    def give_back(self, start: int, lane: Lane) -> None:
        """The place is free, unless it has been given to another meanwhile."""
        with self._lock:
            if self._places.get(start) is lane:
                del self._places[start]
                self._free.append(start)
            waiting = list(self._waiting)
            self._waiting.clear()
        for one in waiting:
            one.freed()

    def forget(self, lane: Lane) -> None:
        """It is closed: what it has is free, and it waits for nothing any more."""
        with self._lock:
            self._waiting.pop(lane, None)
            mine = [start for start, owner in self._places.items() if owner is lane]
        for start in mine:
            self.give_back(start, lane)


class Parcel:
    """A piece on its way through an outbox.

    Args:
        lane: Whose it is.
        at: Its place.
        target: The GPU where it is to arrive, as the peer counts.

    Attributes:
        problem: Why it cannot leave, which the peer is told in its place; or "".
    """

    __slots__ = (
        "_at",
        "_event",
        "_is_copied",
        "_is_given_back",
        "_lane",
        "_outbox",
        "_piece",
        "_stamp",
        "_where",
        "nbytes",
        "problem",
    )

    def __init__(
        self, outbox: Outbox, lane: Lane, at: int, piece: Piece, target: str
    ) -> None:
        self.nbytes = len(piece)
        self.problem = ""
        self._outbox, self._lane, self._at = outbox, lane, at
        self._piece = piece
        self._where = piece.tensor.device.index or 0, target
        self._event: Any = None
        self._is_copied = self._is_given_back = False
        self._stamp = next(_stamps)

    def __len__(self) -> int:
        return self.nbytes

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._piece.tensor.device

    @property
    def awaited(self) -> Any:
        """The event of this process's after which there is more; from any thread."""
        return self._event if self._is_copied else self._piece.ready

    def is_there(self) -> bool:
        """Whether the peer can have it; begins to copy once it is filled.

        Raises:
            RuntimeError: The device has failed.
        """
        if not self._is_copied:
            if not reached_soon(self._piece.ready):
                return False
            # In this order, for a Ctrl-C may come in between, and `Watch` asks.
            self._event = self._copy(self._piece.tensor)
            self._is_copied = True
        return reached_soon(self._event)

    def _copy(self, tensor: torch.Tensor) -> Any:
        # The tensor is kept until the call was answered: longer than the copy takes.
        with torch.inference_mode(False), aside([tensor.device]):
            stamp, content = self._outbox.views[self._at]
            stamp.fill_(self._stamp)
            content[: self.nbytes].copy_(tensor)
            return filled(tensor.device)

    def body(self) -> tuple[Any, ...]:
        """As it goes into a call."""
        if self.problem:
            return self._where[1], self.problem
        return *self._where, self._at, self.nbytes, self._stamp

    def give_back(self) -> None:
        """The peer has it; done again it changes nothing."""
        if not self._is_given_back:
            self._is_given_back = True
            self._outbox.give_back(self._at, self._lane)


class Inline:
    """A piece that goes by host memory: a small one, for that is the fastest.

    Also any other, where the peer cannot map this process's memory or has no place.

    Args:
        target: The GPU where it is to arrive, as the peer counts.

    Attributes:
        is_small: Whether it goes within a call, and not as a tensor beside it.
        problem: Why it cannot leave, which the peer is told in its place; or "".
    """

    __slots__ = ("_content", "_piece", "_target", "is_small", "problem")

    def __init__(self, piece: Piece, target: str) -> None:
        self.is_small = len(piece) <= INLINE_BYTES
        self.problem = ""
        self._piece = piece
        self._target = target
        self._content: bytes | torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._piece.tensor.device

    @property
    def awaited(self) -> Any:
        """The event after which there is more to do; from any thread."""
        return self._piece.ready

    def is_there(self) -> bool:
        """Whether it can leave; copies it once it is filled.

        Raises:
            RuntimeError: The device has failed.
        """
        if self._content is None and reached_soon(self._piece.ready):
            self._piece.ready = None  # what has been waited for
            with torch.inference_mode(False):
                host = torch.empty(len(self._piece), dtype=torch.uint8, device="cpu")
            self._piece.copy_to(host.numpy().data)
            self._content = bytes(host.numpy()) if self.is_small else host
        return self._content is not None

    def body(self) -> tuple[str, bytes | torch.Tensor | str | None]:
        """As it goes into a call."""
        return self._target, self.problem or self._content


def reached_soon(event: Any) -> bool:
    """Whether an event is reached, now or within `SPIN_SECONDS`.

    Raises:
        RuntimeError: The device has failed.
    """
    end = time.perf_counter() + SPIN_SECONDS
    while not is_reached(event):
        if time.perf_counter() > end:
            return False
    return True
