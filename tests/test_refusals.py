"""What the log says of strangers that are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from world import World

from mq import strangers
from mq.log import MOST_STRANGERS
from mq.mesh import handshake as hs
from mq.strangers import MOST_OF_HOST
from mq.stream import listening
from mq.transport import What


def test_each_reason_is_told_once_for_a_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A probe from there hides no member that comes with a bad certificate later."""
    refusals = listening.Refusals()
    for port in range(3):
        address = f"tls://10.0.0.1:{port}"
        for why in ("it speaks no TLS", f"no connection with {address}: expired"):
            refusals.tell(address, why, misfit=False)
    assert caplog.messages == [
        "refused tls://10.0.0.1:0: it speaks no TLS",
        "refused tls://10.0.0.1:0: no connection with tls://10.0.0.1:0: expired",
    ]


def test_one_host_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Though it sends something else each time, others are still told of."""
    refusals = listening.Refusals()
    for number in range(2 * MOST_STRANGERS):
        refusals.tell("tcp://10.0.0.1:7", f"sent {number}", misfit=False)
    refusals.tell("tcp://10.0.0.2:7", "sent 0", misfit=False)
    assert len(caplog.messages) < MOST_STRANGERS / 2
    assert caplog.messages[-1] == "refused tcp://10.0.0.2:7: sent 0"


def test_many_hosts_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an hour it is said again, and of others."""
    now = [0.0]
    monkeypatch.setattr(strangers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    refusals = listening.Refusals()
    for _ in range(2):
        caplog.clear()
        for host in range(2 * MOST_STRANGERS):
            refusals.tell(f"tcp://10.0.0.{host}:7", "sent nothing", misfit=False)
            refusals.tell(f"tcp://10.0.0.{host}:7", "version 2", misfit=True)
        assert len(caplog.messages) == 2 * MOST_STRANGERS
        now[0] += strangers.FORGET_SECONDS


def test_a_host_that_tries_again_and_again_hides_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From another port each time, or by another process."""
    refused = World("a")["a"].mesh.setbacks
    for port in range(2 * MOST_STRANGERS):
        refused.strange(hs.SECRET, "", f"tcp://10.0.0.1:{port}", "another secret")
        refused.strange(hs.SECRET, "", f"ipc://(pid {port} of user 0)", "another one")
    refused.strange(hs.SECRET, "", "tcp://10.0.0.2:1", "another secret")
    texts = caplog.messages
    for host in ("tcp://10.0.0.1:", "ipc://(pid "):
        assert sum(host in text for text in texts) == MOST_OF_HOST
    assert len(texts) == 2 * MOST_OF_HOST + 1
    assert "unknown peer at tcp://10.0.0.2:1: another secret" in texts[-1]


def test_what_a_member_does_wrong_on_its_link_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By name and reason, which are cut; what breaks by itself is not."""
    world = World("a")
    world.join("b")
    world.settle()
    a = world["a"]
    for reason, is_malformed in [("reset", False), ("g" * 9999, True), ("more", True)]:
        (session,) = a.mesh.sessions.values()
        assert session.conn is not None
        a.link.report(What.LOST, session.conn, reason, is_malformed)
        world.advance(1.0)
    (said,) = caplog.messages
    assert said.startswith("dropped a connection of b at")
    assert "ggg" in said
    assert len(said) < 700
    assert session.stats.malformed == 2
