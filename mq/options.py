"""Options of transports: what may be written for each, and what is said of the rest.

They come from programs, and as text from command lines and variables. So a text counts
where it can mean one thing only, and everything else is refused by name, with what was
given and what is wanted.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence

from mq.seconds import positive_seconds


def listed(text: str) -> tuple[str, ...]:
    """What stands between commas, without spaces around it and without nothing."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def names(option: str, given: object) -> tuple[str, ...]:
    """Several names, as a sequence or as text with commas between them.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(given, str):
        return listed(given) or (given,)
    if isinstance(given, Sequence) and all(isinstance(name, str) for name in given):
        return tuple(given)
    raise TypeError(f"{option} is names, as in ('a', 'b') or 'a,b', not {given!r}")


def whole(option: str, given: object, least: int, most: int | None = None) -> int:
    """A whole number, as a plain int; `most` None: of any size.

    Raises:
        TypeError: It is none.
        ValueError: It is out of bounds.
    """
    bounds = f"{least} or more" if most is None else f"{least} to {most}"
    try:
        if isinstance(given, bool):
            raise TypeError
        number = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{option} is a whole number, {bounds}, not {given!r}"
        ) from None
    if number < least or (most is not None and number > most):
        raise ValueError(f"{option} is {number}, but must be {bounds}")
    return number


def seconds(option: str, given: float, most: float) -> float:
    """A span of time.

    Raises:
        TypeError: It is no number.
        ValueError: It is not above 0 and finite, or longer than `most`.
    """
    span = positive_seconds(option, given)
    if span > most:
        raise ValueError(f"{option} is {given} s, but must be at most {most:g} s")
    return span


def switch(option: str, given: object) -> bool:
    """True or False.

    Raises:
        TypeError: It is neither; a text such as "no" would count as true.
    """
    numpy = sys.modules.get("numpy")
    if isinstance(given, bool) or (
        numpy is not None and isinstance(given, numpy.bool_)
    ):
        return bool(given)
    raise TypeError(f"{option} is True or False, not {given!r}")
