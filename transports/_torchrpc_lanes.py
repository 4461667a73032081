"""Tensors from GPU to GPU within a host: by memory that both processes have mapped.

TensorPipe's channel for that, `cuda_ipc`, orders the two ends by events of the GPU that
both have. A stream that waits for an event whose process was killed waits for ever, and
so does whoever asks the GPU to be done: one SIGKILL can stop all peers. It also aborts
the process where memory is short, and keeps 32 MiB for each peer that has gone. So each
process here waits for work of its own alone:

- The sender copies a piece to its *outbox* and, once it is there, calls the receiver.
- The receiver copies it from there and, once it has it, answers: the place is free.

A connection that is over for its sender may not be for its receiver, where a copy may
be under way, or begin, from a place that has been given to another piece meanwhile. So
each use of a place writes its own number there, the *stamp*, before the content. The
receiver reads that after its copy, and drops the connection where it is another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mq.devices import Piece, aside, filled, is_reached, is_to_come, wait_for
from transports import _torchrpc_calls as calls
from transports._torchrpc_arrivals import Arrivals, Batch
from transports._torchrpc_outboxes import (
    HEADER_BYTES,
    INLINE_BYTES,
    Inline,
    Outbox,
    Parcel,
    reached_soon,
    views_of,
)

if TYPE_CHECKING:
    from transports._torchrpc_control import Greeting
    from transports._torchrpc_sharing import Sharing

_SEEN = 64
"""More stamps than are read at a time: a peer has `PLACES` places."""


class Inbox(Protocol):
    """Memory of a peer's."""

    memory: torch.Tensor

    def close(self) -> None:
        """Let go of it; nothing may be under way from there."""


@dataclass(slots=True, eq=False)
class _Copy:
    """A piece on its way from a peer's memory."""

    piece: Piece
    seen: torch.Tensor
    stamp: int

    def is_over(self, reached: Callable[[Any], bool]) -> bool:
        """Whether it is there, or cannot be any more."""
        try:
            return reached(self.piece.ready)
        except RuntimeError as error:
            self.piece.fail(self.piece.tensor.device, error)
            return True

    def is_sound(self) -> bool:
        """Whether it is what the peer had told of; once it is there."""
        return bool(self.piece.problem) or int(self.seen) == self.stamp


@dataclass(slots=True, eq=False)
class _Landing:
    """A batch of which pieces are on their way."""

    batch: Batch
    nbytes: int
    copies: list[_Copy]
    keep: bool
    answer: Any


def has_parcels(bodies: object) -> bool:
    """Whether a batch tells of pieces that are to be copied from the peer's memory."""
    return type(bodies) is list and any(map(_is_parcel, bodies))


def _is_parcel(body: object) -> bool:
    return type(body) is tuple and len(body) == 5


class Lane:
    """One connection's way from GPU to GPU, in both directions.

    Args:
        arrivals: Where batches go whose pieces have been copied.
        weigh: What a batch counts there; None: it is none, which has been seen to.
        fail: Breaks the connection; from any thread.
        notice: Has `settle` called, and what waits sent; from any thread.
        sharing: What the link shares; its `watch` calls `notice` once a GPU is further.

    Attributes:
        has_place: Whether `pack` may find a place.
        waiting: The parcel for whose copy the connection waits to send on.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        weigh: Callable[[Any, Any, Any], int | None],
        fail: Callable[[str], None],
        notice: Callable[[], None],
        sharing: Sharing,
    ) -> None:
        self.has_place = True
        self.waiting: Parcel | Inline | None = None
        self.notice = notice
        self._arrivals = arrivals
        self._weigh = weigh
        self._fail = fail
        self.sharing = sharing
        self._lock = threading.Lock()
        self._outboxes: Mapping[str, Outbox] = {}
        self._targets: Mapping[str, str] = {}
        self._inboxes: Mapping[int, Inbox] = {}
        self._landings: deque[_Landing] = deque()
        self._settling: _Landing | None = None
        self._seen: deque[torch.Tensor] = deque()
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._mapped = False
        self._copying: list[Any] = []  # events, of refused batches, too
        self._closed = False
        self._early: list[tuple[Batch, Any]] | None = []

    def meet(
        self, peer: Greeting, carried: Mapping[str, str], mapped: bool, whom: str
    ) -> None:
        """Both ends know each other: let tensors go this way if they can.

        Args:
            carried: Where at the peer those on each device of ours arrive.
            mapped: Whether TensorPipe takes them there, too.
            whom: To whom the greeting has offered memory.

        Raises:
            OSError: What the peer shares cannot be mapped.
        """
        outboxes, inboxes = self.sharing.ends(peer, carried, whom)
        self._mapped = mapped
        with self._lock:
            self._outboxes, self._targets = outboxes, carried
            self._inboxes = inboxes
            early, self._early = self._early or [], None
        for batch, answer in early:
            self._begin(batch, answer)
        if early:
            self.notice()

    # -- sending ----------

    def pack(self, piece: Piece) -> Piece | Parcel | Inline | None:
        """How a piece is to leave; None: not now, and `notice` is called later."""
        device = str(piece.tensor.device)
        target = self._targets[device]
        if len(piece) <= INLINE_BYTES:
            return Inline(piece, target)
        outbox = self._outboxes.get(device)
        if outbox is None:
            return piece if self._mapped else Inline(piece, target)
        self.has_place = False  # before, for `freed` comes from any thread
        at = outbox.take(self)
        if at is None and outbox.has(self):
            return None
        self.has_place = True
        if at is None:  # others keep all places, and may go on to
            return Inline(piece, target)
        return Parcel(outbox, self, at, piece, target)

    def freed(self) -> None:
        """There may be a place; from any thread."""
        self.has_place = True
        self.notice()

    def is_roomy(self) -> bool:
        """Whether the peer may keep a place for a while."""
        return not any(outbox.is_scarce for outbox in self._outboxes.values())

    def is_ready(self, parcel: Parcel | Inline) -> bool:
        """Whether the peer can be told; else `notice` is called once it may be.

        Of one on a device that has failed it can be told why it does not come.
        """
        try:
            ready = parcel.is_there()
        except RuntimeError as error:
            parcel.problem = self.sharing.failed(parcel.device, error)
            ready = True
        self.waiting = None if ready else parcel
        if not ready:
            self.sharing.watch.add(self)
        return ready

    # -- receiving ----------

    def take(self, batch: Batch, keep: bool) -> Any:
        """A call has brought a batch that `has_parcels`; in a thread of TensorPipe's.

        Args:
            keep: Whether the call may wait for a batch the other way.

        Returns:
            A future of the answer.

        Raises:
            RuntimeError: The sender has given a piece up.
        """
        answer = calls.Future[Any]()
        with self._lock:
            if self._early is not None:  # this end has yet to read the greeting
                self._early.append((batch, answer))
                return answer
        landing = self._fetch(batch, keep, answer)
        if landing is None:
            return calls.done(False)
        are_there = all(copy.is_over(reached_soon) for copy in landing.copies)
        if are_there and self._claim(landing):
            _check(landing)
            return self._arrivals.take(landing.batch, landing.nbytes, keep)
        self.sharing.watch.add(self)
        return answer

    def _begin(self, batch: Batch, answer: Any) -> None:
        if self._fetch(batch, False, answer) is None:
            self._arrivals.resolve([answer], False)

    def _fetch(self, batch: Batch, keep: bool, answer: Any) -> _Landing | None:
        """Begin to copy, and put pieces in the place of what told of them.

        What tells of none that can be there stays, which no batch has.
        """
        sequence, heads, bodies = batch
        copies: list[_Copy] = []
        with self._lock:  # `close` comes before all of this, or after it
            if self._closed:
                return None
            self._copying = list(filter(is_to_come, self._copying))
            for index, body in enumerate(bodies):
                if self._is_there(body):
                    bodies[index] = self._begin_copy(body, copies)
            nbytes = self._weigh(sequence, heads, bodies)
            if nbytes is None:
                return None
            landing = _Landing(batch, nbytes, copies, keep, answer)
            self._landings.append(landing)
            return landing

    def _claim(self, landing: _Landing) -> bool:
        """See to its end; False: another thread does."""
        with self._lock:
            is_here = landing in self._landings
            if is_here:
                self._landings.remove(landing)
            return is_here

    def _is_there(self, body: Any) -> bool:
        """Whether it tells of a piece in memory that the peer shares."""
        if not _is_parcel(body):
            return False
        index, target, at, nbytes, stamp = body
        return (
            all(type(number) is int for number in (index, at, nbytes, stamp))
            and type(target) is str
            and target in self.sharing.targets
            and index in self._inboxes
            and 0 < nbytes
            and 0 <= at <= len(self._inboxes[index].memory) - HEADER_BYTES - nbytes
            and at % HEADER_BYTES == 0
        )

    def _begin_copy(
        self, body: tuple[int, str, int, int, int], copies: list[_Copy]
    ) -> Piece:
        try:
            copies.append(self._copy(*body))
        except RuntimeError as error:  # the device has failed, or has no room
            return Piece.missing(body[3], torch.device(body[1]), error)
        return copies[-1].piece

    def _copy(self, index: int, target: str, at: int, nbytes: int, stamp: int) -> _Copy:
        views = self._views.get((index, at))
        if views is None:
            memory = self._inboxes[index].memory
            views = self._views[index, at] = views_of(memory, at, len(memory))
        stamped, content = views
        here, device = content.device, torch.device(target)
        # The thread that happens to run this may be in inference mode.
        with torch.inference_mode(False), aside({here: None, device: None}):
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
            seen = self._next_seen(pin=here.type == "cuda")
            tensor.copy_(content[:nbytes])
            seen.copy_(stamped, non_blocking=True)
            if here != device:
                wait_for(filled(here), device)
            event = filled(device)
            self._copying.append(event)
            return _Copy(Piece(tensor, event, is_ours=True), seen, stamp)

    def _next_seen(self, pin: bool) -> torch.Tensor:
        """Where a stamp is read to; pinned memory takes long to get."""
        if not self._seen:
            pinned = torch.empty(_SEEN, dtype=torch.int64, device="cpu", pin_memory=pin)
            self._seen.extend(pinned[at : at + 1] for at in range(_SEEN))
        self._seen.rotate()
        return self._seen[0]

    @property
    def is_busy(self) -> bool:
        """Whether pieces are on their way in, which take as long as the GPU wants."""
        return bool(self._landings)

    def settle(self) -> None:
        """See to the pieces that have arrived meanwhile; in the mesh's thread."""
        interrupted, self._settling = self._settling, None
        if interrupted is not None:  # by a Ctrl-C, wherever it came
            self._give_up(interrupted, "it was interrupted")
        for landing in list(self._landings):
            self._settling = landing
            self._settle(landing)
            self._settling = None
        if self._landings:
            self.sharing.watch.add(self)

    def _settle(self, landing: _Landing) -> None:
        try:
            if not all(copy.is_over(is_reached) for copy in landing.copies):
                return
            if not self._claim(landing):
                return
            _check(landing)
        except RuntimeError as error:
            self._give_up(landing, str(error))
        else:
            self._arrivals.take_late(
                landing.batch, landing.nbytes, landing.keep, landing.answer
            )

    def _give_up(self, landing: _Landing, why: str) -> None:
        self._fail(f"what the peer has sent cannot be taken in: {why}")
        self._claim(landing)
        self._arrivals.resolve([landing.answer], False)

    # -- both ----------

    def is_due(self) -> bool:
        """Whether what is waited for may have come; from any thread."""
        parcel, landings = self.waiting, list(self._landings)
        if parcel is not None and not is_to_come(parcel.awaited):
            return True
        for landing in landings:
            if not any(is_to_come(copy.piece.ready) for copy in landing.copies):
                return True
        return parcel is None and not landings

    def close(self) -> None:
        """The connection is over: forget everything."""
        with self._lock:
            self._closed = True
            inboxes, self._inboxes = self._inboxes, {}
            early, self._early = self._early or [], None
            landings, self._landings = self._landings, deque()
            events, self._copying = self._copying, []
            self._views.clear()
        answers = [answer for _, answer in early]
        answers += [landing.answer for landing in landings]
        if self._settling is not None:
            answers.append(self._settling.answer)
        self._arrivals.resolve(answers, False)
        self.waiting = None
        self.sharing.let_go([(inbox, events) for inbox in inboxes.values()])

    def forget(self) -> None:
        """Have no places any more, also after `close`."""
        for outbox in self._outboxes.values():
            outbox.forget(self)


def _check(landing: _Landing) -> None:
    """See that the pieces are what the sender told of; they are there now."""
    for copy in landing.copies:
        if not copy.is_sound():
            raise RuntimeError("a piece that its sender had given up")
        copy.piece.ready = None
