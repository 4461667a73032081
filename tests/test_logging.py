"""What becomes of the library's log where an application sends it on."""

from __future__ import annotations

import logging

import pytest

import mq
from mq import speed
from mq.log import Log
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
            raise


@pytest.mark.skipif(not speed.COMPILED, reason="mq._speed was not built or not wanted")
def test_a_log_that_is_published_on_its_own_queue_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the queue says while it works would wait for that work for ever.

    And must not end that work: the handler's error is printed.
    """
    monkeypatch.setattr(waiting, "COMPLAIN_SECONDS", 0.0)
    with (
        mq.connect("inproc", group="logging", name="a") as a,
        mq.connect("inproc", group="logging", name="b") as b,
    ):
        b.subscribe("t", depth=1)
        a.publish("t", 1)
        handler = PublishingHandler(a)
        logging.getLogger(waiting.__name__).addHandler(handler)
        try:
            with pytest.raises(mq.PublishTimeout):
                a.publish("t", 2, timeout=0.1)
        finally:
            logging.getLogger(waiting.__name__).removeHandler(handler)
        assert len(handler.refused) == 1
        assert "RuntimeError: this thread is in the middle" in capsys.readouterr().err
        assert b.recv(timeout=10).payload == 1
        a.publish("t", 3, timeout=10)
        assert b.recv(timeout=10).payload == 3


def test_a_record_says_where_it_is_from(caplog: pytest.LogCaptureFixture) -> None:
    """Not where all of them pass through."""
    with caplog.at_level(logging.DEBUG, logger="mq.tried"):
        Log("mq.tried").info("%d", 1)
        try:
            raise ValueError("a reason")
        except ValueError:
            Log("mq.tried").exception("two")
    names = [(record.filename, record.funcName) for record in caplog.records]
    assert names == [("test_logging.py", "test_a_record_says_where_it_is_from")] * 2
    assert "a reason" in caplog.text
