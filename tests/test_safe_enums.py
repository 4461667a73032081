"""Members of enumerations travel by name, flags by value."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import pytest
from payload_checks import CODEC, area_of, same, travel

from mq import extensions as ext
from mq.codec import add_safe_types
from mq.errors import CodecError
from mq.frames import assemble


class Access(enum.Flag):
    """Flags without a number of their own."""

    READ = 1
    WRITE = 2
    EXECUTE = 4


class Mode(enum.IntFlag):
    """Flags that are numbers, also those that no member has."""

    OWNER = 1
    GROUP = 2


WIDE = enum.Flag("WIDE", [f"bit{number}" for number in range(100)], module=__name__)


class Level(enum.Enum):
    """An enumeration that makes members as they are asked for."""

    LOW = 1
    BOTTOM = 1

    @classmethod
    def _missing_(cls, value: object) -> Level:
        made = object.__new__(cls)
        made._name_, made._value_ = f"LEVEL{value}", value
        return made


class Known(enum.IntEnum):
    """An enumeration of numbers."""

    ONE = 1


add_safe_types(Access, Mode, WIDE, Level, Known)


def message(kind: type, state: Any) -> memoryview:
    """An object of a registered type with this state, from anybody."""
    pack = msgspec.msgpack.encode
    body = pack([f"{__name__}:{kind.__qualname__}", state], enc_hook=_wide)
    skeleton = pack(msgspec.msgpack.Ext(ext.OBJECT, body))
    return area_of(assemble(skeleton, (), frozenset()))


def _wide(number: Any) -> Any:
    raw = int(number).to_bytes(ext.MAX_INT_BYTES, "big", signed=True)
    return msgspec.msgpack.Ext(ext.INT, raw)


@pytest.mark.parametrize(
    "flags",
    [
        Access.READ,
        Access.READ | Access.WRITE,
        Access(0),
        ~Access.READ,
        ~Access(0),
        Mode.OWNER | Mode.GROUP,
        Mode(0),
        Mode(1 << 63 | 1),
        ~Mode.OWNER,
        ~WIDE(0),
    ],
    ids=repr,
)
def test_flags_arrive_whichever_of_them_are_set(flags: enum.Flag) -> None:
    """Also none of them, which has no name, and several, whose name differs."""
    assert travel(flags) is flags
    assert same(travel({flags: {flags}}), {flags: {flags}})


def test_a_member_of_an_enumeration_travels_by_its_name() -> None:
    """Its value may be anything."""
    assert travel([Level.LOW, Level.BOTTOM, Known.ONE]) == [
        Level.LOW,
        Level.LOW,
        Known.ONE,
    ]
    assert CODEC.decode(message(Level, "LOW")) is Level.LOW
    assert type(travel(Known.ONE)) is Known


@pytest.mark.parametrize(
    "value", [Level(7), Mode(1 << 64)], ids=["made by _missing_", "65 bits"]
)
def test_what_no_receiver_finds_again_is_not_sent(value: Any) -> None:
    """The error says so, where it is, and what to do."""
    problem = rf"cannot send payload\['x'\]: .*:{type(value).__name__} .* encode= and"
    with pytest.raises(CodecError, match=problem):
        CODEC.encode({"x": value})


class Wide(int):
    """A number that msgpack does not hold."""


@pytest.mark.parametrize("kind", [Access, Mode, WIDE, Level, Known])
@pytest.mark.parametrize(
    "state",
    ["READ|WRITE", "_missing_", b"\x01", None, True, 1.0, [1], {"a": 1}, 1j],
    ids=repr,
)
def test_states_from_outside_that_are_no_members_are_refused(
    kind: type, state: Any
) -> None:
    """Whatever the enumeration itself would make of them."""
    if state == 1j:
        state = msgspec.msgpack.Ext(ext.COMPLEX, bytes(16))
    with pytest.raises(CodecError, match=kind.__name__):
        CODEC.decode(message(kind, state))


@pytest.mark.parametrize("kind", [Access, Mode, WIDE])
@pytest.mark.parametrize("bits", [128, 8 * ext.MAX_INT_BYTES - 9])
@pytest.mark.parametrize("sign", [1, -1])
def test_flags_from_outside_are_no_more_than_an_enumeration_may_have(
    kind: type[enum.Flag], bits: int, sign: int
) -> None:
    """An IntFlag of Python 3.10 makes a member of each bit, and keeps it."""
    with pytest.raises(CodecError, match=f"{kind.__name__}.* {bits} bits"):
        CODEC.decode(message(kind, Wide(sign * ((1 << bits) - 1))))
    assert len(kind._value2member_map_) < 300


def test_flags_from_outside_that_an_enumeration_does_not_know_are_refused() -> None:
    """As the enumeration says."""
    with pytest.raises(CodecError, match=r"Access.*\b8\b"):
        CODEC.decode(message(Access, 8))
    assert CODEC.decode(message(Mode, 8)) == 8


class Text(str, enum.Enum):
    """Members that are text, as many configurations have them."""

    ONE = "one"


class Pair(tuple[int, int], enum.Enum):
    """Members that are tuples."""

    ORIGIN = (0, 0)


@pytest.mark.parametrize("member", [Text.ONE, Pair.ORIGIN])
def test_members_that_are_values_of_another_type_travel_by_name(member: Any) -> None:
    """That type looks things up in its own way."""
    add_safe_types(type(member))
    found = travel([member])[0]
    assert found is member
