"""What torchrun's store keeps of a name: its cell, and its place in a list."""

from __future__ import annotations

import json
from typing import NamedTuple

from mq.rendezvous import unread
from mq.rendezvous.record import Cell, Record, load_json


class Place(NamedTuple):
    """A place in the list of names, from when a name is put there until it is free.

    Whoever put the name there frees it again, or else whoever replaces the record that
    says that it is there; no other name, nor the same one later, has the same nonce.
    If its process ends in the middle of that, the place is lost.
    """

    number: int
    nonce: str


class Stored(NamedTuple):
    """How a cell is stored: its text, how often it was renewed, and its place."""

    text: str
    beat: int
    place: Place | None = None


def written(cell: Cell, stored: Stored) -> str:
    """The text of a cell; that of `stored` is not looked at."""
    fields = {
        "generation": cell.generation,
        "beat": stored.beat,
        "record": None if cell.record is None else cell.record.to_json(),
        "place": stored.place,
    }
    return json.dumps(fields)


def parse(text: str, where: str) -> tuple[Cell, Stored]:
    """Read what `written` returned.

    Raises:
        ConnectRefused: It cannot be read, and its owner may live.
    """
    try:
        fields = load_json(text)
        generation, beat = fields["generation"], fields["beat"]
        if type(generation) is not int or type(beat) is not int:
            raise ValueError("its numbers are none")
        held = fields["record"]
        if held is None:
            return Cell(generation, None), Stored(text, beat)
        place = Place(*fields["place"])
        if type(place.number) is not int:
            raise ValueError("its place is none")
        try:
            record = Record.from_json(held)
        except ValueError:
            if not unread.has_ended(held):
                raise
            record = None
        return Cell(generation, record), Stored(text, beat, place)
    except (ValueError, KeyError, TypeError) as error:
        raise unread.refusal(where, error) from error
