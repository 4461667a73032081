"""What is looked at before a queue is made."""

from __future__ import annotations

import errno
import os

import pytest

from mq.errors import TransportUnavailable
from mq.join import check_descriptors


def test_a_process_out_of_descriptors_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even where there is none left to count those that are open."""

    def refuse(path: str) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(TransportUnavailable, match="ulimit"):
        check_descriptors()
