"""What a mesh is told when it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from mq.mesh.handshake import Greeting
from mq.process import ProcessId

CODEC_VERSION = "1"
PEER_TIMEOUT: Final = 10.0
"""The default of `connect`, in seconds."""


class Watch(Protocol):
    """Tells whether a process has ended; `mq.process.ProcessWatch` is one."""

    def ended(self) -> bool | None:
        """True or False where it can be known, else None."""

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when the process ends, or None."""

    def close(self) -> None:
        """Free the descriptor."""


@dataclass
class Config:
    """This member, and how the mesh behaves.

    Attributes:
        secret: Proven by both sides of each connection; empty: none.
        peer_timeout: Seconds of silence after which a peer is forgotten; None: never.
        max_message_bytes: The largest message this member takes.
        accepts: Names of the payload types that this member decodes, asked for each
            new session.
        dial_back: Whether peers that dialled us are dialled in turn when they were
            forgotten without proof of their death.
        watch: Opens a watch on a peer's process, or None where it cannot be seen.
    """

    group: str
    name: str
    incarnation: str
    backend: str
    process: ProcessId
    since: float
    generation: int = 0
    labels: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    secret: bytes = field(default=b"", repr=False)
    peer_timeout: float | None = PEER_TIMEOUT
    max_message_bytes: int = 1 << 32
    versions: dict[str, str] = field(default_factory=dict)
    accepts: Callable[[], frozenset[str]] = frozenset
    dial_back: bool = True
    watch: Callable[[ProcessId], Watch | None] = lambda process: None

    def timeout_with(self, theirs: float | None) -> float | None:
        """How long a peer may be silent, and this member to it; None: for ever."""
        mine = self.peer_timeout
        return None if mine is None or theirs is None else max(mine, theirs)

    def is_near(self, process: ProcessId) -> bool:
        """Whether that runs on the same host."""
        return process.boot_id == self.process.boot_id

    def greeting(
        self,
        session: str = "",
        received: int = 0,
        *,
        probe: bool = False,
        leaving: bool = False,
        to: str = "",
    ) -> Greeting:
        """What this member tells of itself."""
        return Greeting(
            group=self.group,
            name=self.name,
            incarnation=self.incarnation,
            generation=self.generation,
            backend=self.backend,
            process=self.process,
            labels=self.labels,
            since=self.since,
            addresses=self.addresses,
            peer_timeout=self.peer_timeout,
            max_message_bytes=self.max_message_bytes,
            accepts=sorted(self.accepts()),
            versions={"codec": CODEC_VERSION, **self.versions},
            session=session,
            received=received,
            probe=probe,
            leaving=leaving,
            to=to,
        )
