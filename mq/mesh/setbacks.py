"""What goes wrong in a session, and what that costs: its connection, in the end itself.

It is resumed and begins again where it was; what has to do with others goes on
meanwhile. It is given up where the same frame goes wrong for the third time, for its
peer or for the link, and where there is no memory for one for as long as a peer may be
silent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mq.log import Log, WarnOnce, printable
from mq.mesh import handshake as hs
from mq.strangers import MOST_OF_HOST, WarnOfStrangers

if TYPE_CHECKING:
    from mq.mesh.faults import LinkFault
    from mq.mesh.mesh import Mesh
    from mq.mesh.session import Session
    from mq.mesh.wire import Malformed

logger = Log(__name__)

TRIES: Final = 3
"""Times the same frame may be malformed, or not be taken from the link or handed to it,
before the session is given up."""
REST_SECONDS: Final = 0.25
"""How long a session rests, for which there was no memory or whose link has failed."""
_STRANGE: Final = frozenset({hs.VERSION, hs.SECRET, hs.GROUP, hs.BACKEND})
_UNKNOWN: Final = "an unknown address"
NO_MEMORY: Final = "the system has no memory"
"""A MemoryError of Python's says nothing."""


class Setback:
    """What has gone wrong in one direction of a session, at the frame that is next.

    Attributes:
        times: How often its connection was dropped for that.
        starved_since: When there was no memory for it first; None: there was.
    """

    __slots__ = ("_frame", "starved_since", "times")

    def __init__(self) -> None:
        self._frame = -1
        self.times = 0
        self.starved_since: float | None = None

    def at(self, frame: int) -> Setback:
        """The same, at the frame of this number: what was at another is over."""
        if frame != self._frame:
            self._frame, self.times, self.starved_since = frame, 0, None
        return self

    def is_last(self) -> bool:
        """Count it once more; whether it was the last time that it may be."""
        self.times += 1
        return self.times >= TRIES


class Setbacks:
    """Drops connections, and gives sessions up, of one mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._warn = WarnOnce(logger)
        self._strangers: dict[str, WarnOfStrangers] = {}

    def malformed(self, session: Session, error: Malformed) -> None:
        """A peer broke the protocol."""
        mesh = self._mesh
        mesh.stats.malformed += 1
        session.stats.malformed += 1
        self.complain("a frame", session.name, session.wire, error)
        if session.inward.at(session.received).is_last():
            mesh.forget(session, f"malformed frames: {error}")
        else:
            mesh.disconnect(session, f"malformed frame: {error}")

    def broke_rules(self, session: Session, reason: str) -> None:
        """A peer broke the link's rules, which has ended its connection."""
        session.stats.malformed += 1  # the link has counted it, too
        self.complain("a connection", session.name, session.wire, reason)

    def unread(self, session: Session, error: LinkFault) -> None:
        """The link has failed at a frame of a peer's."""
        self._failed(session, session.inward.at(session.received), error)

    def _failed(self, session: Session, setback: Setback, error: LinkFault) -> None:
        if setback.is_last():
            self._mesh.forget(session, f"{error}, again and again")
        else:
            self._rest(session, str(error))

    def _rest(self, session: Session, reason: str) -> None:
        session.rests_until = self._mesh.clock() + REST_SECONDS
        self._mesh.disconnect(session, reason)

    def starved(self, session: Session, error: MemoryError) -> None:
        """There is no memory for a frame of a peer's."""
        setback = session.inward.at(session.received)
        self._starved(session, setback, error, "has to send a message")

    def _starved(
        self, session: Session, setback: Setback, error: MemoryError, what: str
    ) -> None:
        now = self._mesh.clock()
        reason = str(error) or NO_MEMORY
        if setback.starved_since is None:
            setback.starved_since = now
            most = "" if session.timeout is None else f", for {session.timeout:g} s"
            logger.warning(
                "%s %s again until there is memory%s: %s",
                session.name,
                what,
                most,
                reason,
            )
        since = setback.starved_since
        if session.timeout is not None and now - since >= session.timeout:
            self._mesh.forget(session, reason)
        else:
            self._rest(session, reason)

    def send(self, session: Session, now: float, flush: bool = False) -> bool:
        """As `Session.pump`, and see to what has gone wrong with it.

        An engine that copies may have no memory for that. The link may also have failed
        before: at what `publish` sent, which has others to send it to, or at an answer.
        """
        sent = False
        try:
            if session.fault is None:
                sent = session.pump(now, flush)
        except MemoryError as error:
            session.sending = False
            setback = session.outward.at(session.first_lacking())
            self._starved(session, setback, error, "is sent a message")
        if session.fault is not None:
            setback = session.outward.at(session.first_lacking())
            self._failed(session, setback, session.fault)
        return sent

    def strange(self, code: str, who: str, address: str, error: object) -> None:
        """Log whose handshake was refused with a code, if it is no member of the group.

        By its own log alone those would not know of it whose group that is.
        """
        if code in _STRANGE:
            self.complain(f"a handshake with another {code}", who, address, error)

    def complain(self, what: str, who: str, address: str, error: object) -> None:
        """Log what a peer did wrong, once for each peer and what was dropped for it.

        Args:
            what: What was dropped: one of a few texts.
            who: The peer's name; "": not known, so that its address has to do.
        """
        said = "dropped %s of %s at %s: %s (%s)"
        why = printable(str(error))  # a log that keeps it must not keep its traceback
        if who:
            rest = "further ones are only counted"
            self._warn((what, who), said, what, who, address or _UNKNOWN, why, rest)
            return
        rest = f"of a host {MOST_OF_HOST} are told of in an hour, others only counted"
        new = WarnOfStrangers(logger, each=True)
        strangers = self._strangers.setdefault(what, new)
        nobody = "an unknown peer"
        strangers(address, why, said, what, nobody, address or _UNKNOWN, why, rest)
