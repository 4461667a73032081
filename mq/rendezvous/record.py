"""What members write at a rendezvous, and the rules for who holds a name."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from typing import Any, Final

from mq.process import ProcessId

MAX_RECORD_BYTES: Final = 64 * 1024
"""The largest record as JSON, in bytes."""

FORMAT: Final = 1
"""The format of records: another number for other keys, or another meaning of one."""

_HEX: Final = re.compile(r"[0-9a-f]{8,64}")
_MAX_INT: Final = 2**63 - 1


@dataclass(frozen=True)
class Record:
    """How to find and recognise one member.

    Attributes:
        name: The member's name, one holder at a time in its group.
        incarnation: Lower-case hex that tells lives under one name apart.
        generation: Grows with each new holder of the name; the store assigns it.
        backend: The backend string's engine, so that two do not mix in one group.
        addresses: Where the member listens, best first.
        process: Its process, to prove its death.
        labels: What the application said about the member.
        since: When it joined, in Unix seconds by its own clock.
        lease: Seconds without a renewal after which it may be dead, and is not waited
            for unless it answers; infinite where only proof counts.

    Raises:
        ValueError: A field is of another type, malformed or too long.
    """

    name: str
    incarnation: str
    generation: int
    backend: str
    addresses: tuple[str, ...]
    process: ProcessId
    labels: tuple[str, ...]
    since: float
    lease: float

    def __post_init__(self) -> None:
        _check_text("name", self.name, 255)
        _check_text("incarnation", self.incarnation, 64)
        if not _HEX.fullmatch(self.incarnation):
            raise ValueError(
                f"incarnation {self.incarnation!r} is not 8 to 64 hex digits"
            )
        _check_whole("generation", self.generation)
        _check_text("backend", self.backend, 100)
        _check_texts("addresses", self.addresses, 32, 512)
        _check_texts("labels", self.labels, 64, 255)
        _check_number("since", self.since)
        _check_number("lease", self.lease)
        if math.isinf(self.since) or self.lease <= 0:
            raise ValueError(
                f"since {self.since} or lease {self.lease} is out of range"
            )
        _check_process(self.process)

    def to_json(self) -> str:
        """The record as one line of JSON.

        Raises:
            ValueError: It is longer than `MAX_RECORD_BYTES`.
        """
        fields = {"format": FORMAT, **dataclasses.asdict(self)}
        if math.isinf(self.lease):
            fields["lease"] = None
        text = json.dumps(fields, separators=(",", ":"))
        if len(text) > MAX_RECORD_BYTES:
            raise ValueError(
                f"the record of {self.name!r} has {len(text)} bytes, more than "
                f"{MAX_RECORD_BYTES}: give it fewer or shorter labels and addresses"
            )
        return text

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """Read what `to_json` wrote, trusting nothing.

        Raises:
            ValueError: It is anything but a valid record.
        """
        if len(text) > MAX_RECORD_BYTES:
            raise ValueError(f"a record of {len(text)} bytes is too long")
        fields = load_json(text)
        told = fields.pop("format", None)
        if type(told) is not int or told != FORMAT:
            what = "no format" if told is None else f"format {told!r:.20}"
            raise ValueError(f"the record has {what}, and only {FORMAT} is read here")
        try:
            fields["process"] = ProcessId(**fields["process"])
            fields["addresses"] = tuple(fields["addresses"])
            fields["labels"] = tuple(fields["labels"])
            if fields["lease"] is None:
                fields["lease"] = math.inf
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no record of a member: {error}") from error


def load_json(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object that may come from anybody.

    Raises:
        ValueError: It is malformed, no object, too deep, or has absurd numbers.
    """
    try:
        value = json.loads(text, parse_int=_parse_int, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("the JSON is no object")
    return value


def _parse_int(digits: str) -> int:
    if len(digits) > 20:  # int() takes quadratic time before Python 3.11
        raise ValueError("a number has too many digits")
    return int(digits)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _check_text(field: str, value: object, limit: int) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= limit:
        raise ValueError(
            f"{field} is not a string of 1 to {limit} characters: {value!r}"
        )
    if not value.isprintable():
        raise ValueError(f"{field} {value!r} has characters that cannot be printed")


def _check_texts(field: str, values: object, count: int, limit: int) -> None:
    if not isinstance(values, tuple):
        raise ValueError(f"{field} {values!r} is not a tuple")
    if len(values) > count:
        raise ValueError(
            f"{len(values)} {field}, but a rendezvous takes {count} of them at most"
        )
    for value in values:
        _check_text(field, value, limit)


def _check_whole(field: str, value: object) -> None:
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise ValueError(f"{field} {value!r} is not a whole number from 0 to 2**63 - 1")


def _check_number(field: str, value: object) -> None:
    if type(value) not in (int, float) or math.isnan(value):  # type: ignore[arg-type]
        raise ValueError(f"{field} {value!r} is not a number")


def _check_process(process: object) -> None:
    if not isinstance(process, ProcessId):
        raise ValueError("process is not a ProcessId")
    _check_text("process.host", process.host, 255)
    if process.boot_id != "":
        _check_text("process.boot_id", process.boot_id, 64)
    _check_whole("process.pid", process.pid)
    _check_whole("process.pid_namespace", process.pid_namespace)
    _check_whole("process.time_namespace", process.time_namespace)
    _check_whole("process.started", process.started)


@dataclass(frozen=True)
class Entry:
    """A record as a rendezvous holds it.

    Attributes:
        record: What the member wrote, with its generation.
        age: Seconds since the last renewal, by the store's clock.
    """

    record: Record
    age: float

    @property
    def expired(self) -> bool:
        """Whether the lease has ended: who does not answer now is not waited for."""
        return self.age > self.record.lease


@dataclass(frozen=True)
class Claim:
    """The outcome of a claim.

    Attributes:
        record: The claimant's record, with the generation it got if it won.
        holder: None if the name is the claimant's now, else who holds it.
    """

    record: Record
    holder: Entry | None


@dataclass(frozen=True)
class Cell:
    """The state of one name: each change has a higher generation than the one before.

    A name that was given back keeps a cell without a record, so that a slow claimant
    that compared with an old state cannot succeed.
    """

    generation: int
    record: Record | None


def after_claim(cell: Cell | None, record: Record, replaces: str | None) -> Cell | None:
    """The state that a claim asks for; `cell` itself if it is met; None if refused."""
    if cell is None:
        return _held(1, record)
    holder = cell.record
    if holder is not None:
        if holder.incarnation == record.incarnation:
            return cell  # a claim repeated because its answer was lost
        if holder.incarnation != replaces:
            return None
    return _held(cell.generation + 1, record)


def after_renewal(cell: Cell | None, record: Record) -> Cell | None:
    """The state that a renewal asks for; `cell` itself if it is met; None if refused.

    A store that lost its memory is told again by everybody; then the higher
    generation is right, whoever comes first.
    """
    if cell is None:
        return _held(max(record.generation, 1), record)
    if cell.record is None:
        return _held(max(record.generation, cell.generation + 1), record)
    if cell.record.incarnation == record.incarnation:
        return cell
    if record.generation > cell.generation:
        return _held(record.generation, record)
    return None


def after_removal(cell: Cell | None, incarnation: str) -> Cell | None:
    """The state that a removal asks for; None where there is nothing to do."""
    if cell is None or cell.record is None or cell.record.incarnation != incarnation:
        return None
    return Cell(cell.generation + 1, None)


def _held(generation: int, record: Record) -> Cell:
    return Cell(generation, dataclasses.replace(record, generation=generation))
