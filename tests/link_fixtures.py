"""What tests of links run under; import the name to use it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Socket files go where no other test looks, under a short path."""
    with tempfile.TemporaryDirectory(prefix="links-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield directory
