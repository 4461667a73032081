"""What becomes of what the application's code raises, and how its objects are shown."""

from __future__ import annotations

from mq.errors import CodecError
from mq.safe_types import type_name


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
            raise error
    return CodecError(f"{what} raised {shown(error):.500}")
