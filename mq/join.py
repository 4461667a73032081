"""How a member joins its group: meet, claim a name, greet everyone."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mq import process, registry, rendezvous
from mq.errors import (
    AuthenticationFailed,
    ConnectRefused,
    ConnectTimeout,
    TransportUnavailable,
)
from mq.mesh import handshake as hs
from mq.mesh.config import Config
from mq.mesh.dial import Dial
from mq.mesh.driver import Driver
from mq.mesh.mesh import Mesh
from mq.mesh.poller import Poller

if TYPE_CHECKING:
    from mq.buffers import Pool
    from mq.codec import Codec
    from mq.rendezvous import Entry, Rendezvous
    from mq.settings import Settings
    from mq.transport import Link

logger = logging.getLogger(__name__)

PROBE_SECONDS: Final = 2.0
"""How long the holder of a name has to answer before the name is given away."""
LOOK_SECONDS: Final = 0.25
"""How often a joiner looks again who is recorded, while it waits."""
SPARE_DESCRIPTORS: Final = 32
"""File descriptors that must be free to connect."""
IDLE_MEMORY_SECONDS: Final = 30.0
"""How long message memory that nobody uses is kept for the next message."""
DEFAULT_LEASE: Final = 20.0
"""Seconds a record lives without renewal where `peer_timeout` is None."""


@dataclass
class Joined:
    """What a connected member holds."""

    driver: Driver
    link: Link
    poller: Poller
    meeting: Rendezvous | None
    record: rendezvous.Record | None
    addresses: list[str]
    pool: Pool

    def close(self) -> None:
        """Free everything; nothing is sent any more."""
        self.driver.stop()
        if self.meeting is not None:
            self.meeting.close()
        with self.driver.lock:
            self.driver.mesh.close()
        self.poller.close()

    def abandon(self) -> None:
        """In a forked child: close inherited descriptors, touch nothing else."""
        self.driver.abandon()
        self.link.abandon()
        if self.meeting is not None:
            self.meeting.abandon()
        self.poller.close()

    def upkeep(self) -> None:
        """Renew the lease, sweep the dead, greet who is new; never waits long."""
        self.pool.trim(IDLE_MEMORY_SECONDS)
        if self.link.lender is not None:
            self.link.lender.trim(IDLE_MEMORY_SECONDS)
        meeting, record, mesh = self.meeting, self.record, self.driver.mesh
        if meeting is None or record is None:
            mesh.forgotten.clear()
            return
        if not meeting.renew(record):
            mesh.replace(f"another {record.name!r} took the name")
            self.driver.poller.wake()
        while mesh.forgotten:
            peer = mesh.forgotten.pop()
            meeting.sweep(peer.name, peer.incarnation)
        for entry in meeting.recent():
            self._greet(entry)

    def _greet(self, entry: Entry) -> None:
        """Dial a member that the rendezvous did not know of when this one joined."""
        mesh, other = self.driver.mesh, entry.record
        known = {self.driver.mesh.config.incarnation, *mesh.sessions}
        known.update(dial.incarnation for dial in mesh.greetings.dials)
        if other.incarnation in known or entry.expired or self.driver.closing:
            return
        same_host = other.process.boot_id == mesh.config.process.boot_id
        routes = mesh.greetings.routes(other.addresses, same_host)
        until = time.monotonic() + other.lease
        dial = Dial(routes, incarnation=other.incarnation, name=other.name, until=until)
        self.driver.run(functools.partial(mesh.greetings.start, dial))


def join(
    settings: Settings, codec: Codec, pool: Pool, options: dict[str, object]
) -> Joined:
    """Connect to a group.

    Raises:
        UnknownTransport, TransportUnavailable, TypeError, ValueError: Bad arguments.
        ConnectTimeout, ConnectRefused, AuthenticationFailed: The group could not be
            joined; nothing is left behind.
    """
    deadline = time.monotonic() + settings.connect_timeout
    check_descriptors()
    link = registry.create(settings.backend, options)
    link.insecure = settings.insecure
    meeting: Rendezvous | None = None
    poller = Poller()
    if link.capabilities.reach == "process":
        poller.spins = False  # whom one waits for needs the interpreter lock
    driver: Driver | None = None
    try:
        if not settings.explicit:
            meeting = rendezvous.open_rendezvous(
                settings.rendezvous,
                group=settings.group,
                secret=settings.secret,
                timeout=settings.connect_timeout,
            )
        secret = settings.secret or (meeting.secret if meeting is not None else b"")
        check_listen(settings, link, secret)
        directory = None if meeting is None else meeting.directory
        addresses = link.open(poller, settings.listen, directory)
        config = _config(settings, codec, secret, addresses)
        config.dial_back = meeting is not None
        mesh = Mesh(config, [link], take=pool.take, clock=time.monotonic)
        where = (
            f"{settings.backend} queue {settings.name!r} of group {settings.group!r}"
        )
        driver = Driver(mesh, poller, where)
        joined = Joined(driver, link, poller, meeting, None, addresses, pool)
        driver.upkeep = joined.upkeep
        driver.upkeep_seconds = _lease(settings) / 4
        driver.start()
        if meeting is not None:
            _Joiner(settings, driver, meeting, deadline).run(joined)
        _dial_explicit(settings, driver, deadline)
    except BaseException:
        if driver is not None:
            driver.closing = True
            with contextlib.suppress(Exception):  # the first error is the one to tell
                driver.leave("could not join", 0.0)
            driver.stop()
        if meeting is not None:
            meeting.close()
        link.close()
        poller.close()
        raise
    if logger.isEnabledFor(logging.INFO):
        more = "".join(f", {k} {v}" for k, v in link.describe().items())
        logger.info("%s listens on %s%s", where, ", ".join(addresses), more)
    return joined


def check_descriptors() -> None:
    """Raises: TransportUnavailable, if this process may open too few descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError as error:  # where it cannot be known, but for one reason
        used = limit if error.errno == errno.EMFILE else 0
    if limit != resource.RLIM_INFINITY and used + SPARE_DESCRIPTORS > limit:
        raise TransportUnavailable(
            f"{used} file descriptors are open and RLIMIT_NOFILE is {limit}, but a "
            f"queue needs {SPARE_DESCRIPTORS} and a few more for each member; raise it "
            "with `ulimit -n`"
        )


def check_listen(settings: Settings, link: Link, secret: bytes) -> None:
    """Raises: ValueError, if others could reach this member without a secret."""
    if settings.insecure or secret:
        return
    for address in settings.listen:
        if link.is_routable(address):
            raise ValueError(
                f"listen={address!r} can be reached from other hosts, but there is no "
                "secret: pass secret=... (or MQ_SECRET), or insecure=True if everyone "
                "who can reach it may join"
            )


def _lease(settings: Settings) -> float:
    timeout = settings.peer_timeout
    return DEFAULT_LEASE if timeout is None else 2 * timeout


def _config(
    settings: Settings, codec: Codec, secret: bytes, addresses: list[str]
) -> Config:
    here = process.here()

    def watch(peer: process.ProcessId) -> process.ProcessWatch | None:
        if peer.pid == here.pid or not here.same_kernel(peer):
            return None
        return process.ProcessWatch(peer)

    return Config(
        group=settings.group,
        name=settings.name,
        incarnation=os.urandom(16).hex(),
        backend=settings.backend,
        process=here,
        since=time.time(),
        labels=list(settings.labels),
        addresses=addresses,
        secret=secret,
        peer_timeout=settings.peer_timeout,
        max_message_bytes=settings.max_message_bytes,
        versions=_versions(),
        accepts=codec.accepts,
        watch=watch,
    )


def _versions() -> dict[str, str]:
    import platform
    from importlib import metadata

    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "not installed"

    packages = {package: version(package) for package in ("tensormq", "torch")}
    return {"python": platform.python_version(), **packages}


class _Joiner:
    """Claims a name at the rendezvous, then greets everyone recorded there."""

    def __init__(
        self,
        settings: Settings,
        driver: Driver,
        meeting: Rendezvous,
        deadline: float,
    ) -> None:
        self._settings = settings
        self._driver = driver
        self._mesh = driver.mesh
        self._meeting = meeting
        self._deadline = deadline
        self._dials: dict[str, Dial] = {}

    def run(self, joined: Joined) -> None:
        record = self._claim()
        joined.record = record
        while True:
            waiting = self._greet_recorded()
            if not waiting:
                return
            self._raise_refusals()
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise ConnectTimeout(self._explain(waiting))
            settled = functools.partial(self._settled, waiting)
            self._driver.wait_until(settled, min(left, LOOK_SECONDS))

    # -- the name ----------

    def _claim(self) -> rendezvous.Record:
        config = self._mesh.config
        record = rendezvous.Record(
            name=config.name,
            incarnation=config.incarnation,
            generation=0,
            backend=config.backend,
            addresses=tuple(config.addresses),
            process=config.process,
            labels=tuple(config.labels),
            since=config.since,
            lease=_lease(self._settings),
        )
        replaces: str | None = None
        while True:
            claim = self._meeting.claim(record, replaces=replaces)
            if claim.holder is None:
                config.generation = claim.record.generation
                return claim.record
            holder = claim.holder.record
            self._check_backend(holder)
            if self._is_alive(holder):
                raise ConnectRefused(
                    f"name {config.name!r} in group {config.group!r} is held by pid "
                    f"{holder.process.pid} on {holder.process.host}; choose another "
                    "name or end that process"
                )
            if time.monotonic() > self._deadline:
                raise ConnectTimeout(
                    f"could not get name {config.name!r} within "
                    f"{self._settings.connect_timeout:g} s at "
                    f"{self._meeting.description}: others claim it too"
                )
            replaces = holder.incarnation

    def _check_backend(self, record: rendezvous.Record) -> None:
        mine = self._mesh.config.backend
        if record.backend != mine and not self._has_ended(record):
            raise ConnectRefused(
                f"group {self._settings.group!r} uses backend {record.backend!r}, not "
                f"{mine!r} (member {record.name!r}, pid {record.process.pid} on "
                f"{record.process.host}); use the same backend or another group"
            )

    def _has_ended(self, record: rendezvous.Record) -> bool:
        if not self._mesh.config.process.same_kernel(record.process):
            return False
        watch = process.ProcessWatch(record.process)
        try:
            return watch.ended() is True
        finally:
            watch.close()

    def _is_alive(self, record: rendezvous.Record) -> bool:
        """Ask the holder of a name; silence for `PROBE_SECONDS` counts as death."""
        if self._has_ended(record):
            return False
        dial = self._dial(record, probe=True)
        self._driver.wait_until(lambda: dial.done, PROBE_SECONDS)
        self._driver.run(lambda: self._mesh.greetings.cancel(dial))
        self._raise_if_refused(record.name, dial)
        welcome = dial.welcome
        return welcome is not None and welcome.incarnation == record.incarnation

    # -- the others ----------

    def _dial(self, record: rendezvous.Record, *, probe: bool = False) -> Dial:
        greetings = self._mesh.greetings
        same_host = record.process.boot_id == self._mesh.config.process.boot_id
        dial = Dial(
            greetings.routes(record.addresses, same_host),
            incarnation=record.incarnation,
            name=record.name,
            probe=probe,
            until=time.monotonic() + PROBE_SECONDS if probe else self._deadline + 1.0,
        )
        self._driver.run(functools.partial(greetings.start, dial))
        return dial

    def _greet_recorded(self) -> list[Entry]:
        """Dial whoever is new; those who are recorded and not greeted yet."""
        mine = self._mesh.config.incarnation
        waiting: list[Entry] = []
        for entry in self._meeting.records():
            record = entry.record
            if record.incarnation == mine or self._is_greeted(record):
                continue
            if self._has_ended(record):
                self._meeting.sweep(record.name, record.incarnation)
                continue
            if entry.expired:
                continue
            self._check_backend(record)
            waiting.append(entry)
            dial = self._dials.get(record.incarnation)
            if dial is None or (dial.done and not dial.refusal):
                self._dials[record.incarnation] = self._dial(record)
        return waiting

    def _is_greeted(self, record: rendezvous.Record) -> bool:
        session = self._mesh.sessions.get(record.incarnation)
        return session is not None and session.introduced

    def _settled(self, waiting: Sequence[Entry]) -> bool:
        return all(
            self._is_greeted(entry.record)
            or bool(self._dials[entry.record.incarnation].refusal)
            for entry in waiting
        )

    def _raise_refusals(self) -> None:
        for dial in self._dials.values():
            self._raise_if_refused(dial.name, dial)

    @staticmethod
    def _raise_if_refused(name: str, dial: Dial) -> None:
        raise_refusal(name, dial)

    def _explain(self, waiting: Sequence[Entry]) -> str:
        lines = []
        for entry in waiting:
            record = entry.record
            dial = self._dials[record.incarnation]
            lines.append(
                f"{record.name!r} (pid {record.process.pid} on {record.process.host}, "
                f"tried {', '.join(record.addresses)}: {dial.error or 'no answer'})"
            )
        return (
            f"could not greet within {self._settings.connect_timeout:g} s: "
            + "; ".join(lines)
            + f". They are recorded at {self._meeting.description}; end them, or raise "
            "connect_timeout above twice their peer_timeout to see their leases end"
        )


def raise_refusal(name: str, dial: Dial) -> None:
    """Raises: ConnectRefused or AuthenticationFailed, if a dial was refused."""
    if not dial.refusal:
        return
    who = repr(name) if name else "the member"
    text = f"{who} at {dial.address} refused this member: {dial.error}"
    if dial.refusal == hs.SECRET:
        raise AuthenticationFailed(f"{text}. Use the same secret everywhere")
    raise ConnectRefused(text)


def _dial_explicit(settings: Settings, driver: Driver, deadline: float) -> None:
    mesh = driver.mesh
    dials = []
    for address in settings.attach_to:
        routes = mesh.greetings.routes([address], same_host=True)
        if not routes:
            raise ValueError(
                f"attach_to={address!r} is no address of backend {settings.backend!r}"
            )
        dial = Dial(routes, until=deadline + 1.0)
        dials.append(dial)
        driver.run(functools.partial(mesh.greetings.start, dial))

    def reached(dial: Dial) -> bool:
        session = mesh.sessions.get(dial.incarnation)
        return session is not None and session.introduced

    def settled() -> bool:
        return any(d.refusal for d in dials) or all(map(reached, dials))

    arrived = driver.wait_until(settled, max(0.0, deadline - time.monotonic()))
    for dial in dials:
        raise_refusal("", dial)
    if not arrived:
        missing = "; ".join(
            f"{d.address} ({d.error or 'no answer'})" for d in dials if not reached(d)
        )
        raise ConnectTimeout(
            f"could not greet within {settings.connect_timeout:g} s: {missing}. Is a "
            "member of this group listening there?"
        )
