"""A rendezvous in the key-value store that torchrun runs for its workers.

mq is only ever a client of that store, and only under keys of its own: group, run id
and, with one agent, its restart count, so that nothing of an earlier attempt is seen,
unless one of its processes that lives on finds a later store at the same address.
Several agents count apart, and agree on nothing that tells attempts apart: there the
records of an earlier attempt are seen until their members are found dead. The store has
no clock: a renewal changes a counter, and a lease ends when a reader has seen the same
counter for so long. It has no authentication either, so it keeps no secret.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeVar

from mq import forks
from mq.errors import ConnectRefused, ConnectTimeout, PeerLost, TransportUnavailable
from mq.log import Log, WarnOnce
from mq.rendezvous import unread
from mq.rendezvous.bounded import Calls
from mq.rendezvous.places import Place, Stored, parse, written
from mq.rendezvous.record import Cell, Entry
from mq.rendezvous.store import CellStore

T = TypeVar("T")

VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

LAYOUT: Final = 1
"""The version of all that is under the prefix, which says so under `format` there."""

MAX_LISTED: Final = 1 << 16
"""Places that the list of names may have."""

_ABSENT: Final = "\0"  # neither a name nor a cell
_RETRY_SECONDS: Final = 0.1
MIN_PAUSE_SECONDS: Final = 0.5
MAX_PAUSE_SECONDS: Final = 60.0
"""Between tries where something listens, but not as a store."""


def is_under_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether these variables name a store to meet at."""
    return all(environ.get(variable) for variable in VARIABLES)


class _KeyValues(Protocol):
    """What is used of torch.distributed.TCPStore."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...


class TorchrunStore(CellStore[Stored]):
    """Records in torchrun's TCPStore.

    Args:
        group: Name of the group.
        timeout, until: As of any store.
        environ: Where torchrun's variables are; default `os.environ`.

    Raises:
        ValueError: A variable is missing or malformed.
        TransportUnavailable: torch is not installed, or there is no thread for it.
        ConnectTimeout: The store does not answer.
    """

    secret = b""
    directory = None

    def __init__(
        self,
        group: str,
        timeout: float,
        environ: Mapping[str, str] | None = None,
        *,
        until: float = math.inf,
    ) -> None:
        environ = os.environ if environ is None else environ
        self._host, self._port = _master(environ)
        self.timeout = timeout
        self.until = until
        self.description = f"torchrun's store at {self._host}:{self._port}"
        run = [environ.get("TORCHELASTIC_RUN_ID", "")]
        if environ.get("GROUP_WORLD_SIZE", "1") == "1":
            run.append(environ.get("TORCHELASTIC_RESTART_COUNT", ""))
        scope = hashlib.sha256(json.dumps([group, *run]).encode()).hexdigest()[:24]
        self._prefix = f"mq/{scope}"
        self._calls = Calls()
        self._beats: dict[str, tuple[Stored, float]] = {}
        self._warn = WarnOnce(Log(__name__))
        self._store: _KeyValues | None = None
        self._opened = 0
        self._pause = MIN_PAUSE_SECONDS
        self._again_at = -math.inf
        forks.register(self)
        deadline = self.deadline()
        first = "start under torchrun, let rank 0 start its store first"
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
            first = "call init_process_group before connect, on rank 0 at least"
        self._await_listener(deadline, first)
        self._open(deadline)

    def _await_listener(self, deadline: float, first: str) -> None:
        problem = f"nobody listens at {self.description}"
        while True:
            remaining = deadline - time.monotonic()
            try:
                self._knock(deadline)
                return
            except OSError as error:
                # A cluster may give its hosts their names only after they have started.
                if isinstance(error, socket.gaierror):
                    problem = f"{self._host!r} of {self.description} is no known host"
                if remaining <= 0 or isinstance(error, ConnectTimeout):
                    raise ConnectTimeout(
                        f"{problem} (MASTER_ADDR and MASTER_PORT); {first}, or give "
                        "another rendezvous"
                    ) from error
            self._calls.stopped.wait(min(_RETRY_SECONDS, remaining))

    def _knock(self, deadline: float) -> None:
        """See that somebody listens; TCPStore's own wait cannot be interrupted."""
        address = self._host, self._port
        self._calls.run(
            lambda: socket.create_connection(address, 2.0).close(),
            deadline,
            f"connecting to {self._host}:{self._port}",
        )

    def _open(self, deadline: float) -> _KeyValues:
        begin = time.monotonic()
        try:
            connect_to = importlib.import_module("torch.distributed").TCPStore
        except (ImportError, AttributeError) as error:
            raise TransportUnavailable(
                "rendezvous env:// needs torch.distributed: pip install torch"
            ) from error
        loaded = time.monotonic()
        if begin < deadline <= loaded:
            raise ConnectTimeout(
                f"loading torch took {loaded - begin:.1f} s, and left no time to reach "
                f"{self.description}: import torch before, or raise connect_timeout"
            )
        patience = datetime.timedelta(seconds=max(1.0, deadline - loaded))

        def connect() -> _KeyValues:
            store: _KeyValues = connect_to(
                self._host,
                self._port,
                is_master=False,
                timeout=patience,
                wait_for_workers=False,
                use_libuv=False,  # who hosts it does; not every build of torch has it
            )
            self._check_layout(store)
            return store

        begin = time.monotonic()
        if begin < self._again_at:
            raise ConnectTimeout(f"{self.description} did not answer as a TCPStore")
        try:
            store = self._calls.run(connect, deadline, "opening the store")
        except TransportUnavailable:
            raise
        except (RuntimeError, ConnectTimeout) as error:
            # Of each try TCPStore prints where it was made.
            self._again_at = begin + self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)
            raise ConnectTimeout(
                f"{self.description} does not answer as a TCPStore: {error}; check "
                "MASTER_ADDR and MASTER_PORT"
            ) from error
        self._opened += 1
        self._pause = MIN_PAUSE_SECONDS
        self._store = store
        if self._calls.stopped.is_set():  # another thread closed this meanwhile
            self._store = None
        return store

    def _check_layout(self, store: _KeyValues) -> None:
        key, mine = f"{self._prefix}/format", str(LAYOUT)
        found = store.compare_set(key, "", mine).decode(errors="replace")
        if found != mine:
            raise ConnectRefused(
                f"the group's records in {self.description} are of format "
                f"{found[:20]!r} (key {key}), and this member's of {LAYOUT}: "
                f"{unread.SAME_VERSION}, or give another group"
            )

    def read(self, name: str) -> tuple[Cell | None, Stored]:
        key = self._key(name)
        text = self._ask(functools.partial(_read_key, key))
        if text == _ABSENT:
            return None, Stored("", 0)
        return parse(text, f"the key {key} in {self.description}")

    def swap(self, name: str, token: Stored, new: Cell) -> bool:
        return self._ask(functools.partial(self._replace, name, token, new))

    def _replace(self, name: str, token: Stored, new: Cell, store: _KeyValues) -> bool:
        # On one connection: a store that was begun anew has nothing of the list. A name
        # is on it before it can be held by anybody, and until nobody holds it.
        place = None if new.record is None else self._take_place(name, store)
        won = False
        # What was given up meanwhile must not come true.
        if not self._calls.stopped.is_set():
            won = self._put(name, token, Stored("", 0, place), new, store)
        # In any case: it may have been done before, and the answer been lost.
        store.add(f"{self._prefix}/changes", 1)
        left = token.place if won else place
        if left is not None:
            store.compare_set(self._place_key(left.number), f"{left.nonce} {name}", "")
        return won

    def touch(self, name: str, token: Stored, cell: Cell) -> bool:
        new = token._replace(beat=token.beat + 1)
        return self._ask(functools.partial(self._put, name, token, new, cell))

    def _put(
        self, name: str, token: Stored, new: Stored, cell: Cell, store: _KeyValues
    ) -> bool:
        text = written(cell, new)
        raw = store.compare_set(self._key(name), token.text, text)
        return raw.decode(errors="replace") == text

    def _take_place(self, name: str, store: _KeyValues) -> Place:
        nonce = os.urandom(8).hex()
        text = f"{nonce} {name}"
        count = store.add(f"{self._prefix}/names", 0)
        number = 0 if count <= MAX_LISTED else count
        while True:
            if number >= count:
                number = store.add(f"{self._prefix}/names", 1) - 1
            # A place that was freed compares like one that was never taken.
            raw = store.compare_set(self._place_key(number), "", text)
            if raw.decode(errors="replace") == text:
                return Place(number, nonce)
            number += 1

    def _names(self, strict: bool) -> list[str]:
        count = self._ask(lambda store: store.add(f"{self._prefix}/names", 0))
        if count > MAX_LISTED:
            raise PeerLost(
                f"{self.description} lists {count} names, which no group has: another "
                "program writes to it",
                self.description,
            )
        names = set()
        for key in map(self._place_key, range(count)):
            text = self._ask(functools.partial(_read_key, key))
            if name := text.partition(" ")[2]:
                names.add(name)
            elif text not in ("", _ABSENT):
                error = unread.refusal(
                    f"the key {key} in {self.description}",
                    ValueError(f"{text[:40]!r} is no name and its nonce"),
                )
                self._warn.or_raise(error, strict=strict)
        return sorted(names)

    def entry(self, cell: Cell, token: Stored) -> Entry | None:
        if cell.record is None:
            return None
        now = time.monotonic()
        stored, since = self._beats.get(cell.record.name, (None, now))
        if stored != token:
            since = now
            self._beats[cell.record.name] = token, now
        return Entry(cell.record, now - since)

    def records(self) -> list[Entry]:
        return self._list()

    def recent(self) -> list[Entry]:
        return self._list(strict=False)

    def _list(self, *, strict: bool = True) -> list[Entry]:
        entries = []
        for name in self._names(strict):
            try:
                cell, token = self.read(name)
            except ConnectRefused as error:
                self._warn.or_raise(error, strict=strict)
                continue
            entry = None if cell is None else self.entry(cell, token)
            if entry is not None:
                entries.append(entry)
        return entries

    def version(self) -> str:
        # A store that was begun anew comes to the same numbers again.
        changes = self._ask(lambda store: store.add(f"{self._prefix}/changes", 0))
        return f"{self._opened} {changes}"

    def close(self) -> None:
        self._calls.stopped.set()
        self._store = None  # its connection closes with the last call that uses it

    def abandon(self) -> None:
        """In a forked child: it is the parent's connection."""
        self._store = None

    def _key(self, name: str) -> str:
        return f"{self._prefix}/member/{name}"

    def _place_key(self, number: int) -> str:
        return f"{self._prefix}/name/{number}"

    def _ask(self, call: Callable[[_KeyValues], T]) -> T:
        """Ask the store; once more where it hung up, as every call may be repeated.

        A store that is gone is not waited for: it is looked for by the next request.
        """
        if self._calls.stopped.is_set():
            raise PeerLost(f"{self.description} is closed", self.description)
        deadline = self.deadline()
        store = self._store
        try:
            if store is not None:
                try:
                    return self._calls.run(functools.partial(call, store), deadline)
                except TransportUnavailable:
                    raise
                except RuntimeError:  # the connection is broken, and stays so
                    if self._store is store:
                        self._store = None
            self._knock(deadline)
            store = self._open(deadline)
            return self._calls.run(functools.partial(call, store), deadline)
        except ConnectRefused:
            raise
        except TransportUnavailable as error:
            raise PeerLost(
                f"{self.description} was not asked: {error}", self.description
            ) from error
        except (RuntimeError, OSError) as error:
            raise PeerLost(
                f"{self.description} does not answer: {error}; check that torchrun's "
                "agent, or the rank that hosts the store, still runs",
                self.description,
            ) from error


def _master(environ: Mapping[str, str]) -> tuple[str, int]:
    missing = [variable for variable in VARIABLES if not environ.get(variable)]
    if missing:
        raise ValueError(
            f"rendezvous env:// needs {', '.join(missing)} in the environment; start "
            "the program with torchrun, or give another rendezvous"
        )
    try:
        port = int(environ["MASTER_PORT"])
    except ValueError:
        port = 0
    if not 0 < port < 65536:
        raise ValueError(f"MASTER_PORT {environ['MASTER_PORT']!r} is no port number")
    host = environ["MASTER_ADDR"]
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ValueError(f"MASTER_ADDR {host!r} can be no host: {error}") from error
    return host, port


def _read_key(key: str, store: _KeyValues) -> str:
    # Comparing with what is never stored reads without ever waiting for the key.
    return store.compare_set(key, _ABSENT, _ABSENT).decode(errors="replace")
