"""The files of a link's unix sockets: what they are called, and that they go."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from typing import Final

_TOKEN_BYTES: Final = 6


class SocketFiles:
    """The files of the sockets on which one link listens.

    Args:
        suffix: Of their names, which tells people what they are of.
    """

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._paths: list[str] = []
        self._own_directory = ""

    def new(self, directory: str | None) -> str:
        """A path that nobody has.

        Args:
            directory: Of mode 0700, as for `Link.open`; None: one is made.
        """
        if directory is None:
            self._own_directory = self._own_directory or tempfile.mkdtemp(prefix="mq-")
            directory = self._own_directory
        name = f"{secrets.token_hex(_TOKEN_BYTES)}.{self._suffix}"
        return os.path.join(directory, name)

    def add(self, path: str) -> None:
        """A socket of the link listens there."""
        self._paths.append(path)

    def remove(self) -> None:
        """Remove them all, as far as they are there, and the directory made for them.

        Idempotent.
        """
        while self._paths:
            with contextlib.suppress(OSError):
                os.unlink(self._paths.pop())
        if self._own_directory:
            shutil.rmtree(self._own_directory, ignore_errors=True)
            self._own_directory = ""

    def abandon(self) -> None:
        """In a forked child: they are the parent's to remove."""
        self._paths.clear()
        self._own_directory = ""
