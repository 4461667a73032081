"""The records of one group in memory, as the rendezvous service keeps them."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Final

from mq.rendezvous.record import Cell, Entry, Record
from mq.rendezvous.store import CellStore

MAX_NAMES: Final = 4096
"""Names that may be held in a group at the service."""

SWEEP_SECONDS: Final = 3600.0
PAGE_BYTES: Final = 512 * 1024


@dataclass
class _Slot:
    record: Record
    text: str
    renewed: float = field(default_factory=time.monotonic)

    @property
    def entry(self) -> Entry:
        return Entry(self.record, time.monotonic() - self.renewed)


class MemoryStore(CellStore[Cell | None]):
    """Cells of one group, for one thread."""

    secret = b""
    directory = None
    description = "the rendezvous service"
    timeout = 1.0

    def __init__(self) -> None:
        self._slots: dict[str, _Slot] = {}
        # A free name's generation must not fall. One stands for all of them: names
        # come and go without end where members draw them at random.
        self._free: Cell | None = None
        self._id = secrets.token_hex(8)
        self._changes = 0

    def read(self, name: str) -> tuple[Cell | None, Cell | None]:
        slot = self._slots.get(name)
        if slot is None:
            return self._free, self._free
        cell = Cell(slot.record.generation, slot.record)
        return cell, cell

    def swap(self, name: str, token: Cell | None, new: Cell) -> bool:
        """Always succeeds.

        Raises:
            ValueError: The group has too many names.
        """
        if new.record is None:
            self._forget(name, new.generation)
            return True
        if name not in self._slots and len(self._slots) >= MAX_NAMES:
            self._sweep(0.0)
            if len(self._slots) >= MAX_NAMES:
                raise ValueError(f"the group has {MAX_NAMES} names already")
        self._slots[name] = _Slot(new.record, new.record.to_json())
        self._changes += 1
        return True

    def touch(self, name: str, token: Cell | None, cell: Cell) -> bool:
        self._slots[name].renewed = time.monotonic()
        return True

    def entry(self, cell: Cell, token: Cell | None) -> Entry | None:
        return None if cell.record is None else self._slots[cell.record.name].entry

    def records(self) -> list[Entry]:
        return [slot.entry for slot in self._slots.values()]

    def page(self, after: str) -> tuple[list[dict[str, Any]], bool]:
        """Records of names after `after`, as JSON, and whether there are more."""
        self._sweep(SWEEP_SECONDS)
        found: list[dict[str, Any]] = []
        room = PAGE_BYTES
        for name in sorted(name for name in self._slots if name > after):
            slot = self._slots[name]
            room -= len(slot.text)
            if room < 0 and found:
                return found, True
            found.append({"record": slot.text, "age": slot.entry.age})
        return found, False

    def _sweep(self, seconds: float) -> None:
        """Forget who was not renewed for so long, and has no lease any more."""
        for name, slot in list(self._slots.items()):
            if slot.entry.expired and slot.entry.age > seconds:
                self._forget(name, slot.record.generation)

    def _forget(self, name: str, generation: int) -> None:
        del self._slots[name]
        known = 0 if self._free is None else self._free.generation
        self._free = Cell(max(known, generation), None)
        self._changes += 1

    def has_ended(self) -> bool:
        """Whether nobody holds a name by a lease that lasts."""
        return all(slot.entry.expired for slot in self._slots.values())

    def version(self) -> str:
        return f"{self._id}-{self._changes}"

    def close(self) -> None:
        self._slots.clear()
