"""The transport `auto`: for each peer shared memory where it works, else a wire.

Whether it works is not guessed from host names: a connection of `shm` is open only once
both ends have read a random number in each other's memory. Where that fails, at once or
because there is no such socket here, the next address of the peer is dialled, which is
the wire's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import ClassVar

from mq import registry
from mq.addresses import split
from mq.errors import TransportUnavailable
from mq.log import Log
from mq.mesh.poller import Poller
from mq.transport import LINGER_SECONDS, Capabilities, Conn, Event, Link

logger = Log(__name__)


class AutoLink(Link):
    """Several links as one; a connection is that of the link which carries it.

    Args:
        wire: The backend for peers that share no memory with this process.
        shm_bytes: As for `shm`.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(reach="network", zero_copy=True)

    def __init__(self, *, wire: str = "tcp", shm_bytes: int | None = None) -> None:
        links = [registry.create(wire, {})]
        reason = registry.check("shm")
        if reason is None:
            links.insert(0, registry.create("shm", {"shm_bytes": shm_bytes}))
        else:
            logger.info("auto: %s for all peers: %s", wire, reason)
        self._wire = wire
        self._use(links)

    def _use(self, links: list[Link]) -> None:
        self._links = links
        self.scheme = links[-1].scheme
        self.mixes = len(links) > 1
        self.engine_threads = sum(link.engine_threads for link in links)
        self.lender = links[0].lender
        self.chunk_bytes = min(link.chunk_bytes for link in links)
        self.max_ahead = min(link.max_ahead for link in links)

    @property
    def malformed(self) -> int:  # type: ignore[override]
        """Those of all links."""
        return sum(link.malformed for link in self._links)

    def describe(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for link in self._links:
            found.update(link.describe())
        return found

    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        wanted: dict[Link, list[str]] = {link: [] for link in self._links}
        for link in self._links:
            link.insecure = self.insecure
            link.member_name = self.member_name
        for address in listen:
            wanted[self._link_of(address)].append(address)
        opened: list[Link] = []
        try:
            found = []
            for link, addresses in wanted.items():
                found += self._open(link, poller, addresses, directory)
                opened.append(link)
            return found
        except BaseException:
            for link in opened:
                link.close()
            raise

    def _open(
        self, link: Link, poller: Poller, listen: list[str], directory: str | None
    ) -> list[str]:
        """Open a link, or go on without it where it is not the wire's."""
        try:
            return link.open(poller, listen, directory)
        except TransportUnavailable as error:
            if link is self._links[-1]:
                raise
            logger.warning("auto: %s for all peers: %s", self._wire, error)
            self._use(self._links[-1:])
            return []

    def _link_of(self, address: str) -> Link:
        for link in self._links:
            if link.rank([address], True):
                return link
        if address.startswith(f"{self.scheme}://"):
            split(address)  # it lacks a host or a port, and the error says so
        raise ValueError(
            f"{address!r} is an address neither of shm nor of {self._wire}, which this "
            "queue uses"
        )

    def connected(self) -> None:
        for link in self._links:
            link.connected()

    def dial(self, address: str) -> Conn:
        return self._link_of(address).dial(address)

    def rank(self, addresses: Sequence[str], same_host: bool) -> list[str]:
        ranked = (link.rank(addresses, same_host) for link in self._links)
        return list(chain.from_iterable(ranked))

    def poll(self) -> Iterator[Event]:
        return chain.from_iterable(link.poll() for link in self._links)

    def trim(self, idle_seconds: float) -> None:
        for link in self._links:
            link.trim(idle_seconds)

    def is_routable(self, address: str) -> bool:
        return any(link.is_routable(address) for link in self._links)

    def close(self, linger: float = LINGER_SECONDS) -> None:
        for link in self._links:
            link.close(linger)

    def abandon(self) -> None:
        for link in self._links:
            link.abandon()


class AutoNngLink(AutoLink):
    """`auto` whose wire is NNG."""

    capabilities: ClassVar[Capabilities] = dataclasses.replace(
        AutoLink.capabilities, survives_fork=False, engine_stays=True
    )
