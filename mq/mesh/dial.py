"""Connections that are not yet those of a session: dials and greeters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from mq.errors import AuthenticationFailed, ConnectRefused
from mq.mesh import handshake as hs
from mq.mesh.handshake import Greeting, Handshake

if TYPE_CHECKING:
    from mq.mesh.session import Session
    from mq.transport import Conn, Link

FIRST_DELAY: Final = 0.02
"""Seconds before the first repetition of a dial that failed; then doubled."""
ATTEMPT_SECONDS: Final = 2.0
"""Seconds after which an attempt to connect and greet is given up for the next."""
MOST_ATTEMPT_SECONDS: Final = 8.0
"""The same where earlier attempts by that route were not answered in time: a handshake
takes several round trips, and a peer waits `GREET_SECONDS` for its part of it."""
PACES: Final = 16
"""Attempts to resume a session within its `peer_timeout`; see `Dial.pace`."""
LONGEST_PACE: Final = 0.5
MAX_BESIDE: Final = 64
"""Connections that have not greeted yet; beyond, no attempt is begun beside another."""
FIRST_WINDOW: Final = 8
"""How many members that were not greeted yet are dialled at once; see `Window`."""
LEAST_WINDOW: Final = 2
COUNTED_SECONDS: Final = 0.5
"""For how long an attempt counts: a peer may stand still, and its host be gone."""
MAX_GREETERS: Final = 512
"""Accepted connections that have not greeted yet; beyond, one is closed."""
LISTEN: Final = "one of the two must listen= (or MQ_LISTEN) where the other reaches it"


class Doubted(NamedTuple):
    """A refusal that proves nothing: its code, its words, and the address dialled."""

    code: str
    reason: str
    address: str


class Dial:
    """Repeated attempts to reach one peer.

    Attributes:
        routes: Links and addresses to try in turn.
        incarnation: Of the peer; "" where only an address is known: then an attempt
            first just asks who is there.
        session: The session to resume, or None for a new one.
        returning: Whether the peer was in session with this member before, so that it
            may be reached again whatever answers at its addresses now.
        doubts: Whether strangers may have its address by now, so that what they refuse
            without a proof is not the last word.
        doubted: The last refusal that was, unless the peer has answered since.
        probe: Whether the peer is only asked if it is alive; `welcome` is its answer.
        at_once, takes_turns: Whether it begins beside however many others; whether not.
        max_delay: Longest pause between attempts in seconds.
        pace: Seconds after which another attempt is begun beside one that has got no
            answer yet, as where packets were lost TCP takes 1, 3 and 7 s to begin anew.
        opened_at: When an attempt had a connection first, by the mesh's clock, or None.
        leaves_at: Until when attempts beside each other take the same route.
        next_at: When the next attempt is due, by the mesh's clock.
        first_at: When the first one began, by the mesh's clock, or None.
        waits_its_turn: Whether that is over, and others are under way.
        until: When to give up, by the mesh's clock; None: never.
        error: Why the last attempt failed.
        refusal: Code of a refusal that no repetition will change.
        done: Whether a session was reached, or there is no more to try.
    """

    def __init__(
        self,
        routes: Sequence[tuple[Link, str]],
        *,
        incarnation: str = "",
        name: str = "",
        session: Session | None = None,
        returning: bool = False,
        doubts: bool = False,
        probe: bool = False,
        at_once: bool = False,
        max_delay: float = 0.5,
        pace: float = ATTEMPT_SECONDS,
        until: float | None = None,
    ) -> None:
        self.routes = list(routes)
        self.incarnation = incarnation
        self.name = name
        self.session = session
        self.returning = returning or session is not None
        self.doubts = doubts
        self.doubted: Doubted | None = None
        self._age = math.inf
        self.blind = not incarnation
        self.probe = probe
        # Else it waits until few others are under way: nobody counts its time.
        self.takes_turns = not (probe or at_once or self.returning)
        self.max_delay = max_delay
        # Who only asks who is there must not have two answers to that.
        self.pace = math.inf if self.blind else pace
        self.until = until
        self.conn: Conn | None = None  # of the last attempt
        self.address = routes[0][1] if routes else ""
        self.attempt = 0
        self.waits_its_turn = False
        self.first_at: float | None = None
        self.opened_at: float | None = None
        self.leaves_at = 0.0
        # By address: until when an attempt may last, and how long the next one.
        self._longest: dict[str, tuple[float, float]] = {}
        self.next_at = 0.0
        self.error = ""
        self.refusal = ""
        self.welcome: Greeting | None = None
        self.done = not routes

    def next_route(self, now: float) -> tuple[Link, str]:
        """The route of the next attempt.

        That of the one beside it, as long as that may be answered yet: by whichever
        route a peer that was only stalled answers first, the session would stay there.
        """
        if self.conn is None or now >= self.leaves_at:
            self.leaves_at = now + ATTEMPT_SECONDS
            self.attempt += 1
            self.first_at = now if self.first_at is None else self.first_at
        link, self.address = self.routes[(self.attempt - 1) % len(self.routes)]
        return link, self.address

    def deadline(self, now: float) -> float:
        """When the attempt that begins now at `address` is given up.

        Each time that has gone by without an answer doubles that of the next attempt
        there, for the way may be long. Of attempts beside each other only one has more
        than `ATTEMPT_SECONDS`, or they would be too many.
        """
        until, seconds = self._longest.get(self.address, (now, ATTEMPT_SECONDS))
        if now < until:
            return now + ATTEMPT_SECONDS
        until = now + seconds
        self._longest[self.address] = until, min(2 * seconds, MOST_ATTEMPT_SECONDS)
        return until

    def identified(self, incarnation: str) -> None:
        """It is known who answers at the route of the last attempt: take it again."""
        self.incarnation = incarnation
        self._longest[self.address] = 0.0, self._longest[self.address][1]
        self.attempt -= 1
        self.next_at = 0.0
        self.conn = None  # only now: `recover` goes by it

    def failed(self, reason: str, now: float) -> None:
        """An attempt failed; wait before the next round of routes."""
        self.error = reason
        if self.blind:
            self.incarnation = ""
        rounds, rest = divmod(self.attempt, len(self.routes))
        pause = 0.0
        if not rest:
            pause = min(self.max_delay, FIRST_DELAY * 2.0 ** min(rounds - 1, 16))
        self.next_at = now + pause
        self.conn = None  # only now: `recover` goes by it
        if self.until is not None and self.next_at >= self.until:
            self.done = True

    def saw_record(self, age: float) -> None:
        """Doubt no longer where its record was renewed since: then it is no stranger.

        Args:
            age: Of the record, in seconds; told again and again.
        """
        if self.doubted is not None:
            self.doubts &= not age < self._age < math.inf
        self._age = math.inf if self.doubted is None else age

    def believe(self) -> None:
        """Take a refusal that was doubted for the last word, if there is no other."""
        if self.doubted is not None and not self.refusal and self.welcome is None:
            self.refusal, self.error, self.address = self.doubted

    def outcome(self) -> str:
        """What has come of it, in words."""
        waited = "others came first" if self.waits_its_turn else "no answer"
        return self.error or waited

    def is_routable(self) -> bool:
        """Whether some route of it may lead to another host."""
        return any(link.is_routable(address) for link, address in self.routes)

    def tell(self, addresses: Sequence[str], networked: bool) -> str:
        """What was tried, and what has come of it, in words.

        Args:
            addresses: Of the peer.
            networked: Whether the link reaches other hosts.
        """
        places = ", ".join(addresses)
        if not self.routes:
            return (
                f"listens on {places}, which cannot be reached from this host, "
                f"and has not dialled this member; {LISTEN}"
            )
        return f"tried {places}: {self.outcome()}{self.hint() if networked else ''}"

    def hint(self) -> str:
        """What may be wrong with the addresses that were tried, to end a sentence."""
        if self.doubted is not None:
            return ""
        if not self.is_routable():
            return f"; if it is in another container or namespace, {LISTEN}"
        if self.opened_at is not None:
            return ""
        return (
            f"; if {self.address} cannot be reached from here, as behind NAT, "
            f"{LISTEN}, or leave the rendezvous out and attach_to= an address that can"
        )

    def raise_refusal(self) -> None:
        """Raises: ConnectRefused or AuthenticationFailed, if it was refused."""
        if not self.refusal:
            return
        who = repr(self.name) if self.name else "the member"
        text = f"{who} at {self.address} refused this member: {self.error}"
        if self.refusal == hs.SELF:
            raise ConnectRefused(
                f"{self.address} of attach_to is this member's own address; give those "
                "of other members"
            )
        if self.refusal == hs.LINK:
            text = f"{who} at {self.address} and this member do not fit: {self.error}"
        if self.doubts and self.doubted is not None:
            text += " (it, or a stranger who has that address now)"
        if self.refusal == hs.SECRET:
            raise AuthenticationFailed(f"{text}. Use the same secret everywhere")
        raise ConnectRefused(text)


class Window:
    """How many handshakes this member begins before others of its own have ended.

    By additive increase and multiplicative decrease, as TCP finds out what a way bears
    (RFC 5681): each answer is room for one more, and where one did not come in time
    there is room for half. Many that join at once on few processors otherwise begin so
    many that none ends in time, and each begins anew.
    """

    def __init__(self) -> None:
        self._size = float(FIRST_WINDOW)
        self._halved_at = -math.inf

    def room(self, greeters: Iterable[Greeter], now: float) -> float:
        """How many more may begin beside these."""
        return self._size - sum(greeter.counts(now) for greeter in greeters)

    def answered(self) -> None:
        """A peer has answered in time."""
        self._size += 1

    def timed_out(self, now: float) -> None:
        """A peer has not; those that were begun at the same time count once."""
        if now - self._halved_at >= ATTEMPT_SECONDS:
            self._halved_at = now
            self._size = max(LEAST_WINDOW, self._size / 2)


class Granted(NamedTuple):
    """What WELCOME promised: a new session, or the old one (`resumes`)."""

    greeting: Greeting
    session_id: str
    resumes: Session | None


class Greeter:
    """A connection in its handshake.

    Attributes:
        dial: The dial that opened it; None where the peer dialled.
        address: What that dialled.
        deadline: When it is closed if it has not finished, by the mesh's clock.
        begun: When it began, by the mesh's clock; 0: the peer dialled.
        origin: Where a peer that dialled comes from, as `mq.addresses.origin` has it.
        opened: Whether there is a connection.
        greeted: Whether the first of the peer's two frames has come.
        refused: Whether the peer is only to read what it was told, and to close.
        granted: What WELCOME granted; it begins with the peer's first frame after
            it, so that a connection which the peer gave up never replaces a session.
    """

    def __init__(
        self,
        secret: bytes,
        dial: Dial | None,
        deadline: float,
        begun: float = 0.0,
        origin: str = "",
    ) -> None:
        self.handshake = Handshake(secret, dialler=dial is not None)
        self.dial = dial
        self.address = "" if dial is None else dial.address
        self.deadline = deadline
        self.begun = begun
        self.origin = origin
        self.opened = self.greeted = False
        self.refused = False
        self.granted: Granted | None = None

    def counts(self, now: float) -> bool:
        """Whether it is a first attempt to greet a peer, which may be answered yet."""
        dial = self.dial
        if dial is None or not dial.takes_turns:
            return False
        return now - self.begun < COUNTED_SECONDS
