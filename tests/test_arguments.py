"""Arguments that make no sense are refused by name, and change nothing."""

from __future__ import annotations

import asyncio
import copy
import enum
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import mq
from mq.testing.waiting import wait_until

Pair = tuple[mq.MQ, mq.MQ]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two members; the second is subscribed to t."""
    with mq.connect("inproc", group="arguments", name="a") as a:
        with mq.connect("inproc", group="arguments", name="b") as b:
            b.subscribe("t")
            yield a, b


def _loan(queue: mq.MQ, timeout: Any) -> None:
    with queue.loan("t", (2,), torch.float32, timeout=timeout):
        raise AssertionError("it was loaned")


CALLS: dict[str, Callable[[mq.MQ, Any], object]] = {
    "publish": lambda queue, time: queue.publish("t", 1, retain=True, timeout=time),
    "recv": lambda queue, time: queue.recv(timeout=time),
    "flush": lambda queue, time: queue.flush(timeout=time),
    "loan": _loan,
    "subscribe": lambda queue, time: queue.subscribe("u", timeout=time),
    "wait_for_members": lambda queue, time: queue.wait_for_members(9, timeout=time),
    "wait_for_subscribers": (
        lambda queue, time: queue.wait_for_subscribers("t", 9, timeout=time)
    ),
    "arecv": lambda queue, time: asyncio.run(queue.arecv(timeout=time)),
    "aflush": lambda queue, time: asyncio.run(queue.aflush(timeout=time)),
    "apublish": (lambda queue, time: asyncio.run(queue.apublish("t", 1, timeout=time))),
}


@pytest.mark.parametrize("name", [*CALLS, "close", "members", "stats", "unsubscribe"])
def test_a_misspelt_option_is_of_a_call_that_users_know(pair: Pair, name: str) -> None:
    """Not of a class behind it, which they would look for in vain."""
    with pytest.raises(
        TypeError, match=rf"^MQ\.{name}\(\) got an .* 'dept'(\. Did you|$)"
    ):
        getattr(pair[0], name)(dept=1)
    call = getattr(mq.MQ, name)
    assert pickle.loads(pickle.dumps(call)) is call  # as where spawn is told of it


@pytest.mark.parametrize(
    "time",
    [-1, float("nan"), -(10**400), "1", True, b"", [1], np.timedelta64(1, "s")],
    ids=lambda time: repr(time)[:30],
)
@pytest.mark.parametrize("call", CALLS)
def test_a_time_that_is_none_is_refused(pair: Pair, call: str, time: Any) -> None:
    """At once, by every call that waits."""
    kind = ValueError if isinstance(time, (int, float)) else TypeError
    kind = TypeError if time is True else kind
    with pytest.raises(kind, match="timeout is "):
        CALLS[call](pair[0], time)
    with pytest.raises(kind, match="linger is "):
        pair[0].close(linger=time)
    assert "u" not in pair[0].stats()["topics"]
    pair[0].subscribe("u", depth=1, timeout=10)
    pair[0].publish("t", "and goes on")
    assert pair[1].recv(timeout=10).payload == "and goes on"


@pytest.mark.parametrize("time", [-1, float("nan"), "1", True], ids=repr)
def test_it_is_refused_where_nothing_is_waited_for(pair: Pair, time: Any) -> None:
    """With messages that are there, and room for more: on the short ways, too."""
    a, b = pair
    b.subscribe("t", timeout=10)
    for number in range(50):
        a.publish("t", number)
        for call in (a.publish, lambda *m, **at: asyncio.run(a.apublish(*m, **at))):
            with pytest.raises((TypeError, ValueError), match="timeout is "):
                call("t", "not this", timeout=time)
    a.flush(timeout=10)
    for number in range(50):
        with pytest.raises((TypeError, ValueError), match="timeout is "):
            b.recv(timeout=time)
        assert b.recv(timeout=10).payload == number


@pytest.mark.parametrize("time", [float("inf"), 1e300, 10**400, sys.maxsize])
def test_any_time_may_be_waited(pair: Pair, time: float) -> None:
    """By the thread that watches the engine, and by others that wait beside it."""
    a, b = pair
    got: list[Any] = []
    threads = [
        threading.Thread(target=lambda: got.append(b.recv(timeout=time).payload))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for number in range(2):
        a.publish("t", number, timeout=time)
    for thread in threads:
        thread.join(30)
    assert sorted(got) == [0, 1]
    a.flush(timeout=time)
    a.wait_for_subscribers("t", timeout=time)
    a.close(linger=time)


def test_a_time_may_be_a_number_of_numpys(pair: Pair) -> None:
    """Where it is waited for, too."""
    with pytest.raises(mq.RecvTimeout, match=r"within 0\.5 s; it is subscribed to no"):
        pair[0].recv(timeout=np.float32(0.5))
    with pytest.raises(mq.RecvTimeout, match=r"within 0\.5 s"):
        pair[0].recv(timeout=np.float16(0.5))  # which has no room for the longest time
    pair[0].subscribe("t")
    with pytest.raises(mq.RecvTimeout, match=r"within 0 s$"):
        pair[0].recv(timeout=0)


@pytest.mark.parametrize("count", ["2", 1.5, None])
def test_what_is_waited_for_is_a_whole_number(pair: Pair, count: Any) -> None:
    """Refused by name, before anything is waited for."""
    with pytest.raises(TypeError, match="n is a whole number"):
        pair[0].wait_for_members(count, timeout=0)
    with pytest.raises(TypeError, match="n is a whole number"):
        pair[0].wait_for_subscribers("t", count, timeout=0)


def test_a_copy_of_clear_is_clear() -> None:
    """It may have been read from a configuration, or sent to a process."""
    copies = copy.copy(mq.CLEAR), copy.deepcopy(mq.CLEAR)
    assert all(made is mq.CLEAR for made in copies)
    assert pickle.loads(pickle.dumps(mq.CLEAR)) is mq.CLEAR


def test_a_loan_names_its_dtype(pair: Pair) -> None:
    """NumPy takes none for a float of 8 bytes."""
    with pytest.raises(TypeError, match="dtype is None"), pair[0].loan("t", (2,), None):
        pass


def test_a_loan_of_nothing_is_in_host_memory(pair: Pair) -> None:
    """As any other, whatever device the application makes tensors on by default."""
    with torch.device("meta"), pair[0].loan("t", (0, 3), torch.float32) as tensor:
        assert tensor.device.type == "cpu"


def test_subscriptions_are_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer takes no more of them: it would give this member up."""
    monkeypatch.setattr("mq.message.MAX_SUBSCRIPTIONS", 2)
    for topic in ("t", "u", "t"):
        pair[0].subscribe(topic)
    with pytest.raises(ValueError, match="subscribes to 2 topics at most"):
        pair[0].subscribe("v")
    pair[0].unsubscribe("t")
    pair[0].subscribe("v")


def test_a_closed_queue_cannot_be_entered(pair: Pair) -> None:
    """What is done in there would fail one by one."""
    pair[1].close()
    with pytest.raises(mq.Closed), pair[1]:
        pass

    async def enter() -> None:
        async with pair[1]:
            raise AssertionError("it was entered")

    with pytest.raises(mq.Closed):
        asyncio.run(enter())


def test_close_may_take_as_long_as_it_takes(pair: Pair) -> None:
    """It goes on only when the other end has what was published."""
    a, b = pair
    with b._lead.lock:  # b cannot take it
        a.publish("t", 1)
        closing = threading.Thread(target=a.close, args=(None,))
        closing.start()
        wait_until(lambda: a._driver._leave_by, "close to begin")
        assert min(a._driver._leave_by) - time.monotonic() > 1e9  # in decades
    assert b.recv(timeout=10).payload == 1
    closing.join(30)
    assert [member.name for member in b.members()] == ["b"]


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 0},
        {"depth": 1.5},
        {"depth": "8"},
        {"window_bytes": -1},
        {"window_bytes": True},
    ],
    ids=str,
)
def test_a_window_that_cannot_be_is_refused(pair: Pair, options: Any) -> None:
    """By name, before anybody is told of the subscription."""
    ((name, given),) = options.items()
    kind = ValueError if type(given) is int else TypeError
    with pytest.raises(kind, match=f"{name} is .* 1 or more"):
        pair[1].subscribe("u", **options)
    assert pair[0].subscribers("u") == []
    pair[1].subscribe("u", timeout=10)


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "1", None])
def test_keeping_a_number_that_cannot_be_is_refused(count: Any) -> None:
    """By name."""
    kind = ValueError if type(count) is int else TypeError
    with pytest.raises(kind, match=r"n of mq\.keep_last is .* 1 or more"):
        mq.keep_last(count)


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "x", (1,)], ids=repr)
def test_a_history_of_a_number_that_cannot_be_is_refused(pair: Pair, keep: Any) -> None:
    """By name, before anybody is told of it: peers would cut this member off."""
    kind = ValueError if type(keep) is int else TypeError
    with pytest.raises(kind, match=r"keep of mq\.History is .* 1 or more"):
        pair[1].subscribe("u", history=mq.History(keep))
    with pytest.raises(TypeError, match=r"history is mq.*keep_last\(n\), not "):
        pair[1].subscribe("u", history=keep)
    assert pair[0].subscribers("u") == []
    pair[0].publish("t", "and goes on")
    assert pair[1].recv(timeout=10).payload == "and goes on"


class Count(int):
    """A whole number that msgpack does not take for one."""


class Few(enum.IntEnum):
    """Another."""

    THREE = 3


@pytest.mark.parametrize("three", [np.int64(3), Count(3), Few.THREE], ids=repr)
def test_whole_numbers_of_other_types_count(pair: Pair, three: Any) -> None:
    """Members are told of them as plain ones."""
    a, b = pair
    b.subscribe("depth", depth=three, timeout=10)
    b.subscribe("window", window_bytes=three, timeout=10)
    b.subscribe("history", history=mq.keep_last(three), timeout=10)
    b.subscribe("made", history=mq.History(three), timeout=10)
    for topic in ("depth", "window", "history", "made"):
        a.publish(topic, topic)
        assert b.recv(timeout=10).payload == topic
    b.subscribe("history", history=mq.keep_last(3), timeout=10)
    a.wait_for_subscribers("history", Count(1), timeout=10)


@pytest.mark.parametrize("most", [2**31, 2**62, sys.maxsize, 2**63, 2**64, 2**70])
def test_more_than_anybody_can_hold_is_as_good_as_no_bound(
    pair: Pair, most: int
) -> None:
    """What is sent of it in 31 or 63 bits is enough."""
    a, b = pair
    for topic, options in (
        ("depth", {"depth": most}),
        ("window", {"window_bytes": most}),
        ("history", {"history": mq.keep_last(most)}),
        ("made", {"history": mq.History(most)}),
    ):
        for _ in range(2):
            b.subscribe(topic, timeout=10, **options)  # type: ignore[arg-type]
        for number in range(3):
            a.publish(topic, number)
        assert [b.recv(timeout=10).payload for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("option", ["max_message_bytes", "shm_bytes"])
def test_a_limit_is_a_whole_number_of_any_type(option: str) -> None:
    """Others join; what is none is refused by name."""
    options: dict[str, Any] = {"group": "limits", "connect_timeout": 5}
    for number in (np.int64(1 << 24), Count(1 << 24)):
        with (
            mq.connect("shm", name="a", **options, **{option: number}) as a,
            mq.connect("shm", name="b", **options) as b,
        ):
            assert [member.name for member in b.members()] == ["a", "b"]
            assert a.describe()["max_message_bytes"] >= 1 << 24
    for wrong in ("1", 1.5, True):
        with pytest.raises(TypeError, match=f"^{option} is a whole number, . or more"):
            mq.connect("shm", **options, **{option: wrong})
    with pytest.raises(ValueError, match=f"^{option} is -1, but must be . or more"):
        mq.connect("shm", **options, **{option: -1})


@pytest.mark.parametrize("option", ["max_message_bytes", "shm_bytes"])
@pytest.mark.parametrize("most", [2**62, 2**63, 2**64, 2**70])
def test_a_limit_beyond_anything_is_as_good_as_none(option: str, most: int) -> None:
    """Others join, and what they publish arrives."""
    options = {"group": "limits", "connect_timeout": 5, option: most}
    with mq.connect("shm", name="a", **options) as a:
        with mq.connect("shm", name="b", **options) as b:
            b.subscribe("t", timeout=10)
            a.publish("t", torch.ones(1 << 20))
            assert b.recv(timeout=10).payload.sum() == 1 << 20


@pytest.mark.parametrize(
    "dtype", [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2], ids=str
)
def test_a_dtype_that_cannot_be_sent_is_not_loaned(pair: Pair, dtype: Any) -> None:
    """Torch itself ends the process where it makes such a tensor of given memory."""
    with (
        pytest.raises(ValueError, match=r"dtype torch\.qu?int"),
        pair[0].loan("t", (2,), dtype),
    ):
        raise AssertionError("it was loaned")


@pytest.mark.parametrize(
    ("topic", "kind"), [(5, TypeError), ("", ValueError), ("a\n", ValueError)], ids=repr
)
def test_a_topic_that_cannot_be_is_not_unsubscribed(
    pair: Pair, topic: Any, kind: type[Exception]
) -> None:
    """Nothing was subscribed to by that name, so it is a mistake."""
    with pytest.raises(kind, match="topic"):
        pair[1].unsubscribe(topic)


@pytest.mark.parametrize("topic", [5, None, ["t"], {}], ids=repr)
def test_what_is_no_str_is_no_topic(pair: Pair, topic: Any) -> None:
    """Also what cannot be looked up."""
    publisher, subscriber = pair
    for call in (
        lambda: publisher.publish(topic, 1),
        lambda: publisher.publish(topic, 1, retain=True),
        lambda: asyncio.run(publisher.apublish(topic, 1)),
        lambda: subscriber.subscribe(topic),
    ):
        with pytest.raises(TypeError, match="a topic is a str, not "):
            call()


@pytest.mark.parametrize("attribute", ["name", "backend", "capabilities"])
def test_what_a_queue_is_cannot_be_changed(pair: Pair, attribute: str) -> None:
    """It would not be told to anybody."""
    with pytest.raises(AttributeError, match=attribute):
        setattr(pair[0], attribute, "other")
    assert (pair[0].name, pair[0].backend) == ("a", "inproc")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_queue_cannot_be_copied(pair: Pair, copied: Callable[[Any], object]) -> None:
    """As by a process that is started with one; the error says what to do there."""
    with pytest.raises(TypeError, match=r"'a' in group 'arguments'.*mq\.connect there"):
        copied(pair[0])


def test_a_topic_is_counted_from_its_subscription_on(pair: Pair) -> None:
    """A subscriber need not ask whether something came already."""
    assert pair[1].stats()["topics"]["t"]["received"] == 0
    pair[1].unsubscribe("t")
    assert "t" not in pair[1].stats()["topics"]


@pytest.mark.parametrize("device", ["nonsense", "", "cuda:-1", "cuda:4095", 5])
def test_a_device_that_is_not_there_is_refused(pair: Pair, device: Any) -> None:
    """By `subscribe`: `recv` would lose every message with a tensor."""
    kind = ValueError if isinstance(device, str) else TypeError
    with pytest.raises(kind, match=f"device is .*{device}"):
        pair[1].subscribe("u", device=device)
    assert pair[0].subscribers("u") == []
    pair[1].subscribe("u", device="cpu", timeout=10)


def test_the_device_of_tensors_without_data_is_refused(pair: Pair) -> None:
    """What is received would be lost."""
    with pytest.raises(ValueError, match=r"device is 'meta', where .*leave device= "):
        pair[1].subscribe("u", device="meta")
    assert pair[0].subscribers("u") == []


def test_a_tensor_that_its_device_does_not_take_is_refused_by_name(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And counted; the queue goes on."""
    a, b = pair
    b.subscribe("u", device="cpu", timeout=10)

    def broken(tensor: torch.Tensor, device: str) -> torch.Tensor:
        raise RuntimeError("CUDA error: an assert.\nAnd more.")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "to", broken)
        a.publish("u", {"x": torch.ones(2)})
        problem = "message 0 from 'a' on 'u': .* 8 bytes .* on cpu: CUDA .* assert;"
        with pytest.raises(mq.CodecError, match=problem):
            b.recv(timeout=10)
    assert b.stats()["topics"]["u"]["refused"] == 1
    a.publish("u", torch.ones(2))
    assert b.recv(timeout=10).payload.sum() == 2


def test_a_tensor_for_which_its_device_is_full_comes_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the next call, as where this process lacks memory, and once."""
    a, b = pair
    b.subscribe("u", device="cpu", timeout=10)

    def full(tensor: torch.Tensor, device: str) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nAnd more.")

    for number, tries in enumerate((1, 2)):
        a.publish("u", {"x": torch.ones(2)}, timeout=10)
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "to", full)
            for n in range(tries):
                becomes = ("comes again", "is given up")[n]
                problem = (
                    f"message {number} .* {becomes}: .* on cpu: CUDA out of memory;"
                )
                with pytest.raises(MemoryError, match=problem):
                    b.recv(timeout=10)
        if tries == 1:
            assert b.recv(timeout=0).payload["x"].sum() == 2
    assert b.stats()["topics"]["u"]["refused"] == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "problem"),
    [
        ((2.7,), "f4", r"shape is \(2.7,\)"),
        ("12", "f4", "shape is '12'"),
        (3, "f4", "shape is 3"),
        ((2, -1), "f4", "-1 is no dimension"),
        ((1,) * 65, torch.float32, "65 dimensions, the limit is 64"),
        ((2**62, 4), "f4", "does not fit any memory"),
        ((2,), "(2,)f4", r"loan dtype float32, with \(2,\)"),
        ((2,), "O", "dtype object cannot be sent"),
        ((2,), [("\ud800", "f4")], "not valid Unicode"),
    ],
)
def test_what_cannot_be_sent_is_not_loaned(
    pair: Pair, shape: Any, dtype: Any, problem: str
) -> None:
    """Else it would be refused once it is filled."""
    kind = TypeError if problem.startswith("shape is") else ValueError
    with pytest.raises(kind, match=problem), pair[0].loan("t", shape, dtype):
        raise AssertionError("it was loaned")


def test_what_is_too_large_for_a_subscriber_is_not_loaned() -> None:
    """Else the error would be that there is no memory for it here."""
    with (
        mq.connect("inproc", group="large-loans", name="a") as a,
        mq.connect("inproc", group="large-loans", name="b", max_message_bytes=100) as b,
    ):
        b.subscribe("t", timeout=10)
        problem = "4398046511104 bytes on 't' exceeds max_message_bytes of 'b': 100;"
        with (
            pytest.raises(mq.MessageTooLarge, match=problem),
            a.loan("t", (1 << 40,), torch.float32),
        ):
            raise AssertionError("it was loaned")


@pytest.mark.parametrize("dtype", ["S0", "V0", "U0", [], "f4"], ids=str)
@pytest.mark.parametrize("shape", [(3,), (2, 0), ()], ids=str)
def test_items_of_no_bytes_are_loaned(pair: Pair, shape: Any, dtype: Any) -> None:
    """As they are published, though `numpy.frombuffer` knows no such items."""
    with pair[0].loan("t", shape, dtype, timeout=10) as loaned:
        assert (loaned.shape, loaned.dtype) == (shape, np.dtype(dtype))
    found = pair[1].recv(timeout=10).payload
    assert (found.shape, found.dtype) == (shape, np.dtype(dtype))


@pytest.mark.parametrize("zero_copy", ["no", 1, None, np.int64(1)], ids=repr)
def test_a_switch_that_is_neither_on_nor_off_is_refused(
    pair: Pair, zero_copy: Any
) -> None:
    """As by `connect`: a text such as "no" would count as true."""
    with pytest.raises(TypeError, match="zero_copy is True or False, not "):
        pair[1].subscribe("u", zero_copy=zero_copy)
    pair[1].subscribe("u", zero_copy=True, timeout=10)


@pytest.mark.parametrize("given", ["no", 1, 0, None, np.int64(1)], ids=repr)
@pytest.mark.parametrize("option", ["retain", "urgent"])
def test_it_is_refused_by_what_publishes_too(
    pair: Pair, option: str, given: Any
) -> None:
    """On the short ways, and as by the twin of asyncio; nobody gets it."""
    a, b = pair
    a.publish("t", 1)
    b.recv(timeout=10)
    for payload in (1, torch.ones(2), mq.CLEAR):
        for publish in (a.publish, lambda *m, **o: asyncio.run(a.apublish(*m, **o))):
            with pytest.raises(TypeError, match=f"{option} is True or False, not "):
                publish("t", payload, **{option: given})
    if option == "retain":
        with (
            pytest.raises(TypeError, match="retain is True or False, not "),
            a.loan("t", (2,), "f4", retain=given),
        ):
            raise AssertionError("it was loaned")
    steps = np.arange(2)
    a.publish("t", 2, retain=steps[1] == 1, urgent=steps[0] == 0)  # NumPy's bool
    assert b.recv(timeout=10).sequence == 1


def test_a_closed_queue_loads_nothing_to_loan(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a forked child's: another thread may have been importing just then."""
    pair[0].close()
    monkeypatch.delattr(mq, "loans", raising=False)
    monkeypatch.setitem(sys.modules, "mq.loans", None)
    with pytest.raises(mq.Closed), pair[0].loan("t", (2,), "f4"):
        raise AssertionError("it was loaned")
