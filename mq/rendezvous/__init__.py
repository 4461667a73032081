"""Where the members of a group find each other: `open_rendezvous` and `Rendezvous`."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

from mq.errors import MQError
from mq.log import Log
from mq.rendezvous import claimants
from mq.rendezvous.record import Claim, Entry, Record
from mq.rendezvous.store import Store
from mq.rendezvous.worker import Worker

__all__ = ["Claim", "Entry", "Record", "Rendezvous", "open_rendezvous"]

MAX_GROUP_CHARACTERS = 100
OLD_SHARE = 3 / 8
"""Of a lease that is not renewed: who lives begins it anew after a quarter, or sooner.
It is twice `peer_timeout`, so the dead have had half of it when they are given up."""

_log = Log(__name__)


class Rendezvous:
    """The records of one group, for the members of this process.

    `claim`, `records` and `remove` may take up to the time-out, and raise `PeerLost`
    where the store cannot be reached. `renew`, `recent` and `sweep` never wait and
    never raise: on a slow store a thread of the rendezvous does the work. Every method
    may be called from any thread.

    Args:
        store: Where the records are.

    Attributes:
        secret: The group's default secret; b"" where the rendezvous keeps none.
        directory: A directory of mode 0700 on this host for socket files, or None.
            Socket files directly in it are removed with the record that has their
            address.
        description: What and where it is, for people to read.
        on_news: Called by the rendezvous' thread, where it has one, when there is
            something new in `recent`.
        present: Called by any thread for the records of members that are known to be
            there, whatever the store has forgotten.
    """

    def __init__(self, store: Store) -> None:
        self.on_news: Callable[[], None] = lambda: None
        self.present: Callable[[], list[Record]] = list
        self.secret, self.directory = store.secret, store.directory
        self.description = store.description
        self._store = store
        store.present = lambda: self.present()
        self._pid = os.getpid()
        self._incarnations: set[str] = set()
        self._mine: dict[str, Record] = {}
        self._doomed: dict[str, tuple[str, bool]] = {}  # name and proof by incarnation
        self._lost: set[str] = set()
        self._recent: list[Entry] = []
        self._version: str | None = None
        self._read_at = 0.0
        self._is_failing = self._is_closing = False
        self._lock = threading.Lock()
        self._worker = Worker(store.watched, self._return) if store.slow else None

    def claim(self, record: Record, *, replaces: str | None = None) -> Claim:
        """Take a name, atomically among all members.

        Args:
            record: Whose name to take; its generation is ignored.
            replaces: Incarnation of a holder that may be displaced.

        Returns:
            `holder` None: the name is ours, and `record` has its generation, one more
            than that of a displaced holder. Else who holds the name.
        """
        self._incarnations.add(record.incarnation)
        claimants.add(record.incarnation)  # before others can see the record
        claim = self._store.claim(record, replaces=replaces)
        if claim.holder is None:
            with self._lock:
                self._mine[record.name] = claim.record
                self._lost.discard(record.incarnation)
            if self._worker is not None:
                self._worker.look_again()
        return claim

    def records(self) -> list[Entry]:
        """Every stored record, this process's own included."""
        return self._store.records()

    def renew(self, record: Record) -> bool:
        """Begin the lease anew, and write the record again if it is gone.

        Args:
            record: As `claim` returned it.

        Returns:
            False once it is known that another incarnation holds the name.
        """
        with self._lock:
            self._mine[record.name] = record
        self._later(record.name, lambda: self._renew(record))
        return record.incarnation not in self._lost

    def recent(self) -> list[Entry]:
        """The records after the last change that a renewal noticed, or a lease ago.

        After a store lost its memory, members appear here that were not in `records`
        when this member connected; they must be greeted.
        """
        return self._recent

    def sweep(self, name: str, incarnation: str, *, proven: bool = True) -> None:
        """Soon free the name of a member that is dead, or was given up as silent.

        Args:
            proven: Whether it is known to be dead; else its record goes only if it was
                not renewed for long. If it lives it writes it again; but it could not
                make its socket files again, so while it listens there the record stays.
        """
        with self._lock:
            self._doomed[incarnation] = name, proven
        self._later("", self._sweep)

    def _sweep(self) -> None:
        with self._lock:
            doomed, self._doomed = self._doomed, {}
        self._attempt(lambda: self._sweep_now(doomed))

    def _sweep_now(self, doomed: dict[str, tuple[str, bool]]) -> None:
        silent = {who for who, (_, proven) in doomed.items() if not proven}
        for who, (name, proven) in doomed.items():
            if proven:
                self._store.remove(name, who)
        for entry in self._store.recent() if silent else ():
            record = entry.record
            is_old = entry.age > OLD_SHARE * record.lease
            if record.incarnation in silent and is_old:
                if not self._store.is_listening(record):
                    self._store.remove(record.name, record.incarnation)

    def arrived(self) -> None:
        """From now on each call may take the time-out: the member is connected."""
        self._store.until = math.inf

    def close(self) -> None:
        """Give back the names of this process and free everything. Idempotent.

        Does nothing in a forked child.
        """
        if os.getpid() != self._pid:
            return
        self._is_closing = True
        if self._worker is not None:
            self._worker.stop()
        with self._lock:
            mine, self._mine = self._mine, {}
        self._store.timeout = min(self._store.timeout, 1.0)
        self._store.until = time.monotonic() + self._store.timeout
        try:
            for record in mine.values():
                self._store.remove(record.name, record.incarnation)
        except (MQError, ValueError) as error:
            _log.warning("left a record at %s: %s", self.description, error)
        finally:
            claimants.forget(self._incarnations)
            self._store.close()
            if self._worker is not None:
                self._worker.close()

    def _later(self, key: str, job: Callable[[], None]) -> None:
        if self._worker is None:
            job()
        else:
            self._worker.submit(key, job)

    def _return(self) -> None:
        """After the store hung up: reach it again, and see that it knows us."""
        self._attempt(self._store.version)
        with self._lock:
            mine = list(self._mine.values())
        for record in mine:
            self._renew(record)

    def _renew(self, record: Record) -> None:
        with self._lock:
            if self._mine.get(record.name) != record:
                return  # given back, or claimed anew, while this renewal waited
        self._attempt(lambda: self._renew_now(record))

    def _renew_now(self, record: Record) -> None:
        if not self._store.renew(record):
            with self._lock:
                self._lost.add(record.incarnation)
                if self._mine.get(record.name) == record:
                    del self._mine[record.name]
        version, now = self._store.version(), time.monotonic()
        is_news = version != self._version
        if is_news or self._may_have_ended(now):
            self._recent = self._store.recent()
            self._version, self._read_at = version, now
        if is_news and self._worker is not None:
            self.on_news()

    def _may_have_ended(self, now: float) -> bool:
        """Whether a lease may have, of somebody whom no member here has met."""
        recorded = [entry.record for entry in self._recent]
        others = [r for r in recorded if r.incarnation not in self._incarnations]
        if not others or now <= self._read_at + min(r.lease for r in others):
            return False
        met = {r.incarnation for r in self.present()}
        return not met.issuperset(r.incarnation for r in others)

    def _attempt(self, job: Callable[[], object]) -> None:
        try:
            job()
        except (MQError, ValueError) as error:
            if not self._is_failing and not self._is_closing:
                _log.warning("%s; sessions go on, and it is tried again", error)
            self._is_failing = True
        except Exception:  # the thread, or the caller's, has more to do than this
            if not self._is_failing:
                _log.exception("the rendezvous at %s failed", self.description)
            self._is_failing = True
        else:
            self._is_failing = False


def open_rendezvous(
    spec: str | None,
    *,
    group: str,
    secret: bytes | None,
    timeout: float,
    until: float = math.inf,
) -> Rendezvous:
    """Open the rendezvous of a group.

    Args:
        spec: None: a directory of this user on this host. ``file:///path``: a directory
            that all hosts see. ``tcp://host:port``: a service that a member hosts.
            ``env://``: torchrun's store.
        group: Name of the group, 1 to 100 printable characters.
        secret: What all members know, if anything.
        timeout: Seconds for opening, and for each later call.
        until: By `time.monotonic`, when opening, and all calls before `arrived`, must
            have ended.

    Raises:
        ValueError: `spec` or `group` is malformed.
        ConnectTimeout: Nobody answers at the address.
        AuthenticationFailed: The service there knows another secret.
        ConnectRefused: Another version has begun what is there.
        PeerLost: Another program listens there.
        TransportUnavailable: It cannot be used from here.
    """
    check_group(group)
    return Rendezvous(_open_store(spec, group, secret, timeout, until))


def _open_store(
    spec: str | None, group: str, secret: bytes | None, timeout: float, until: float
) -> Store:
    from mq import paths
    from mq.rendezvous import directory

    if spec is None:
        base = paths.local_base()
        return directory.DirectoryStore(
            base, group, shared=False, timeout=timeout, until=until
        )
    scheme = spec.partition("://")[0]
    if scheme == "file":
        from mq.rendezvous.bounded import BoundedStore

        base = paths.shared_path(spec)
        return BoundedStore(
            lambda: directory.DirectoryStore(
                base, group, shared=True, timeout=timeout, until=until
            ),
            f"directory {base}",
            timeout=timeout,
            until=until,
        )
    if scheme == "tcp":
        from mq.rendezvous import tcp

        host, port = tcp.parse_address(spec)
        return tcp.TcpStore(
            host, port, group=group, secret=secret, timeout=timeout, until=until
        )
    if spec == "env://":
        from mq.rendezvous.torchrun import TorchrunStore

        return TorchrunStore(group, timeout, until=until)
    raise ValueError(
        f"unknown rendezvous {spec!r}; known are tcp://host:port, file:///shared/path, "
        "env:// (torchrun), and none at all for the members of one host"
    )


def check_group(group: str) -> None:
    """Check the name of a group.

    Raises:
        TypeError: It is no string.
        ValueError: It is empty, too long, or cannot be printed.
    """
    if not isinstance(group, str):
        raise TypeError(f"a group is a str, not {type(group).__name__}")
    if not 1 <= len(group) <= MAX_GROUP_CHARACTERS or not group.isprintable():
        raise ValueError(
            f"group {group[:120]!r} does not have 1 to {MAX_GROUP_CHARACTERS} "
            "printable characters"
        )
