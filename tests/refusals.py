"""What the system refuses, in place of its calls."""

from __future__ import annotations

import errno
import os
import socket
from typing import NoReturn


def no_descriptor(*args: object, **options: object) -> NoReturn:
    """As where the process may open nothing more."""
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def unknown_host(*args: object, **options: object) -> NoReturn:
    """As `getaddrinfo` of a name that nobody knows."""
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
