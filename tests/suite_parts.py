"""The whole suite, in parts: one after the other its cases take minutes."""

from __future__ import annotations

from typing import Final

import pytest

from mq.testing import CASES

_COUNT: Final = 4
_NAMES: Final = [case.name for case in CASES if not case.large]

each_part = pytest.mark.parametrize(
    "part",
    [_NAMES[first::_COUNT] for first in range(_COUNT)],
    ids=[f"part{first}" for first in range(_COUNT)],
)
"""Gives a test the names of some cases; all its runs together have all of them."""
