"""How dataclasses, named tuples and enumerations travel, once they are registered."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import operator
from collections.abc import Iterable
from types import MemberDescriptorType
from typing import Any, Final

from mq.errors import CodecError
from mq.safe_types import SafeType

_FLAGS_OF_ANY: Final = 64
"""Bits that flags may have, whichever of them are members."""


def dataclass(name: str, kind: type) -> SafeType:
    """A dataclass: a dict of all its fields; its constructor checks what it takes.

    Raises:
        TypeError: The constructor takes other arguments than its fields.
    """
    fields = {field.name: field.init for field in dataclasses.fields(kind)}
    given = {field for field, init in fields.items() if init}
    if set(inspect.signature(kind).parameters) != given:
        raise TypeError(
            f"the constructor of dataclass {name} does not take its fields: pass "
            "encode= and decode= to add_safe_types"
        )

    def encode(value: Any) -> dict[str, Any]:
        return {field: getattr(value, field) for field in fields}

    def decode(state: Any) -> Any:
        _check_fields(name, state, fields.keys())
        value = kind(**{field: state[field] for field in given})
        for field in fields.keys() - given:
            object.__setattr__(value, field, state[field])  # it may be frozen
        return value

    is_all = given == fields.keys() and _is_plain(kind, fields)
    return SafeType(
        name, kind, encode, decode, True, _names(fields) if is_all else None
    )


def _names(fields: Iterable[str]) -> tuple[str, ...] | None:
    """Those of the fields, if they are text of no kind of its own."""
    names = tuple(fields)
    return names if all(type(name) is str for name in names) else None


def _is_plain(kind: type, fields: Iterable[str]) -> bool:
    """Whether its attributes are what was assigned to them."""
    if issubclass(kind, tuple) or any("__getattr__" in vars(k) for k in kind.__mro__):
        return False
    found = [inspect.getattr_static(kind, field, None) for field in fields]
    return kind.__getattribute__ is object.__getattribute__ and all(
        isinstance(one, MemberDescriptorType) or not hasattr(type(one), "__get__")
        for one in found
    )


def named_tuple(name: str, kind: type) -> SafeType:
    """A named tuple: a dict of its fields."""
    fields = dict.fromkeys(getattr(kind, "_fields", ()))

    def encode(value: Any) -> dict[str, Any]:
        return dict(zip(fields, value, strict=True))

    def decode(state: Any) -> Any:
        _check_fields(name, state, fields.keys())
        return kind(**state)

    is_all = getattr(kind, "__iter__", None) is tuple.__iter__
    return SafeType(
        name, kind, encode, decode, True, _names(fields) if is_all else None
    )


def enumeration(name: str, kind: type[enum.Enum]) -> SafeType:
    """An enumeration: a member's name."""

    def encode(item: Any) -> Any:
        key = item.name
        if kind.__members__.get(key) is not item:
            raise CodecError(
                f"a {name} is not the member of its name, {key!r:.80}: pass encode= "
                "and decode= to add_safe_types"
            )
        return key

    # Of a kind of text or tuple `__getitem__` is that of its members.
    return SafeType(name, kind, encode, lambda key: kind[key], False)


def flags(name: str, kind: type[enum.Flag]) -> SafeType:
    """Flags that may be combined: their value."""
    # Several flags, or none, have no name that every version of Python knows. An
    # IntFlag takes any bits; that of Python 3.10 makes a member of each, and keeps it.
    values = [operator.index(flag.value) for flag in kind.__members__.values()]
    most = max([_FLAGS_OF_ANY, *(value.bit_length() for value in values)])

    def checked(value: int) -> int:
        if value.bit_length() > most:
            raise CodecError(
                f"a {name} of {value.bit_length()} bits, the limit is {most}: pass "
                "encode= and decode= to add_safe_types"
            )
        return value

    def decode(state: Any) -> Any:
        if type(state) is not int:
            raise CodecError(f"a {name} arrived with {type(state)} in place of an int")
        return kind(checked(state))

    return SafeType(
        name, kind, lambda flags: checked(operator.index(flags.value)), decode, False
    )


def _check_fields(name: str, state: Any, fields: Any) -> None:
    if type(state) is not dict or state.keys() != fields:
        got = sorted(map(str, state))[:20] if type(state) is dict else type(state)
        raise CodecError(
            f"a {name} arrived with {got} in place of the fields {sorted(fields)}; "
            "both sides need the same definition of it"
        )
