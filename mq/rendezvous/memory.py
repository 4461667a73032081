"""The records of one group in memory, as the rendezvous service keeps them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

from mq.rendezvous.record import Cell, Entry
from mq.rendezvous.store import CellStore

MAX_NAMES: Final = 4096
"""Names that a group may have at the service, those given back lately included."""

SWEEP_SECONDS: Final = 3600.0
PAGE_BYTES: Final = 512 * 1024


@dataclass
class _Slot:
    cell: Cell
    text: str
    renewed: float = field(default_factory=time.monotonic)


class MemoryStore(CellStore[Cell | None]):
    """Cells of one group, for one thread."""

    secret = b""
    directory = None
    description = "the rendezvous service"
    timeout = 1.0

    def __init__(self) -> None:
        self._slots: dict[str, _Slot] = {}
        self._changes = 0

    def read(self, name: str) -> tuple[Cell | None, Cell | None]:
        slot = self._slots.get(name)
        cell = None if slot is None else slot.cell
        return cell, cell

    def swap(self, name: str, token: Cell | None, new: Cell) -> bool:
        """Always succeeds.

        Raises:
            ValueError: The group has too many names.
        """
        if name not in self._slots and len(self._slots) >= MAX_NAMES:
            self._sweep()
            if len(self._slots) >= MAX_NAMES:
                raise ValueError(f"the group has {MAX_NAMES} names already")
        text = "" if new.record is None else new.record.to_json()
        self._slots[name] = _Slot(new, text)
        self._changes += 1
        return True

    def touch(self, name: str, token: Cell | None, cell: Cell) -> bool:
        self._slots[name].renewed = time.monotonic()
        return True

    def entry(self, cell: Cell, token: Cell | None) -> Entry | None:
        if cell.record is None:
            return None
        slot = self._slots[cell.record.name]
        return Entry(cell.record, time.monotonic() - slot.renewed)

    def records(self) -> list[Entry]:
        entries = (self.entry(slot.cell, None) for slot in self._slots.values())
        return [entry for entry in entries if entry is not None]

    def page(self, after: str) -> tuple[list[dict[str, Any]], bool]:
        """Records of names after `after`, as JSON, and whether there are more."""
        self._sweep()
        found: list[dict[str, Any]] = []
        room = PAGE_BYTES
        for name in sorted(name for name in self._slots if name > after):
            slot = self._slots[name]
            if slot.cell.record is None:
                continue
            room -= len(slot.text)
            if room < 0 and found:
                return found, True
            found.append({"record": slot.text, "age": time.monotonic() - slot.renewed})
        return found, False

    def _sweep(self) -> None:
        """Forget names that were given back, or whose leases ended, long ago."""
        now = time.monotonic()
        for name, slot in list(self._slots.items()):
            record, age = slot.cell.record, now - slot.renewed
            if age > SWEEP_SECONDS and (record is None or age > record.lease):
                del self._slots[name]
                self._changes += 1

    def is_empty(self) -> bool:
        """Whether nobody holds a name."""
        return all(slot.cell.record is None for slot in self._slots.values())

    def version(self) -> str:
        return str(self._changes)

    def close(self) -> None:
        self._slots.clear()
