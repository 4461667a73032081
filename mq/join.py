"""How a member joins its group, and what it holds and keeps up from then on."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mq import forks, process, registry, rendezvous
from mq.arrival import Arrival, lease_seconds, record_of, within_reach
from mq.attaching import Attached
from mq.descriptors import check_descriptors
from mq.errors import Closed, ConnectRefused, MQError, TransportUnavailable
from mq.log import Log
from mq.mesh.config import Config
from mq.mesh.dial import Dial
from mq.mesh.driver import Driver
from mq.mesh.mesh import Mesh
from mq.mesh.poller import Poller
from mq.rendezvous import claimants
from mq.settings import told
from mq.threads import QUEUE_THREADS, check_threads
from mq.transport import LINGER_SECONDS

if TYPE_CHECKING:
    from mq.buffers import Pool
    from mq.codec import Codec
    from mq.mesh.handshake import Greeting
    from mq.rendezvous import Entry, Rendezvous
    from mq.settings import Settings
    from mq.transport import Link
    from mq.undisturbed import Stopper

logger = Log(__name__)

IDLE_MEMORY_SECONDS: Final = 30.0
"""How long message memory that nobody uses is kept for the next message."""

MOST_UPKEEP_SECONDS: Final = 5.0
"""How often a member looks who is new at the rendezvous, at least. Whoever cannot reach
it waits for that in `connect`."""

_PATCHES: Final = (
    (
        "gevent.monkey",
        "is_module_patched",
        {"select": "select", "_thread": "thread"},
        "a gevent.threadpool.ThreadPool",
    ),
    (
        "eventlet.patcher",
        "is_monkey_patched",
        {"select": "select", "thread": "thread", "socket": "socket"},
        "eventlet.tpool",
    ),
)
"""Who puts its own in place of what threads wait by: how it is asked, by which names,
what these are called where one says what to patch, and where one may wait instead."""


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
    attached: Attached

    def close(self, linger: float = LINGER_SECONDS) -> None:
        """Free everything; engines have `linger` seconds to send what they have."""
        _free(self.link, self.poller, self.meeting, self.driver, linger)
        self.pool.close()

    def begin_upkeep(self, peer_timeout: float | None) -> None:
        """From now on see to the rendezvous, often enough for a lease to last."""
        driver, meeting = self.driver, self.meeting
        driver.lead.upkeep = self.upkeep
        lease = lease_seconds(peer_timeout)
        driver.lead.upkeep_seconds = min(lease / 4, MOST_UPKEEP_SECONDS)
        if meeting is not None:
            meeting.on_news = driver.lead.upkeep_soon
            meeting.present = self.present

    def upkeep(self) -> None:
        """Renew the lease, sweep the dead, greet who is new; never waits long."""
        self.pool.trim(IDLE_MEMORY_SECONDS)
        self.link.trim(IDLE_MEMORY_SECONDS)
        meeting, record, driver = self.meeting, self.record, self.driver
        mesh = driver.mesh
        ended, forgotten = driver.look(self._news)
        if ended and not mesh.replaced:
            driver.replace(ended)
            logger.warning(
                "queue %r can only be closed: %s", mesh.config.name, mesh.replaced
            )
        self.attached.keep()
        if meeting is None or record is None:
            return
        if not meeting.renew(record):
            driver.replace(f"replaced by another {record.name!r}, which took the name")
        if mesh.replaced:  # others may have told so, too
            return
        for peer, proven in forgotten:
            meeting.sweep(peer.name, peer.incarnation, proven=proven)
        for entry in meeting.recent():
            self._greet(entry)

    def _news(self) -> tuple[str, list[tuple[Greeting, bool]]]:
        """Whether the link has ended, and who was forgotten since the last time."""
        mesh = self.driver.mesh
        forgotten, mesh.forgotten = mesh.forgotten, []
        return self.link.ended, forgotten

    def present(self) -> list[rendezvous.Record]:
        """Of whom this member is in session with, and who may be found by others."""
        mesh = self.driver.mesh

        def peers() -> list[Greeting]:
            return [
                session.peer
                for session in mesh.sessions.values()
                if session.introduced
                and session.peer.generation
                and not (session.watch and session.watch.ended())
            ]

        records = []
        for peer in self.driver.look(peers):
            with contextlib.suppress(ValueError):  # nor has it written one
                records.append(record_of(peer))
        return records

    def _greet(self, entry: Entry) -> None:
        """Dial a member that the rendezvous did not know of when this one joined."""
        mesh, other = self.driver.mesh, entry.record

        def is_known() -> bool:
            known = {mesh.config.incarnation, *mesh.sessions}
            known.update(dial.incarnation for dial in mesh.dialling.dials)
            return other.incarnation in known

        if self.driver.look(is_known) or entry.expired or self.driver.lead.closing:
            return
        if claimants.has_ended(other, mesh.config.process):
            assert self.meeting is not None
            self.meeting.sweep(other.name, other.incarnation)
            return
        if not within_reach(self.link, other.process):
            return  # it will be told so itself
        same_host = mesh.config.is_near(other.process)
        find = functools.partial(mesh.dialling.routes, other.addresses, same_host)
        routes, until = self.driver.look(find), time.monotonic() + other.lease
        dial = Dial(routes, incarnation=other.incarnation, name=other.name, until=until)
        self.driver.run(functools.partial(mesh.dialling.start, dial))


def join(
    settings: Settings,
    codec: Codec,
    pool: Pool,
    options: dict[str, object],
    stopper: Stopper,
) -> Joined:
    """Connect to a group.

    Args:
        settings: Of the queue.
        codec, pool: Its codec and its memory.
        options: Of the transport.
        stopper: Ends it early.

    Raises:
        UnknownTransport, TransportUnavailable, TypeError, ValueError: Bad arguments.
        ConnectTimeout, ConnectRefused, AuthenticationFailed: The group could not be
            joined; nothing is left behind.
    """
    deadline = time.monotonic() + settings.connect_timeout
    check_patches()
    check_descriptors()
    link = _link(settings, options)
    settings = settings.as_given_to(link)
    meeting: Rendezvous | None = None
    poller = Poller()
    if link.capabilities.reach == "process":
        poller.spins = False  # whom one waits for needs the interpreter lock
    driver: Driver | None = None
    try:
        meeting = _meeting(settings, deadline)
        secret = settings.secret or (meeting.secret if meeting is not None else b"")
        addresses = _listen(settings, link, poller, meeting, secret)
        config = _config(settings, codec, secret, addresses)
        config.dial_back = meeting is not None
        mesh = Mesh(config, [link], take=pool.take, clock=time.monotonic)
        where = (
            f"{settings.backend} queue {settings.name!r} of group {settings.group!r}"
        )
        driver = Driver(mesh, poller, where)
        stopper.on_stop(driver.lead.end_calls)
        attached = Attached(settings, driver)
        joined = Joined(driver, link, poller, meeting, None, addresses, pool, attached)
        joined.begin_upkeep(settings.peer_timeout)
        driver.lead.start()
        if meeting is not None:
            arrival = Arrival(settings, driver, link, meeting, deadline)
            joined.record = arrival.claim()
            arrival.greet_all()
            meeting.arrived()
        attached.reach(deadline)
        driver.run(link.connected)
        more = "".join(f", {k} {v}" for k, v in driver.look(link.describe).items())
    except BaseException as error:
        if driver is not None:
            driver.lead.end_calls()
            with contextlib.suppress(Exception):  # the first error is the one to tell
                driver.leave("could not join", 0.0)
        why = driver.mesh.replaced if driver and isinstance(error, Closed) else ""
        ended = why and link.ended  # a link that was closed may seem so, too
        _free(link, poller, meeting, driver)
        if why:
            raise _not_joined(where, ended, why) from error
        raise
    logger.info("%s listens on %s%s", where, ", ".join(addresses), more)
    return joined


def _not_joined(where: str, ended: str, why: str) -> MQError:
    """The error where a member had to stop before it had joined."""
    if ended:
        return TransportUnavailable(f"{where} could not join: {why}")
    return ConnectRefused(
        f"{where} could not join: {why} meanwhile; choose another name, or end the "
        "other"
    )


def _link(settings: Settings, options: dict[str, object]) -> Link:
    """What the member is to travel by, not open yet."""
    with told(settings.sources["backend"], f"transport {settings.backend!r}"):
        link = registry.create(settings.backend, options)
    needed = QUEUE_THREADS + link.engine_threads
    check_threads(f"a queue over {settings.backend!r}", needed)
    forks.register(link)
    link.insecure = settings.insecure
    link.member_name = settings.name
    return link


def _meeting(settings: Settings, deadline: float) -> Rendezvous | None:
    """Where members meet; None where they are told each other's addresses."""
    if settings.explicit:
        return None
    with told(settings.sources["rendezvous"], "rendezvous"):
        return rendezvous.open_rendezvous(
            settings.rendezvous,
            group=settings.group,
            secret=settings.secret,
            timeout=settings.connect_timeout,
            until=deadline,
        )


def _listen(
    settings: Settings,
    link: Link,
    poller: Poller,
    meeting: Rendezvous | None,
    secret: bytes,
) -> list[str]:
    """Open the link; the addresses at which others reach it."""
    directory = None if meeting is None else meeting.directory
    with told(settings.sources["listen"], *settings.listen):
        check_listen(settings, link, secret)
        addresses = link.open(poller, settings.listen, directory)
    check_addresses(link, addresses)
    return addresses


def _free(
    link: Link,
    poller: Poller,
    meeting: Rendezvous | None,
    driver: Driver | None,
    linger: float = LINGER_SECONDS,
) -> None:
    """Close what a member has, as far as it has come."""
    if driver is not None:
        driver.lead.stop()
    if meeting is not None:
        meeting.close()
    if driver is None:
        link.close(linger)
    else:
        with driver.lead.lock:
            driver.mesh.close(linger)
    poller.close()


def check_patches() -> None:
    """See that nobody has replaced what a queue's threads wait by.

    Raises:
        TransportUnavailable: gevent or eventlet has.
    """
    for module, asks, patches, pool in _PATCHES:
        library = sys.modules.get(module)  # who has not loaded it has patched nothing
        if library is None:
            continue
        for patch, what in patches.items():
            if getattr(library, asks)(patch):
                name = module.partition(".")[0]
                raise TransportUnavailable(
                    f"{name} has patched Python's {what}, by which a queue's threads "
                    f"wait: leave out {', '.join(patches.values())} when it patches, "
                    f"and call the queue in {pool}"
                )


def check_addresses(link: Link, addresses: object) -> None:
    """Raises: TypeError, if a link returned something else when it was opened."""
    if not isinstance(addresses, list) or not all(
        isinstance(a, str) for a in addresses
    ):
        raise TypeError(
            f"{type(link).__name__}.open returned {addresses!r}, which is no list of "
            "addresses, each a str"
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
        versions=versions(),
        accepts=codec.accepts,
        watch=watch,
    )


def versions() -> dict[str, str]:
    """Of what both ends of a connection should have alike, as peers are told them."""
    found = {name: _version(name) for name in ("tensormq", "torch")}
    return {"python": sys.version.split()[0], **found}


@functools.cache  # it takes some milliseconds to look that up
def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
