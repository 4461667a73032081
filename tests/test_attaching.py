"""Members that were given addresses, and who listens there as time goes by."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from meeting import DEADLINE, eventually, free_port
from nng_links import nng_runs

import mq
from mq import attaching, log
from mq.attaching import Attached

__all__ = ["nng_runs"]

BACKENDS = ["nng:tcp", "shm", "tcp", "torchrpc:cpu", "zmq:tcp"]
OPTIONS: dict[str, Any] = {"group": "g", "peer_timeout": 1.0}


def names(queue: mq.MQ) -> list[str]:
    return [member.name for member in queue.members()]


def place(backend: str, folder: Path, name: str) -> str:
    """An address that two members may listen on, one after the other."""
    if backend == "shm":
        return f"shm://{folder}/{name}"
    return f"tcp://127.0.0.1:{free_port()}"


@contextlib.contextmanager
def connecting(backend: str, attach_to: list[str]) -> Iterator[list[Any]]:
    """Another thread connects meanwhile; the queue, or its error, is in the list."""
    found: list[Any] = []

    def connect() -> None:
        try:
            options = {"connect_timeout": DEADLINE, **OPTIONS}
            found.append(mq.connect(backend, name="c", attach_to=attach_to, **options))
        except mq.MQError as error:
            found.append(error)

    thread = threading.Thread(target=connect, name="mq-test-attaching")
    thread.start()
    try:
        yield found
    finally:
        thread.join(2 * DEADLINE)
        for queue in found:
            if isinstance(queue, mq.MQ):
                queue.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_was_reached_and_is_begun_anew_is_reached_again(
    backend: str, tmp_path: Path, nng_runs: None
) -> None:
    """While connect still waits for another."""
    here, there = place(backend, tmp_path, "a"), place(backend, tmp_path, "b")
    with contextlib.ExitStack() as stack:
        first = mq.connect(backend, name="a", listen=here, **OPTIONS)
        found = stack.enter_context(connecting(backend, [here, there]))
        first.wait_for_members(2, timeout=DEADLINE)
        first.close()
        for name, at in (("a", here), ("b", there)):
            queue = mq.connect(backend, name=name, listen=at, **OPTIONS)
            stack.enter_context(queue)
        eventually(lambda: bool(found))
        assert names(found[0]) == ["a", "b", "c"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_is_begun_anew_at_an_address_is_met_again(
    backend: str, tmp_path: Path, nng_runs: None
) -> None:
    """Nobody but who was given the address could know of the other."""
    hub = place(backend, tmp_path, "hub")
    first = mq.connect(backend, name="hub", listen=hub, **OPTIONS)
    with mq.connect(backend, name="leaf", attach_to=hub, **OPTIONS) as leaf:
        leaf.subscribe("t")
        for n in range(2):
            assert first.subscribers("t") == ["leaf"]
            first.publish("t", n, timeout=DEADLINE)
            assert leaf.recv(timeout=DEADLINE).payload == n
            first.close()
            eventually(lambda: names(leaf) == ["leaf"])
            first = mq.connect(backend, name="hub", listen=hub, **OPTIONS)
            first.wait_for_subscribers("t", 1, timeout=DEADLINE)
        first.close()


def test_who_refuses_at_an_address_later_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As it may be another group's by then; it is told once, and tried again."""
    hub = place("tcp", Path(), "hub")
    first = mq.connect("tcp", name="hub", listen=hub, **OPTIONS)
    with mq.connect("tcp", name="leaf", attach_to=hub, **OPTIONS) as leaf:
        first.close()
        with mq.connect(
            "tcp", name="x", listen=hub, secret="another one", **OPTIONS
        ) as x:
            eventually(lambda: x.stats()["mesh"]["unauthenticated"] >= 1)
        with mq.connect("tcp", name="hub", listen=hub, **OPTIONS) as again:
            eventually(lambda: names(leaf) == ["hub", "leaf"])
            eventually(lambda: names(again) == ["hub", "leaf"])  # maybe a little later
    log.flush()
    (told,) = [text for text in caplog.messages if "refuses this member" in text]
    assert told.startswith(f"who listens at {hub} of attach_to now")
    assert "secret" in told


def test_why_nobody_is_reached_for_long_is_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it may be a certificate, which is no refusal for good."""
    monkeypatch.setattr(attaching, "LONG_SECONDS", 0.5)
    hub = place("tcp", Path(), "hub")
    with mq.connect("tcp", name="hub", listen=hub, **OPTIONS) as first:
        leaf = mq.connect("tcp", name="leaf", attach_to=hub, **OPTIONS)
        first.close()

    def told() -> list[str]:
        log.flush()
        return [text for text in caplog.messages if "nobody was reached" in text]

    with leaf:
        for outage in (1, 2):
            eventually(lambda count=outage: len(told()) == count)
            with mq.connect("tcp", name="hub", listen=hub, **OPTIONS):
                eventually(lambda: names(leaf) == ["hub", "leaf"])
        eventually(lambda: len(told()) == 3)
    assert told()[0].startswith(f"nobody was reached at {hub} of attach_to for 0.5 s")
    assert "refused" in told()[0]


def test_two_of_one_name_are_told_of() -> None:
    """Whoever attaches to both could not tell them apart."""
    with (
        mq.connect("tcp", name="w", listen="tcp://127.0.0.1:0", **OPTIONS) as one,
        mq.connect("tcp", name="w", listen="tcp://127.0.0.1:0", **OPTIONS) as two,
    ):
        both = [q.describe()["addresses"][0] for q in (one, two)]
        with pytest.raises(mq.ConnectRefused, match=r"name 'w' is held by pid"):
            mq.connect("tcp", name="c", attach_to=both, **OPTIONS)


def test_a_connect_that_begins_late_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where an engine took longer to start than there was time."""
    nobody, reach = place("tcp", Path(), ""), Attached.reach

    def late(self: Attached, deadline: float) -> None:
        reach(self, deadline - 5.0)

    monkeypatch.setattr(Attached, "reach", late)
    with pytest.raises(mq.ConnectTimeout, match=nobody):
        mq.connect("tcp", name="c", attach_to=nobody, connect_timeout=0.5, **OPTIONS)


def test_a_hub_that_replaces_a_leaf_ends_nothing_else() -> None:
    """It has another of that name by a rendezvous, which the leaf knows nothing of."""
    hub = place("tcp", Path(), "")
    group = {"rendezvous": f"tcp://127.0.0.1:{free_port()}", "secret": "of the group"}
    options = {**OPTIONS, "secret": "of the group"}
    with (
        mq.connect("tcp", name="a", listen="tcp://127.0.0.1:0", **options) as other,
        mq.connect("tcp", name="hub", listen=hub, **options) as first,
    ):
        attach_to = [other.describe()["addresses"][0], hub]
        with mq.connect("tcp", name="leaf", attach_to=attach_to, **options) as leaf:
            first.close()
            group = {**options, **group}
            with (
                mq.connect("tcp", name="hub", listen=hub, **group) as again,
                mq.connect("tcp", name="leaf", **group),
            ):
                eventually(lambda: again.stats()["mesh"]["refused"] > 0)
                assert names(leaf) == ["a", "leaf"]
            again.close()
