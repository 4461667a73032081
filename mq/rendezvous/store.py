"""What a kind of rendezvous must provide, and how names are decided on any of them."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from mq.errors import PeerLost
from mq.rendezvous.record import (
    Cell,
    Claim,
    Entry,
    Record,
    after_claim,
    after_removal,
    after_renewal,
)

T = TypeVar("T")
Token = TypeVar("Token")


class Store(ABC):
    """Keeps the records of one group. `Rendezvous` is the front that members use.

    Every method may be called from any thread and takes at most `timeout`
    seconds, and never beyond `until`. A store that cannot be reached raises `PeerLost`.

    Attributes:
        secret: The group's default secret; b"" where the store keeps none.
        directory: A directory of mode 0700 on this host for socket files, if any.
        description: What and where the store is, for people to read.
        slow: Whether a call may take long, so that it must not be made by a thread
            that has other duties.
        timeout: Seconds that any call may take.
        until: When the last call must have ended, by `time.monotonic`, while a member
            connects: many calls have one deadline then.
        present: Tells records of members that are there, for a store that begins
            anew in place of one of which they may not have noticed the end.
    """

    secret: bytes
    directory: str | None
    description: str
    slow: bool = True
    timeout: float
    until: float = math.inf
    present: Callable[[], list[Record]] = list

    def deadline(self) -> float:
        """When a call that begins now must have ended."""
        return min(time.monotonic() + self.timeout, self.until)

    @abstractmethod
    def claim(self, record: Record, *, replaces: str | None = None) -> Claim: ...

    @abstractmethod
    def records(self) -> list[Entry]: ...

    def recent(self) -> list[Entry]:
        """As `records`, but at once: without those of whom a store may hear soon.

        Nor those that cannot be read, for which `records` raises `ConnectRefused`.
        """
        return self.records()

    @abstractmethod
    def renew(self, record: Record) -> bool: ...

    @abstractmethod
    def remove(self, name: str, incarnation: str) -> None: ...

    @abstractmethod
    def version(self) -> str:
        """Changes whenever the set of records does; cheaper than `records`."""

    @abstractmethod
    def close(self) -> None:
        """Free everything, and end calls in other threads. Idempotent."""

    def is_listening(self, record: Record) -> bool:
        """Whether somebody listens on a socket file that would go with the record."""
        return False

    def watched(self) -> int | None:
        """A socket whose hang-up means that the records must be announced anew."""
        return None


class CellStore(Store, Generic[Token]):
    """A store that can do one thing atomically: replace the cell of one name.

    `Token` is what `swap` needs to know that the cell is still the one that was read.
    """

    @abstractmethod
    def read(self, name: str) -> tuple[Cell | None, Token]:
        """The cell of a name as it is now."""

    @abstractmethod
    def swap(self, name: str, token: Token, new: Cell) -> bool:
        """Put `new` in place of the cell that `token` came with, unless it changed."""

    @abstractmethod
    def touch(self, name: str, token: Token, cell: Cell) -> bool:
        """Begin the lease of a held cell anew, unless the cell changed."""

    @abstractmethod
    def entry(self, cell: Cell, token: Token) -> Entry | None:
        """The record of a cell with its age; None for a free one."""

    def claim(self, record: Record, *, replaces: str | None = None) -> Claim:
        def step() -> Claim | None:
            cell, token = self.read(record.name)
            new = after_claim(cell, record, replaces)
            if new is None and cell is not None:
                holder = self.entry(cell, token)
                return None if holder is None else Claim(record, holder)
            if new is not None and new is cell:
                return self._won(new) if self.touch(record.name, token, new) else None
            if new is not None and self.swap(record.name, token, new):
                return self._won(new)
            return None

        return self._retry(step, record.name)

    @staticmethod
    def _won(cell: Cell) -> Claim:
        assert cell.record is not None
        return Claim(cell.record, None)

    def renew(self, record: Record) -> bool:
        def step() -> bool | None:
            cell, token = self.read(record.name)
            new = after_renewal(cell, record)
            if new is None:
                return False
            if new is cell:
                return self.touch(record.name, token, new) or None
            return self.swap(record.name, token, new) or None

        return self._retry(step, record.name)

    def remove(self, name: str, incarnation: str) -> None:
        def step() -> bool | None:
            cell, token = self.read(name)
            new = after_removal(cell, incarnation)
            return new is None or self.swap(name, token, new) or None

        self._retry(step, name)

    def _retry(self, step: Callable[[], T | None], name: str) -> T:
        # A step fails only because another member's succeeded, so this ends soon.
        deadline = self.deadline()
        while True:
            result = step()
            if result is not None:
                return result
            if time.monotonic() >= deadline:
                raise PeerLost(
                    f"the name {name!r} changed hands for {self.timeout:g} s at "
                    f"{self.description}; start fewer members under one name",
                    self.description,
                )
