"""The library's log, much of which is written in the middle of its work."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter

_OWN_FRAMES: Final = 1 if sys.version_info >= (3, 11) else 2
"""Levels of the stack below the caller: `log`; before 3.11 also what calls that."""


class Log(_Adapter):
    """A logger whose handlers cannot end what is being told of by what they raise.

    That is printed, as `logging.Handler.handleError` does.

    Args:
        name: Of the logger.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Have the handlers told, if any wants to be."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + _OWN_FRAMES
        try:
            super().log(level, msg, *args, **kwargs)
        except Exception:
            if logging.raiseExceptions:
                traceback.print_exc()
