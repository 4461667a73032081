"""A short soak; `python -m mq.testing.soak` runs for as long as one likes."""

from __future__ import annotations

import os

import pytest

from mq.testing.soak import Soak

SECONDS = float(os.environ.get("MQ_SOAK_SECONDS", "75"))
BACKENDS = os.environ.get("MQ_SOAK_BACKENDS", "shm").split(",")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_lost_or_left_at_full_speed_with_deaths(backend: str) -> None:
    """Mixed sizes, members killed and restarted; no growth of anything at the end."""
    # The other parts of the suite run at the same time: it takes what they leave.
    soak = Soak(backend, SECONDS, niceness=10)

    assert soak.run() == []
    assert soak.rounds >= 2
    assert soak.deaths > 4
    assert soak.messages > 1000


def test_a_soak_needs_members_that_can_be_killed() -> None:
    """Threads cannot."""
    with pytest.raises(ValueError, match="no processes"):
        Soak("inproc", 1.0)
