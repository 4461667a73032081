"""What becomes of the library's log where an application sends it on."""

from __future__ import annotations

import logging

import pytest

import mq
from mq import speed
from mq.mesh import waiting


class PublishingHandler(logging.Handler):
    """Sends the log to where it is about."""

    def __init__(self, queue: mq.MQ) -> None:
        super().__init__()
        self._queue = queue
        self.refused: list[RuntimeError] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._queue.publish("log", record.getMessage())
        except RuntimeError as error:
            self.refused.append(error)


@pytest.mark.skipif(not speed.COMPILED, reason="mq._speed was not built or not wanted")
def test_a_log_that_is_published_on_its_own_queue_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the queue says while it works would wait for that work for ever."""
    monkeypatch.setattr(waiting, "COMPLAIN_SECONDS", 0.0)
    with (
        mq.connect("inproc", group="logging", name="a") as a,
        mq.connect("inproc", group="logging", name="b") as b,
    ):
        b.subscribe("t", depth=1)
        a.publish("t", 1)
        handler = PublishingHandler(a)
        waiting.logger.addHandler(handler)
        try:
            with pytest.raises(mq.PublishTimeout):
                a.publish("t", 2, timeout=0.1)
        finally:
            waiting.logger.removeHandler(handler)
        assert len(handler.refused) == 1
        assert b.recv(timeout=10).payload == 1
        a.publish("t", 3, timeout=10)
        assert b.recv(timeout=10).payload == 3
