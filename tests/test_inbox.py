"""The inbox of `recv` on its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from mq.mesh.inbox import Inbox
from mq.mesh.incoming import Run, Source
from mq.mesh.session import Session
from mq.mesh.subscription import Subscription
from mq.stats import TopicStats


def source_of(subscription: Subscription, incarnation: str) -> Source:
    """A publisher in one session."""
    session: Any = SimpleNamespace(peer=SimpleNamespace(incarnation=incarnation))
    source = Source(subscription, cast(Session, session))
    source.arrivals.append(source.begin(0, -1, -1))
    return source


def test_what_is_still_copied_is_overtaken_by_others_only() -> None:
    """Not by what the same publisher has sent since, in another session either."""
    subscription = Subscription(1, "t", None, 10, 1 << 20, False, None, TopicStats())
    inbox = Inbox()
    runs = [
        Run(source_of(subscription, incarnation), sequence, (0.0,), [memoryview(b"x")])
        for sequence, incarnation in enumerate(["one", "one", "other"])
    ]
    inbox.fifo.extend(runs)
    runs[0].copying = cast(Any, object())
    assert inbox.take().sequence == 2
    inbox.hand_over()
    assert inbox.take() is None
    runs[0].copying = None
    for sequence in (0, 1):
        assert inbox.take().sequence == sequence
        inbox.hand_over()
