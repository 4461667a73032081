"""What becomes of what the application's code raises, and how its objects are shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from mq.errors import CodecError
from mq.safe_types import SafeType, type_name


class Raised:
    """What came of a call in place of a result."""

    __slots__ = ("_error",)

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error

    def take(self) -> Exception:
        """The exception, once: what holds the call's frames must not hold them."""
        error, self._error = self._error, None
        assert error is not None
        return error


def attempt(make: Callable[[Any], Any], value: Any) -> Any:
    """What a function of the application's makes of a value, or that it `Raised`."""
    try:
        return make(value)
    except Exception as error:  # it may raise anything
        return Raised(error)


def build(entry: SafeType, state: Any) -> Any:
    """An object of a registered type, of what a peer sent.

    Raises:
        CodecError: Its type does not take that.
        BaseException: As `failure` does.
    """
    try:
        return entry.decode(state)
    except CodecError:
        raise
    except BaseException as error:  # the application's code may raise anything
        fail(entry, error)


def fail(entry: SafeType, error: BaseException) -> NoReturn:
    """Raise what `build` does where the type has raised an error."""
    try:
        if isinstance(error, CodecError):
            raise error
        raise failure(f"decoding a {entry.name}", error) from error
    finally:
        # By this frame it would hold itself, and all that it was raised for.
        del error


def shown(value: object) -> str:
    """An object of the application's, which may raise anything when it is shown."""
    try:
        return repr(value)
    except Exception:
        return f"<{type_name(type(value))}>"


def failure(what: str, error: BaseException) -> CodecError:
    """What to raise in place of what the application's code raised.

    Anything else would leave the message, and be raised by every later `recv`.

    Raises:
        BaseException: The error itself, where it is to end a program or a task.
    """
    if not isinstance(error, Exception):
        from asyncio import CancelledError  # slow to load; who uses it has done so

        ends = (KeyboardInterrupt, SystemExit, GeneratorExit, CancelledError)
        if isinstance(error, ends):
            try:
                raise error
            finally:
                del error  # as in `fail`
    return CodecError(f"{what} raised {shown(error):.500}")
