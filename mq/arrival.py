"""How a new member becomes known: it claims a name and greets who is there."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from mq import process, rendezvous
from mq.errors import ConnectRefused, ConnectTimeout, PeerLost, TransportUnavailable
from mq.mesh import handshake as hs
from mq.mesh.dial import Dial
from mq.mesh.driver import Driver
from mq.rendezvous import claimants

if TYPE_CHECKING:
    from mq.rendezvous import Entry, Rendezvous
    from mq.settings import Settings
    from mq.transport import Link

T = TypeVar("T")

PROBE_SECONDS: Final = 2.0
"""How long the holder of a name has to answer before the name is given away, and who
is recorded with a lease that has ended, for each of its addresses, to be waited for."""
PROBE_OPENINGS: Final = 10
"""For how many times as long as its connection took to open the holder of a name is
waited for, if that is more than `PROBE_SECONDS`: to greet takes further round trips,
and a slow network makes the first attempts too short."""
LOOK_SECONDS: Final = 0.25
"""How often a joiner looks again who is recorded, while it waits."""
LEAVING_SECONDS: Final = 0.01
"""The same where all that it waits for are leaving, and recorded until they have."""
STRANGE: Final = frozenset({hs.SECRET, hs.LINK, hs.VERSION})
"""Refusals that may be of a stranger who has a member's address now."""
DEFAULT_LEASE: Final = 20.0
"""Seconds a record lives without renewal where `peer_timeout` is None."""


def lease_seconds(peer_timeout: float | None) -> float:
    """How long a member is recorded without renewal."""
    return DEFAULT_LEASE if peer_timeout is None else 2 * peer_timeout


def record_of(member: hs.Greeting) -> rendezvous.Record:
    """What a member writes at the rendezvous.

    Raises:
        ValueError: What it tells of itself fits no record.
    """
    return rendezvous.Record(
        name=member.name,
        incarnation=member.incarnation,
        generation=member.generation,
        backend=member.backend,
        addresses=tuple(member.addresses),
        process=member.process,
        labels=tuple(member.labels),
        since=member.since,
        lease=lease_seconds(member.peer_timeout),
    )


def within_reach(link: Link, other: process.ProcessId) -> bool:
    """Whether what a link carries gets to another member's process at all."""
    return link.capabilities.reach != "process" or process.here().is_same(other)


def _is_own(record: rendezvous.Record) -> bool:
    return process.here().is_same(record.process)


class Arrival:
    """Claims a name at the rendezvous, then greets everyone recorded there."""

    def __init__(
        self,
        settings: Settings,
        driver: Driver,
        link: Link,
        meeting: Rendezvous,
        deadline: float,
    ) -> None:
        self._settings = settings
        self._link = link
        self._driver = driver
        self._mesh = driver.mesh
        self._meeting = meeting
        self._deadline = deadline
        self._dials: dict[str, Dial] = {}
        self._patience: dict[str, float] = {}  # until when, if a lease has ended
        self._swept: set[str] = set()

    # -- the name ----------

    def claim(self) -> rendezvous.Record:
        """Get the name, and be found by whoever joins later.

        Raises:
            ConnectRefused: Somebody else has it, or the group another backend.
            TransportUnavailable: Somebody has it whom the backend does not reach.
            ConnectTimeout: Others took it again and again, or its holder is silent.
        """
        config = self._mesh.config
        record = record_of(config.greeting())
        replaces: str | None = None
        while True:
            claim = self._ask(
                functools.partial(self._meeting.claim, record, replaces=replaces)
            )
            if claim.holder is None:
                config.generation = claim.record.generation
                return claim.record
            holder = claim.holder.record
            self._check_fits(claim.holder)
            if self._is_alive(claim.holder):
                end = "close that queue" if _is_own(holder) else "end that process"
                raise ConnectRefused(
                    f"{self._held(holder)}; choose another name or {end}"
                )
            if time.monotonic() > self._deadline:
                raise ConnectTimeout(
                    f"could not get name {config.name!r} within "
                    f"{self._settings.connect_timeout:g} s at "
                    f"{self._meeting.description}: others claim it too"
                )
            replaces = holder.incarnation

    def _ask(self, question: Callable[[], T], waiting: Sequence[Entry] = ()) -> T:
        """Ask the rendezvous something.

        Args:
            waiting: Whom this member had not greeted by then.

        Raises:
            ConnectTimeout: There was no time for its answer.
        """
        try:
            return question()
        except PeerLost as error:
            if time.monotonic() < self._deadline:
                raise
            reason = f"could not connect within {self._settings.connect_timeout:g} s"
            raise ConnectTimeout(
                self._explain(waiting) if waiting else f"{reason}: {error}"
            ) from error

    def _held(self, holder: rendezvous.Record) -> str:
        where = f"pid {holder.process.pid} on {holder.process.host}"
        if _is_own(holder):
            where += ", a queue of this process that was not closed"
        return (
            f"name {holder.name!r} in group {self._settings.group!r} is held by {where}"
        )

    def _check_fits(self, entry: Entry) -> None:
        """Raises: ConnectRefused, TransportUnavailable, if members cannot meet."""
        record, mine = entry.record, self._mesh.config.backend
        reached = entry.expired or within_reach(self._link, record.process)
        if (record.backend == mine and reached) or self._has_ended(record):
            return
        group = f"group {self._settings.group!r}"
        member = (
            f"member {record.name!r}, pid {record.process.pid} on {record.process.host}"
        )
        if record.backend != mine:
            raise ConnectRefused(
                f"{group} uses backend {record.backend!r}, not {mine!r} ({member}); "
                "use the same backend or another group"
            )
        raise TransportUnavailable(
            f"{mine} reaches only threads of one process, and {group} has a member in "
            f"another ({member}); give this process a group of its own, or let all use "
            "a backend between processes, such as shm"
        )

    def _has_ended(self, record: rendezvous.Record) -> bool:
        return claimants.has_ended(record, self._mesh.config.process)

    def _is_alive(self, holder: Entry) -> bool:
        """Ask the holder of a name; silence for `PROBE_SECONDS` counts as death.

        Raises:
            ConnectTimeout: It was silent, but the time to connect was up before.
        """
        record = holder.record
        if self._has_ended(record):
            return False
        asked_at = time.monotonic()
        dial = self._dial(record, probe=True)
        if not dial.routes:
            return self._is_renewed(holder, dial)
        left, most = max(0.0, self._deadline - asked_at), PROBE_SECONDS

        def opens() -> bool:
            return dial.done or dial.opened_at is not None

        answered = self._driver.wait_until(opens, min(left, most))
        if dial.opened_at is not None:
            most = max(most, PROBE_OPENINGS * (dial.opened_at - asked_at))
            rest = asked_at + min(left, most) - time.monotonic()
            answered = self._driver.wait_until(lambda: dial.done, max(0.0, rest))
        self._driver.run(lambda: self._mesh.dialling.cancel(dial))
        asks = dial.welcome is None and dial.doubted is not None and not dial.refusal
        if asks and self._is_renewed(holder, dial):
            dial.believe()
        dial.raise_refusal()
        if not answered and left < most:
            raise ConnectTimeout(
                f"{self._held(record)} and did not answer within "
                f"{self._settings.connect_timeout:g} s; a silent holder gives it up "
                f"after {most:.3g} s: raise connect_timeout, choose another "
                "name or end that process"
            )
        if dial.welcome is not None:
            return dial.welcome.incarnation == record.incarnation
        # On another host a file of that name says nothing of the holder's.
        is_near = self._mesh.config.is_near(record.process)
        return not is_near and not dial.is_routable() and self._is_renewed(holder, dial)

    def _is_renewed(self, holder: Entry, dial: Dial) -> bool:
        """Whether a holder that cannot be asked renews its lease before that ends.

        Raises:
            ConnectTimeout, or what `dial` doubted: The time was up before.
        """
        record = holder.record
        while not holder.expired:
            left = self._deadline - time.monotonic()
            if left <= 0:
                dial.believe()
                dial.raise_refusal()
                raise ConnectTimeout(
                    f"{self._held(record)}, listens on {', '.join(record.addresses)}, "
                    "where it cannot be asked from here whether it lives, and "
                    f"its lease of {record.lease:g} s had not ended within "
                    f"{self._settings.connect_timeout:g} s: raise connect_timeout, "
                    "choose another name or end that process"
                )
            self._driver.wait_until(lambda: False, min(left, LOOK_SECONDS))
            before = holder
            for holder in self._ask(self._meeting.records):
                if holder.record.incarnation == record.incarnation:
                    break
            else:
                return False
            if holder.age < before.age:
                return True
        return False

    # -- the others ----------

    def greet_all(self) -> None:
        """Have a session with everyone who is recorded.

        Raises:
            ConnectTimeout, ConnectRefused, AuthenticationFailed, TransportUnavailable:
                Not with all of them.
        """
        waiting: list[Entry] = []
        while True:
            waiting = self._ask(self._greet_recorded, waiting)
            if not waiting:
                return
            left = self._deadline - time.monotonic()
            raises = functools.partial(self._raise_refusals, waiting, last=left <= 0)
            self._driver.look(raises)
            if left <= 0:
                raise ConnectTimeout(self._explain(waiting))
            settled = functools.partial(self._settled, waiting)
            if self._driver.wait_until(settled, min(left, LOOK_SECONDS)):
                greeted = functools.partial(self._are_greeted, waiting)
                self._driver.wait_until(greeted, min(left, LEAVING_SECONDS))

    def _dial(
        self, record: rendezvous.Record, *, probe: bool = False, expired: bool = False
    ) -> Dial:
        dialling, here = self._mesh.dialling, self._mesh.config.process
        same_host = self._mesh.config.is_near(record.process)
        routes = functools.partial(dialling.routes, record.addresses, same_host)
        dial = Dial(
            self._driver.look(routes),
            incarnation=record.incarnation,
            name=record.name,
            doubts=not (expired or here.same_kernel(record.process)),
            probe=probe,
            # Most whose lease has ended are gone, and are to hold up nobody.
            at_once=expired,
            until=self._deadline + 1.0,
        )
        self._driver.run(functools.partial(dialling.start, dial))
        return dial

    def _greet_recorded(self) -> list[Entry]:
        """Dial whoever is new; those who are recorded and not greeted yet."""
        waiting: list[Entry] = []
        for entry in self._meeting.records():
            record = entry.record
            with self._driver.lead.lock:
                is_greeted = self._is_greeted(record)
                dial = self._dials.get(record.incarnation)
                is_due = dial is None or (dial.done and not dial.refusal)
                if dial is not None:
                    dial.saw_record(entry.age)
            if record.incarnation == self._mesh.config.incarnation or is_greeted:
                continue
            if self._has_ended(record):
                self._meeting.sweep(record.name, record.incarnation)
                continue
            if entry.expired and self._is_given_up(record):
                continue
            self._check_fits(entry)
            waiting.append(entry)
            if is_due:
                dial = self._dial(record, expired=entry.expired)
                self._dials[record.incarnation] = dial
        return waiting

    def _is_given_up(self, record: rendezvous.Record) -> bool:
        """Whether nobody need wait for a member whose lease has ended.

        It may be that it was the rendezvous that could not be reached: so it is dialled
        like any other for some time, and only if it does not answer its record goes.
        """
        who = record.incarnation
        fits = record.backend == self._mesh.config.backend
        if not fits or not within_reach(self._link, record.process):
            return True
        with self._driver.lead.lock:
            dial = self._dials.get(who)
            if dial is None or who in self._mesh.sessions:
                return False
            if dial.waits_its_turn and dial.first_at is None:
                return False
            began = time.monotonic() if dial.first_at is None else dial.first_at
            # Half of the time at most, as there must be some to look once more.
            patience = PROBE_SECONDS * max(1, len(dial.routes))
            until = began + min((self._deadline - began) / 2, patience)
            until = self._patience.setdefault(who, until)
            answered = dial.refusal in STRANGE  # by a stranger
            answered |= dial.doubted is not None and len(dial.routes) == 1
            if time.monotonic() < until and not answered:
                return False
        if who not in self._swept:
            self._swept.add(who)
            self._meeting.sweep(record.name, who, proven=False)
        return True

    def _is_greeted(self, record: rendezvous.Record) -> bool:
        """Whether there is a session; the lock is held, as by all that look for one."""
        session = self._mesh.sessions.get(record.incarnation)
        return session is not None and session.introduced

    def _are_greeted(self, waiting: Sequence[Entry]) -> bool:
        return all(
            self._is_greeted(entry.record)
            or bool(self._dials[entry.record.incarnation].refusal)
            for entry in waiting
        )

    def _settled(self, waiting: Sequence[Entry]) -> bool:
        """Whether all are greeted, or have said that they will not be."""
        return all(
            self._is_greeted(entry.record) or self._has_declined(entry.record)
            for entry in waiting
        )

    def _has_declined(self, record: rendezvous.Record) -> bool:
        # Not who is to dial, or is in session and has not told its subscriptions yet.
        dial = self._dials[record.incarnation]
        known = record.incarnation in self._mesh.sessions
        return dial.done and bool(dial.routes) and not known

    def _raise_refusals(self, waiting: Sequence[Entry], last: bool) -> None:
        for entry in waiting:
            dial = self._dials[entry.record.incarnation]
            if last:
                dial.believe()
            if not (entry.expired and dial.refusal in STRANGE):
                dial.raise_refusal()

    def _explain(self, waiting: Sequence[Entry]) -> str:
        with self._driver.lead.lock:
            lines = [self._tell_of(entry.record) for entry in waiting]
        return (
            f"could not greet within {self._settings.connect_timeout:g} s: "
            + "; ".join(lines)
            + f". They are recorded at {self._meeting.description}; end them, or raise "
            "connect_timeout, as a slow network needs, or above twice their "
            "peer_timeout to see their leases end"
        )

    def _tell_of(self, record: rendezvous.Record) -> str:
        """Who was not greeted, and why; the lock is held."""
        process, networked = record.process, self._link.capabilities.reach == "network"
        happened = self._dials[record.incarnation].tell(record.addresses, networked)
        return f"{record.name!r} (pid {process.pid} on {process.host}, {happened})"
