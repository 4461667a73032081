"""Host names of addresses that are dialled, looked up where nobody waits for it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from mq import addresses

PATIENCE_SECONDS: Final = 0.05
"""How long a dial waits for a look-up, once for each; a file of hosts takes less."""
FRESH_SECONDS: Final = 5.0
"""How long what was found is used without looking again."""

Target = tuple[int, Any]


class _Name:
    """What is known of one name.

    Attributes:
        hosts: Its families and addresses, without a port; those of the last look-up
            that found any.
        problem: Why the last look-up found none; "": it did.
        until: Up to when this need not be looked up again, by `time.monotonic`.
        done: Set when the look-up that runs has ended; None: none runs.
    """

    def __init__(self) -> None:
        self.hosts: list[Target] = []
        self.problem = ""
        self.until = 0.0
        self.done: threading.Event | None = None


class Names:
    """The names that one link dials; any thread may ask.

    A resolver that does not answer takes ten seconds and more to say so. Who dials
    holds up everything else of a queue, so a thread looks up, and what was found
    last is used meanwhile.
    """

    def __init__(self) -> None:
        self._names: dict[str, _Name] = {}
        self._lock = threading.Lock()

    def targets(self, host: str, port: int) -> list[Target]:
        """Families and socket addresses of a host, a name or an IP address.

        Args:
            host: An IPv6 address may stand in brackets.

        Raises:
            OSError: The name is unknown, or is still being looked up; names it.
        """
        host = host.strip("[]")
        try:
            return addresses.look_up(host, port, socket.AI_NUMERICHOST)
        except OSError:
            found = self._find(host)
        return [(family, (at[0], port, *at[2:])) for family, at in found]

    def unanswered(self, host: str, target: Any, standing: Iterable[Any]) -> None:
        """A dial has ended without a connection: another address of a name is next.

        Unless a connection there stands: this dial was begun beside that.

        Args:
            host: As `targets` was asked for it.
            target: The socket address that was dialled.
            standing: Those of the connections that were dialled and stand.
        """
        if target not in standing:
            self.failed(host, target[0])

    def failed(self, host: str, number: str) -> None:
        """Try an address of a name last: it did not answer.

        Args:
            host: As `targets` was asked for it.
            number: The address; other dials of the name may have said so, too.
        """
        with self._lock:
            name = self._names.get(host.strip("[]"))
            if name is not None:
                name.hosts = sorted(name.hosts, key=lambda found: found[1][0] == number)

    def _find(self, host: str) -> Sequence[Target]:
        with self._lock:
            name = self._names.setdefault(host, _Name())
            begins = name.done is None and time.monotonic() >= name.until
            if begins:
                done = name.done = threading.Event()
                try:
                    self._start(host, name)
                except RuntimeError as error:
                    name.done = None
                    raise OSError(
                        f"the host {host!r} is not looked up: {error}"
                    ) from error
        if begins:
            done.wait(PATIENCE_SECONDS)
        with self._lock:
            if name.hosts:
                return name.hosts
            if name.problem:
                raise OSError(name.problem)
        raise OSError(f"the host {host!r} is still being looked up")

    def _start(self, host: str, name: _Name) -> None:
        thread = threading.Thread(
            target=self._look_up, args=(host, name), name="mq-names", daemon=True
        )
        thread.start()

    def _look_up(self, host: str, name: _Name) -> None:
        found: list[Target] = []
        problem = ""
        try:
            found = addresses.look_up(host)
        except OSError as error:
            problem = str(error)
        with self._lock:
            if set(found) != set(name.hosts):  # else the one that answered stays first
                name.hosts = found or name.hosts
            name.problem = problem
            name.until = time.monotonic() + (FRESH_SECONDS if found else 0.0)
            assert name.done is not None
            name.done.set()
            name.done = None
