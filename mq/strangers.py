"""Who comes to a member and whom nobody knows by name, as the log tells of them."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Final

from mq.addresses import origin
from mq.log import MOST_CHARACTERS, MOST_STRANGERS, Log, WarnOnce

FORGET_SECONDS: Final = 3600.0
"""How long it is known what was told of strangers; then it may be said again."""
_PROCESS: Final = re.compile(r"\bpid \d+\b")
"""In the address of who came over a unix socket."""
MOST_OF_HOST: Final = 8
"""Lines of a host, or of a user of this one, who may send something else each time."""


class WarnOfStrangers:
    """Has a log say what is wrong with strangers, each once an hour, not of too many.

    Who does not know that it was refused tries again, from another port each time: of
    those each reason is told of once for a host, so that a probe there hides no member.
    Of any kind few are, so that one host hides no other.

    Args:
        log: Where.
        each: They are told of it, and may end: who comes from another port is another.
    """

    def __init__(self, log: Log, *, each: bool = False) -> None:
        self._log = log
        self._each = each
        self._begin()

    def _begin(self) -> None:
        self._warn = WarnOnce(self._log, MOST_STRANGERS)
        self._lines: Counter[str] = Counter()
        self._until = time.monotonic() + FORGET_SECONDS

    def __call__(self, address: str, why: str, text: str, *args: object) -> None:
        """Warn of one.

        Args:
            address: Where it comes from.
            why: What it has done, which may have its address in it.
        """
        if time.monotonic() >= self._until:
            self._begin()
        host = _PROCESS.sub("", origin(address))
        key = address
        if not self._each:
            key = why[:MOST_CHARACTERS]  # which may be what it has sent
            key = key.replace(address, host) if address else key
        if self._lines[host] < MOST_OF_HOST and self._warn((host, key), text, *args):
            self._lines[host] += 1
