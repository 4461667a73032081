"""What the files of a directory are called that tell who holds a name.

``m-<name's hash>-<generation>`` is a state of one name, ``free-<generation>`` that of
all names that have no file of their own any more.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

FREE: Final = "free"
"""What stands in place of the hash of a name."""
_STATE: Final = re.compile(rf"(m-[0-9a-f]{{24}}|{FREE})-([1-9][0-9]{{0,18}})")


def hash_of(name: str) -> str:
    """What the file of a name begins with."""
    return f"m-{hashlib.sha256(name.encode()).hexdigest()[:24]}"


def generation(file: str) -> int:
    """Which generation the state in this file has."""
    return int(file.rpartition("-")[2])


def newest(files: list[str]) -> dict[str, str]:
    """The file of the highest generation by the hash of its name, or `FREE`."""
    found: dict[str, str] = {}
    for file in filter(_STATE.fullmatch, files):
        key = file.rpartition("-")[0]
        if key not in found or generation(file) > generation(found[key]):
            found[key] = file
    return found


def of_all_free(files: list[str]) -> list[str]:
    """Those that tell the state of all names without a file of their own."""
    return [f for f in files if _STATE.fullmatch(f) and f.startswith(f"{FREE}-")]


def current(name: str, files: list[str]) -> str | None:
    """Which of these files tells the state of a name."""
    found = newest(files)
    return found.get(hash_of(name), found.get(FREE))


def is_below(file: str | None, limit: int) -> bool:
    """Whether there is a state, and of a lower generation than this one."""
    return file is not None and generation(file) < limit
