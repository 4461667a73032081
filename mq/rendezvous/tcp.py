"""A rendezvous at a TCP address, hosted by whichever member could bind it first.

The service keeps records in memory only. When its process ends, every other member
notices by its connection, one of them binds the address again, and all announce
themselves anew; whoever joins meanwhile waits for them. Sessions between members do
not depend on it.

Without a secret only loopback addresses are served; the key then lies in this user's
rendezvous directory, so that it outlives whoever hosts and no other user can read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import threading
import time
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from mq.addresses import has_link, is_loopback, is_wildcard, look_up
from mq.descriptors import out_of_descriptors
from mq.errors import (
    AuthenticationFailed,
    ConnectRefused,
    ConnectTimeout,
    MQError,
    PeerLost,
    TransportUnavailable,
)
from mq.paths import local_base
from mq.rendezvous import unread
from mq.rendezvous.bounded import bounded
from mq.rendezvous.channel import Address, Channel
from mq.rendezvous.directory import DirectoryStore
from mq.rendezvous.memory import MAX_NAMES
from mq.rendezvous.record import Claim, Entry, Record
from mq.rendezvous.service import Service, listen
from mq.rendezvous.store import Store

_RETRY_SECONDS: Final = 0.1
_SERVE_SECONDS: Final = 10.0  # to look up the host, and for the files of its key


def parse_address(spec: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``.

    Raises:
        ValueError: It has another form.
    """
    try:
        parts = urlsplit(spec)
        host, port = parts.hostname, parts.port
        if host and port and spec.count("@") == 0 and not any(parts[2:]):
            return host, port
    except ValueError:
        pass
    raise ValueError(
        f"rendezvous {spec!r} is not of the form tcp://host:port, such as "
        "tcp://127.0.0.1:29600"
    )


def _resolve(
    host: str, port: int, deadline: float, stopped: threading.Event
) -> Address:
    def choose() -> Address:
        try:
            found = look_up(host, port)
        except OSError as error:
            raise TransportUnavailable(f"no rendezvous: {error}") from error
        # All members must choose alike, also where IPv6 is half set up, and where a
        # name server gives the addresses of a name in turns.
        return min((Address(*item) for item in found), key=Address.order)

    return bounded(
        choose, deadline, f"looking up the rendezvous host {host!r}", stopped
    )


def _open_keyring(address: Address, timeout: float) -> DirectoryStore:
    if not is_loopback(address.sockaddr[0]):
        raise TransportUnavailable(
            f"a rendezvous at {address} can be reached by others and needs a secret: "
            "give all members the same secret= or MQ_SECRET, and `mq rendezvous` the "
            "same MQ_SECRET or --secret-file"
        )
    group = f"\0{address}"  # not printable, so no group of members has this name
    try:
        base = local_base()
    except TransportUnavailable as error:
        raise TransportUnavailable(f"{error}, or give all a secret=") from error
    return DirectoryStore(base, group, shared=False, timeout=timeout)


def serve(host: str, port: int, secret: bytes | None = None) -> Service:
    """Host a rendezvous in this process until the service is closed.

    Args:
        host: Name or number of an address of this host; only that one is bound.
        port: Port; 0 chooses one, see `Service.address`.
        secret: What members must know; None on loopback: the key of this user.

    Raises:
        TransportUnavailable: The address is in use or not this host's, or is routable
            and there is no secret; or this process can have no descriptor or thread.
    """
    deadline = time.monotonic() + _SERVE_SECONDS
    host = "0.0.0.0" if host == "*" else host
    address = _resolve(host, port, deadline, threading.Event())
    try:
        listener, succeeds = listen(*address)
        if secret:
            return Service(listener, secret, succeeds)
        try:
            bound = Address(address.family, listener.getsockname())
            keyring = _open_keyring(bound, _SERVE_SECONDS)
        except BaseException:
            listener.close()
            raise
        return Service(listener, keyring.secret, succeeds, on_close=keyring.close)
    except MQError:
        raise
    except OSError as error:
        why = error.strerror
        remedy = out_of_descriptors(error) or (
            "choose another of this host, or start none if a member hosts it already"
        )
        problem: Exception = error
    except RuntimeError as error:
        why, remedy, problem = str(error), "end some, or raise `ulimit -u`", error
    raise TransportUnavailable(
        f"cannot serve a rendezvous at {address}: {why}; {remedy}"
    ) from problem


class TcpStore(Store):
    """A client of the rendezvous service, and its host where there is none yet.

    Args:
        host: Host of the service, as a name or number.
        port: Its port.
        group: Name of the group.
        secret: What all members know; None only on loopback.
        timeout, until: As of any store.
    """

    directory = None

    def __init__(
        self,
        host: str,
        port: int,
        *,
        group: str,
        secret: bytes | None,
        timeout: float,
        until: float = math.inf,
    ) -> None:
        self.timeout = timeout
        self.until = until
        deadline = self.deadline()
        self._group = group
        self._stopped = threading.Event()
        self._mutex = threading.Lock()
        self._channel: Channel | None = None
        self._service: Service | None = None
        self._keyring: DirectoryStore | None = None
        self._announced: dict[str, Record] = {}
        self._version = ""
        self._has_met = False  # somebody who listened there, if only to hang up
        if is_wildcard(host):
            raise ValueError(
                f"rendezvous address {host!r} stands for all addresses; name one that "
                "every member can reach"
            )
        self._address = _resolve(host, port, deadline, self._stopped)
        self.description = f"service {self._address}"
        if secret:
            self._secret = self.secret = secret
        else:
            self._keyring = _open_keyring(self._address, deadline - time.monotonic())
            self._secret = self._keyring.secret
            purpose = b"mq group " + group.encode()
            self.secret = hmac.new(self._secret, purpose, hashlib.sha256).digest()
        try:
            with self._turn(deadline):
                self._reach(deadline)
        except BaseException:
            self.close()
            raise

    # Requests

    def claim(self, record: Record, *, replaces: str | None = None) -> Claim:
        answer = self._call(do="claim", record=record.to_json(), replaces=replaces)
        if "holder" in answer:
            return Claim(record, _entry(answer["holder"], answer.get("age")))
        won = unread.received(str(answer.get("record")))
        self._announced[record.name] = won
        return Claim(won, None)

    def records(self) -> list[Entry]:
        return self._records("records")

    def recent(self) -> list[Entry]:
        return self._records("recent")

    def _records(self, which: str) -> list[Entry]:
        entries: dict[str, Entry] = {}
        after, more = "", True
        while more:
            answer = self._call(do=which, after=after)
            found = _entries(answer.get("records"))
            more = bool(answer.get("more")) and bool(found)
            before, after = after, found[-1].record.name if found else ""
            entries.update((entry.record.name, entry) for entry in found)
            if more and (after <= before or len(entries) > MAX_NAMES):
                raise ValueError("the rendezvous service sent records without end")
        return list(entries.values())

    def renew(self, record: Record) -> bool:
        kept = self._call(do="renew", record=record.to_json()).get("kept")
        if not isinstance(kept, bool):
            raise ValueError("the rendezvous service sent no answer to a renewal")
        if kept:
            self._announced[record.name] = record
        else:
            self._announced.pop(record.name, None)
        return kept

    def remove(self, name: str, incarnation: str) -> None:
        announced = self._announced.get(name)
        if announced is not None and announced.incarnation == incarnation:
            del self._announced[name]
        if self._channel is None and self._stopped.is_set():
            return
        self._call(do="remove", name=name, incarnation=incarnation)

    def version(self) -> str:
        self._call(do="version")
        return self._version

    def watched(self) -> int | None:
        channel = self._channel
        return None if channel is None else channel.sock.fileno()

    def close(self) -> None:
        self._stopped.set()
        with self._mutex:
            self._drop()
            service, self._service = self._service, None
            if service is not None:
                service.close()
            keyring, self._keyring = self._keyring, None
            if keyring is not None:
                keyring.close()

    # The connection

    def _call(self, **request: Any) -> dict[str, Any]:
        """Ask the service, or whoever hosts it next; every request may be repeated."""
        deadline = self.deadline()
        request["group"] = self._group
        with self._turn(deadline):
            while True:
                answer = self._try(request, deadline)
                if answer is None:
                    continue
                if "error" in answer:
                    raise unread.of_service(self.description, answer)
                self._version = str(answer.get("version"))
                return answer

    def _try(self, request: dict[str, Any], deadline: float) -> dict[str, Any] | None:
        try:
            channel = self._channel or self._reach(deadline)
        except ConnectTimeout as error:
            raise PeerLost(str(error), str(self._address)) from error
        try:
            return channel.call(request, deadline)
        except BaseException as error:  # also Ctrl-C: the answer would come later
            self._drop()
            if not isinstance(error, OSError):
                raise
            if self._stopped.is_set() or time.monotonic() >= deadline:
                raise PeerLost(
                    f"the rendezvous {self.description} does not answer: {error}; "
                    "check the process that hosts it",
                    str(self._address),
                ) from error
            return None

    def _reach(self, deadline: float) -> Channel:
        """Connect to the service, or become its host; then announce our records."""
        while True:
            try:
                channel = Channel(self._address, self._secret, deadline, self._stopped)
                self._announce(channel, deadline)
                self._channel = channel
                self._has_met = True
                return channel
            except (AuthenticationFailed, ConnectRefused, PeerLost):
                raise
            except OSError as error:
                self._has_met |= not isinstance(error, ConnectionRefusedError)
                reason: Exception = error
                why = str(error)
            remaining = deadline - time.monotonic()
            if remaining > 0 and not self._stopped.is_set():
                try:
                    if self._host():
                        continue
                except (OSError, RuntimeError) as error:
                    reason = error
                    why += f", nor can this process host one: {error}"
                self._stopped.wait(min(_RETRY_SECONDS, remaining))
            # No further attempt after the deadline, which would say only that.
            if self._stopped.is_set() or time.monotonic() >= deadline:
                raise ConnectTimeout(
                    f"no rendezvous service answers at {self._address}: {why}; "
                    f"{self._remedy(reason)}"
                ) from reason

    def _remedy(self, reason: Exception) -> str:
        if isinstance(reason, OSError) and (remedy := out_of_descriptors(reason)):
            return remedy
        is_own = self._service is not None or is_loopback(self._address.sockaddr[0])
        if is_own and not has_link("lo"):
            return (
                "set up the interface lo, by which this host reaches its own "
                "addresses, and which is down"
            )
        return (
            "start a member or `mq rendezvous` on that host, or check address and "
            "firewall, and that no other program uses the port"
        )

    def _host(self) -> bool:
        """Become the host if the address is ours and free.

        Raises:
            OSError, RuntimeError: The system has no descriptor or no thread for it.
        """
        if self._service is not None:
            if self._service.is_serving:
                return False
            self._service.close()
        try:
            listener, succeeds = listen(*self._address)
        except OSError:
            return False
        succeeds |= self._has_met
        records = {self._group: self.present()} if succeeds else {}
        self._service = Service(listener, self._secret, succeeds, records)
        return True

    def _announce(self, channel: Channel, deadline: float) -> None:
        try:
            for record in list(self._announced.values()):
                text = record.to_json()
                request = {"do": "renew", "group": self._group, "record": text}
                channel.call(request, deadline)
        except BaseException:
            channel.close()
            raise

    def _drop(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    @contextlib.contextmanager
    def _turn(self, deadline: float) -> Iterator[None]:
        if self._stopped.is_set():
            raise PeerLost(f"{self.description} is closed", str(self._address))
        if not self._mutex.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PeerLost(
                f"{self.description} does not answer other calls of this process",
                str(self._address),
            )
        try:
            yield
        finally:
            self._mutex.release()


def _entries(items: object) -> list[Entry]:
    if not isinstance(items, list) or not all(isinstance(i, dict) for i in items):
        raise ValueError("the rendezvous service sent no list of records")
    return [_entry(item.get("record"), item.get("age")) for item in items]


def _entry(text: object, age: object) -> Entry:
    if not isinstance(text, str) or not isinstance(age, (int, float)):
        raise ValueError("the rendezvous service sent a malformed record")
    return Entry(unread.received(text), float(age))
