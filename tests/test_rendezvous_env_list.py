"""The list of names in the store of torchrun, whose places are used again."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meeting import DEADLINE, libuv, record, store_port

from mq.errors import ConnectRefused, PeerLost
from mq.log import Log, WarnOnce
from mq.rendezvous import torchrun
from mq.rendezvous.bounded import Calls

__all__ = ["libuv", "store_port"]  # fixtures

T = TypeVar("T")


def test_names_that_were_given_back_take_no_room(store_port: int) -> None:
    """Default names have the process id: each is another, and they are read often."""
    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(store_port)}
    with contextlib.closing(torchrun.TorchrunStore("g", 60.0, environ)) as store:
        store.claim(record("stays"))
        for number in range(20):
            one = store.claim(record(f"x{number}", "b")).record
            store.remove(one.name, one.incarnation)
        store.claim(record("last", "c"))
        assert [e.record.name for e in store.records()] == ["last", "stays"]
        listed = f"{store._prefix}/names"
        assert store._ask(lambda values: values.add(listed, 0)) == 2


@pytest.mark.parametrize("place", ["null", "[1]", '[Infinity, "a"]', '["1", "a"]'])
def test_a_record_in_no_place_is_held(store_port: int, place: str) -> None:
    """Whoever reaches that store can write to it; the error says what is wrong."""
    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(store_port)}
    with contextlib.closing(torchrun.TorchrunStore("g", 60.0, environ)) as store:
        store.claim(record("x"))
        token = store.read("x")[1]
        fields = json.loads(token.text) | {"place": "here"}
        text = json.dumps(fields).replace('"here"', place)
        key = store._key("x")
        store._ask(lambda values: values.compare_set(key, token.text, text))
        for call in (store.records, lambda: store.claim(record("x", "b"))):
            with pytest.raises(ConnectRefused, match=f"the key {key} in .*remove it"):
                call()
        assert store.recent() == []


class _Values:
    """A store of which the test decides whose next request is done, and how."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.numbers: dict[str, int] = {}

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As torch has it, where a key that is not there is as expected."""
        found = self.texts.get(key)
        if found == expected or (found is None and not expected):
            self.texts[key] = found = desired
        return (expected if found is None else found).encode()

    def add(self, key: str, amount: int) -> int:
        self.numbers[key] = self.numbers.get(key, 0) + amount
        return self.numbers[key]


class _Member(torchrun.TorchrunStore):
    """One that does what it is told in a thread, up to the next request."""

    def __init__(self, number: int, values: _Values, orders: list[Any]) -> None:
        self.timeout, self.until, self.description = math.inf, math.inf, "the script"
        self._prefix, self._opened, self._warn = "p", 1, WarnOnce(Log("mq"))
        self._calls, self._beats = Calls(), {}
        self._letter = f"{number + 1:x}"
        self._values = values
        self._orders = orders
        self._fate = ""
        self._goes_on, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        assert self._waits.acquire(timeout=DEADLINE)

    def go_on(self, fate: str) -> None:
        """Have the request "done" that it waits with, "lost", or "unanswered"."""
        self._fate = fate
        self._goes_on.release()
        assert self._waits.acquire(timeout=DEADLINE)

    def is_done(self) -> bool:
        """Whether all that it was told is done."""
        return not self._orders

    def end(self) -> None:
        """Let it do the rest."""
        while not self.is_done():
            self.go_on("done")
        self._thread.join(DEADLINE)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._request(lambda: self._values.compare_set(key, expected, desired))

    def add(self, key: str, amount: int) -> int:
        return self._request(lambda: self._values.add(key, amount))

    def _request(self, request: Callable[[], T]) -> T:
        self._waits.release()
        assert self._goes_on.acquire(timeout=DEADLINE)
        answer = None if self._fate == "lost" else request()
        if self._fate == "done":
            assert answer is not None
            return answer
        raise RuntimeError("the connection is broken")

    def _ask(self, call: Callable[[Any], T]) -> T:
        for _ in range(2):
            with contextlib.suppress(RuntimeError):
                return call(self)
        raise PeerLost("the connection is broken", "the script")

    def _work(self) -> None:
        while self._orders:
            with contextlib.suppress(PeerLost):
                self._do(*self._orders[0])
            self._orders.pop(0)
        self._waits.release()

    def _do(self, what: str, name: str) -> None:
        mine = record(name, self._letter)
        if what == "renew":
            self.renew(mine)
        elif what == "remove":
            self.remove(name, mine.incarnation)
        elif (holder := self.claim(mine).holder) is not None:
            if what == "sweep":
                self.remove(name, holder.record.incarnation)
            elif what == "displace":
                self.claim(mine, replaces=holder.record.incarnation)


_orders = st.tuples(
    st.sampled_from(["claim", "displace", "sweep", "remove", "renew"]),
    st.sampled_from("xy"),
)


def _check_listed(values: _Values) -> None:
    for key, text in values.texts.items():
        start, _, name = key.rpartition("/")
        held = json.loads(text) if start == "p/member" else {"record": None}
        if held["record"] is not None:
            number, nonce = held["place"]
            assert values.texts[f"p/name/{number}"] == f"{nonce} {name}"


@settings(max_examples=200)
@given(
    st.lists(st.lists(_orders, min_size=1, max_size=4), min_size=2, max_size=3),
    st.data(),
)
def test_who_holds_a_name_is_listed_at_every_moment(
    orders: list[list[Any]], data: st.DataObject
) -> None:
    """Whoever else takes and frees places, and wherever an answer is lost."""
    values = _Values()
    members = [_Member(n, values, list(some)) for n, some in enumerate(orders)]
    try:
        while busy := [member for member in members if not member.is_done()]:
            member = data.draw(st.sampled_from(busy))
            fate = data.draw(st.sampled_from(["done"] * 8 + ["lost", "unanswered"]))
            member.go_on(fate)
            _check_listed(values)
    finally:
        for member in members:
            member.end()
