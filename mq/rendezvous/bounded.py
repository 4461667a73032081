"""Calls that cannot be interrupted, made so that who waits for them can be."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from mq.errors import ConnectTimeout, MQError, PeerLost, TransportUnavailable
from mq.rendezvous.record import Claim, Entry, Record
from mq.rendezvous.store import Store

T = TypeVar("T")

CALLS: Final = 4
"""At once: what stands still keeps the threads that ask it, a few and not all."""


def bounded(
    call: Callable[[], T],
    deadline: float,
    what: str,
    stopped: threading.Event,
    after: Callable[[], object] = lambda: None,
) -> T:
    """Run a call that cannot be interrupted so that the caller can be.

    Args:
        call: Runs on a thread of its own, which is left behind after the deadline.
        deadline: By `time.monotonic`, in seconds.
        what: What `call` does, for the error.
        stopped: Ends the wait early when set.
        after: Called once `call` has ended, however late, or could not begin.

    Raises:
        ConnectTimeout: The deadline has passed, or `stopped` was set.
        TransportUnavailable: There is no thread for it.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again where it can be handled
            errors.append(error)
        after()
        done.set()

    try:
        threading.Thread(target=run, name="mq-rendezvous", daemon=True).start()
    except RuntimeError as error:
        after()
        raise TransportUnavailable(
            f"{what} can have no thread: {error}; end some, or raise `ulimit -u`"
        ) from error
    while not done.is_set():
        remaining = deadline - time.monotonic()
        if remaining <= 0 or stopped.is_set():
            raise ConnectTimeout(f"{what} did not finish in time")
        done.wait(min(remaining, 0.25))
    if errors:
        raise errors[0]
    return results[0]


class Calls:
    """Runs such calls of one store, a few at once.

    Attributes:
        stopped: Ends every wait when set.
    """

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._turns = threading.BoundedSemaphore(CALLS)

    def run(self, call: Callable[[], T], deadline: float, what: str = "a request") -> T:
        """As `bounded`; the wait for a turn counts."""
        while not self._turns.acquire(timeout=0.25):
            if self.stopped.is_set() or time.monotonic() >= deadline:
                raise ConnectTimeout("earlier requests are still waiting")
        return bounded(call, deadline, what, self.stopped, self._turns.release)

    def outlast(self) -> None:
        """Wait for each call to end, left behind or not; none begins any more."""
        for _ in range(CALLS):
            self._turns.acquire()


class BoundedStore(Store):
    """A store whose calls may stand still, as those of a file system on a network do.

    Args:
        open_store: Opens that store.
        description: What and where it is.
        timeout, until: As of any store.

    Raises:
        ConnectTimeout: It was not open in time.
        TransportUnavailable: There is no thread for it; or `open_store` raised it.
    """

    directory = None

    def __init__(
        self,
        open_store: Callable[[], Store],
        description: str,
        *,
        timeout: float,
        until: float = math.inf,
    ) -> None:
        self.description, self.timeout, self.until = description, timeout, until
        self._calls = Calls()
        self._store: Store | None = None
        self._unanswered: dict[str, str] = {}  # names of claims by incarnation

        def open_it() -> bytes:
            self._store = store = open_store()
            if self._calls.stopped.is_set():  # too late
                store.close()
            return store.secret

        try:
            self.secret = self._run(open_it, "opening it")
        except BaseException:
            self.close()
            raise

    def claim(self, record: Record, *, replaces: str | None = None) -> Claim:
        self._unanswered[record.incarnation] = record.name
        claim = self._ask(lambda store: store.claim(record, replaces=replaces))
        del self._unanswered[record.incarnation]
        return claim

    def records(self) -> list[Entry]:
        return self._ask(lambda store: store.records())

    def recent(self) -> list[Entry]:
        return self._ask(lambda store: store.recent())

    def renew(self, record: Record) -> bool:
        return self._ask(lambda store: store.renew(record))

    def remove(self, name: str, incarnation: str) -> None:
        self._ask(lambda store: store.remove(name, incarnation))

    def version(self) -> str:
        return self._ask(lambda store: store.version())

    def is_listening(self, record: Record) -> bool:
        return self._ask(lambda store: store.is_listening(record))

    def close(self) -> None:
        if self._calls.stopped.is_set():
            return
        self._calls.stopped.set()
        store = self._store
        if store is not None:  # else its opening ends with this
            deadline = time.monotonic() + min(self.timeout, 1.0)
            with contextlib.suppress(MQError):  # what stays ends with its lease
                bounded(
                    functools.partial(self._close, store),
                    deadline,
                    f"closing {self.description}",
                    threading.Event(),
                )

    def _close(self, store: Store) -> None:
        self._calls.outlast()  # a claim that still goes on is not there to be undone
        try:
            for incarnation, name in list(self._unanswered.items()):
                store.remove(name, incarnation)
        finally:
            store.close()

    def _ask(self, call: Callable[[Store], T]) -> T:
        store = self._store
        if store is None or self._calls.stopped.is_set():
            raise PeerLost(f"{self.description} is closed", self.description)
        store.timeout, store.until = self.timeout, self.until
        try:
            return self._run(functools.partial(call, store))
        except ConnectTimeout as error:
            raise PeerLost(str(error), self.description) from error

    def _run(self, call: Callable[[], T], what: str = "a request") -> T:
        try:
            return self._calls.run(call, self.deadline(), what)
        except ConnectTimeout as error:
            raise ConnectTimeout(
                f"{self.description} does not answer: {error}; see that its file "
                "system, and the host that serves it, do not stand still"
            ) from error
