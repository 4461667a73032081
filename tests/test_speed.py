"""The compiled functions do what their twins in Python do."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fresh_python import output_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mq import buffers, plain, speed
from mq import extensions as ext
from mq.codec import Codec
from mq.errors import CodecError
from mq.frames import PLAIN, TABLED
from mq.mesh import gate as gates
from mq.message import Message
from mq.testing.worker import resident_bytes

CODEC = Codec()
needs_compiled = pytest.mark.skipif(
    not speed.COMPILED,
    reason="mq._speed is not there: installed without a compiler, or MQ_COMPILED=0",
)
GATES = [
    gates.Gate,
    pytest.param(speed.Gate, id="compiled", marks=needs_compiled),
]

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63) - 2, 2**64 + 2)
    | st.sampled_from([n + d for p in (5, 7, 8, 15, 16, 31, 32, 63, 64)
                       for n in (1 << p, -(1 << p)) for d in (-1, 0, 1)])
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None), max_size=40)
    | st.sampled_from([15, 16, 127, 128, 32757, 32768]).map("é".__mul__)
)  # fmt: skip
dicts = st.dictionaries(leaves, leaves, max_size=20) | st.integers(0, 300).map(
    lambda count: dict.fromkeys(range(count), True)
)
payloads = (
    leaves
    | dicts
    | st.recursive(
        leaves | st.binary(max_size=300),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(leaves, inner, max_size=4)
        ),
        max_leaves=12,
    )
)


class Text(str):
    """Not exactly a str, and weakly referable."""


class Items(list[int]):
    """Not exactly a list."""


def nested(levels: int) -> Any:
    """Lists and dicts, in turn, in one another."""
    inner: Any = None
    for level in range(levels):
        inner = {"in": inner} if level % 2 else [inner]
    return inner


def test_the_environment_can_ask_for_python() -> None:
    """To see whether a fault lies in what is compiled."""
    code = (
        "import os; os.environ['MQ_COMPILED'] = '0'\n"
        "from mq import speed; print(speed.COMPILED)"
    )
    assert output_of(code).strip() == "False"


@pytest.mark.parametrize("asked", ["no", "false", "2"])
def test_what_the_environment_asks_for_is_not_guessed_at(asked: str) -> None:
    """Nor ignored: what is compiled would be used."""
    code = (
        f"import os; os.environ['MQ_COMPILED'] = {asked!r}\n"
        "try:\n    import mq\nexcept ValueError as error:\n    print(error)"
    )
    assert output_of(code).strip() == f"MQ_COMPILED is {asked!r}, but must be 0 or 1"


def test_a_compiled_part_that_is_older_than_the_rest_is_named_with_a_remedy() -> None:
    """As after `git pull` where the installation is editable."""
    code = (
        "import os, sys, types\n"
        "os.environ.pop('MQ_COMPILED', None)\n"
        "stale = sys.modules['mq._speed'] = types.ModuleType('mq._speed')\n"
        "stale.__file__ = 'mq/_speed.so'\n"
        "try:\n    import mq\n"
        "except ImportError as error:\n    print(error)\n"
    )
    told = output_of(code)
    assert "mq/_speed.so is older than the rest of mq: it has no" in told
    assert "with pip" in told
    assert "MQ_COMPILED=0" in told


@needs_compiled
def test_it_is_used_where_it_is_there() -> None:
    """And not only built."""
    assert speed.Gate is not gates.Gate
    assert speed.encode_plain is not plain.encode_plain
    assert speed.decode_run is not plain.decode_run


@needs_compiled
@given(payloads)
@settings(max_examples=500)
def test_the_same_bytes(payload: Any) -> None:
    """Of every payload, or by both none."""
    assert speed.encode_plain(payload) == plain.encode_plain(payload)


@given(payloads)
@settings(max_examples=200)
def test_the_short_way_encodes_as_the_long_one(payload: Any) -> None:
    """A receiver sees no difference."""
    area = speed.encode_plain(payload)
    if area is not None:  # the long way may refuse it
        assert area == CODEC._encode_plainly(payload).header


@needs_compiled
@pytest.mark.parametrize(
    "payload",
    [
        True,
        (1, 2),
        {"a": (1,)},
        {"a": b"x"},
        {b"x": "a"},
        b"x" * 255,
        b"x" * 256,
        [b"x" * (ext.LARGE - len(PLAIN) - 4)],
        [b"x" * (ext.LARGE - len(PLAIN) - 5)],
        b"x" * ext.LARGE,
        bytearray(b"x"),
        [1, [2, (3,)]],
        [[[]], {"a": [{}]}] * 8,
        [None] * 15,
        [None] * 16,
        [None] * 65_519,
        [None] * 70_000,
        nested(plain.MOST_LEVELS),
        nested(plain.MOST_LEVELS + 1),
        Items([1]),
        {(1,): 1},
        Text("x"),
        {"a": Text("x")},
        {Text("a"): 1},
        {"a": math.nan},
        {"a": "\ud800"},
        {"\ud800": 1},
        {"n": "x" * (ext.LARGE - len(PLAIN) - 6)},
        {"n": "x" * (ext.LARGE - len(PLAIN) - 7)},
        {n: n for n in range(70_000)},
        {str(n): float(n) for n in range(2000)},
    ],
    ids=lambda payload: str(payload)[:30].encode("ascii", "replace").decode(),
)
def test_the_same_bytes_at_the_edges(payload: Any) -> None:
    """Subclasses, lone surrogates, and what is just too large or nested too deep."""
    assert speed.encode_plain(payload) == plain.encode_plain(payload)


@needs_compiled
def test_what_contains_itself_is_left_to_who_says_so() -> None:
    """By both."""
    payload: list[Any] = [1]
    payload.append({"again": payload})
    assert speed.encode_plain(payload) is plain.encode_plain(payload) is None
    with pytest.raises(CodecError, match="contains itself"):
        CODEC.encode(payload)


Decode = Callable[..., list[Message]]


def decoded(decode: Decode, areas: list[memoryview]) -> list[str]:
    """What comes of some areas, as text: nan is not equal to itself, nor True to 1."""
    times = tuple(map(float, range(len(areas))))
    messages = decode(Message, "topic", "sender", "life", 7, times, areas)
    assert {type(message) for message in messages} <= {Message}
    return list(map(repr, messages))


def area_of(payload: Any) -> bytes:
    return PLAIN + plain._encode(payload)


packable = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
    | st.text(max_size=40) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=20) | st.integers(0, 9), inner, max_size=20),
    max_leaves=12,
)  # fmt: skip
damaged = st.tuples(packable, st.binary(max_size=3), st.integers(0, 400)).map(
    lambda parts: area_of(parts[0])[: parts[2]] + parts[1]
)
noise = st.binary(max_size=60).map(PLAIN.__add__) | st.binary(max_size=20)
deep = st.integers(1, 300).map(lambda levels: PLAIN + b"\x91" * levels + b"\xc0")


@needs_compiled
@given(st.lists(packable.map(area_of) | damaged | noise | deep, max_size=5))
@settings(max_examples=1000)
def test_the_same_messages(areas: list[bytes]) -> None:
    """Up to the first that is malformed or of another kind; perhaps not all at once."""
    views = list(map(memoryview, areas))
    expected = decoded(plain.decode_run, views)
    found = decoded(speed.decode_run, views)
    assert found == expected[: len(found)]
    assert bool(found) == bool(expected)


@needs_compiled
@given(packable.map(area_of) | damaged | noise)
@settings(max_examples=1000)
def test_the_compiled_one_accepts_nothing_that_its_twin_refuses(area: bytes) -> None:
    """Alone, for the twin takes what it leaves."""
    from mq import _speed

    args = (Message, "topic", "sender", "life", 0, (0.5,), [memoryview(area)])
    if found := _speed.decode_run(*args):
        assert repr(found) == repr(plain.decode_run(*args))


@needs_compiled
@pytest.mark.parametrize(
    "content",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xde\xff\xff" + b"\x01" * 100,
        b"\xd9\x20" + b"x" * 31,
        b"\xcf\x01",
        b"\xa1\xff",
        b"\x81\xc1\x01",
    ],
    ids=bytes.hex,
)
def test_sizes_beyond_the_message_allocate_nothing(content: bytes) -> None:
    """They are left to the twin, which refuses them."""
    before = resident_bytes()
    areas = [memoryview(PLAIN + content)]
    for _ in range(1000):
        assert speed.decode_run(Message, "t", "s", "i", 0, (0.0,), areas) == []
    assert resident_bytes() - before < 4 << 20


@needs_compiled
def test_nothing_is_kept_of_what_was_decoded() -> None:
    """Neither of messages nor of malformed ones; only a few short keys."""
    good = area_of({"step": 1, "note": "x" * 500, "list": [1.5, {"k": b"y" * 500}]})
    kinds = [good, good[:-1], good + b"x", TABLED + good, area_of({"é": 1}), b""]
    views = [[memoryview(kind)] for kind in kinds]

    def work(count: int) -> None:
        for n in range(count):
            for areas in views:
                speed.decode_run(Message, "t", "s", "i", 0, (0.0,), areas)
            keys = [memoryview(area_of({f"key {n} {m}": m})) for m in range(4)]
            speed.decode_run(Message, "t", "s", "i", 0, (0.0,) * 4, keys)
            speed.encode_plain({"step": n, "note": "x" * 2000, "bad": "\ud800"})
            speed.encode_plain({"step": n, "note": "é" * 2000})

    work(500)
    before = resident_bytes()
    work(5000)
    assert resident_bytes() - before < 4 << 20


# -- the gate ----------


steps = st.one_of(
    st.tuples(st.just("open"), st.integers(0, 6), st.integers(0, 300)),
    st.tuples(st.just("close")),
    st.tuples(st.just("admit"), st.floats(0, 20), st.binary(max_size=130)),
    st.tuples(st.just("publish"), payloads),
    st.tuples(st.just("trim")),
)


@needs_compiled
@given(st.lists(steps, max_size=30))
@settings(max_examples=300)
def test_both_gates_let_the_same_pass(history: list[tuple[Any, ...]]) -> None:
    """Whatever came before."""
    both = [(gates.Gate(), list[Any]()), (speed.Gate(), list[Any]())]
    lock = threading.Lock()
    for step, *args in history:
        answers = []
        for n, (gate, log) in enumerate(both):
            if step == "open":
                # "publish" asks the clock, "admit" is told the time
                gate.open(log, args[0], args[1], time.time() + 1000.0, 100)
            elif step == "close":
                gate.close()
            elif step == "admit":
                answers.append(gate.admit(args[0], args[1]))
            elif step == "publish":
                answers.append(gate.publish(args[0], lock))
            else:
                both[n] = gate, []
        assert len(set(answers)) < 2
        first, second = (log for _, log in both)
        assert [data for _, data in first] == [data for _, data in second]


@pytest.mark.parametrize("kind", GATES)
def test_a_gate_lets_nothing_pass_while_the_lock_is_taken(
    kind: type[gates.Gate],
) -> None:
    """Its holder may be changing the log."""
    gate, log, lock = kind(), list[Any](), threading.Lock()
    gate.open(log, 10, 1000, time.time() + 1000.0, 100)
    with lock:
        assert not gate.publish({"a": 1}, lock)
    assert gate.publish({"a": 1}, lock)
    ((published_at, data),) = log
    assert abs(published_at - time.time()) < 60
    assert data == area_of({"a": 1})
    assert not lock.locked()


@pytest.mark.parametrize("kind", GATES)
def test_a_gate_closes_by_itself(kind: type[gates.Gate]) -> None:
    """After so many messages, so many bytes, and at its time; the last may be over."""
    lock = threading.Lock()
    later = time.time() + 1000.0
    gate, log = kind(), list[Any]()
    assert not gate.publish({}, lock)
    assert not gate.admit(1.0, b"x")
    gate.open(log, 2, 1000, later, 100)
    assert [gate.publish({}, lock) for _ in range(3)] == [True, True, False]
    gate.open(log, 100, 5, later, 100)
    assert [gate.admit(1.0, b"xxx") for _ in range(3)] == [True, True, False]
    gate.open(log, 100, 1000, later, 2)
    assert [gate.admit(1.0, data) for data in (b"xx", b"xxx")] == [True, False]
    gate.open(log, 100, 1000, 1.5, 100)
    assert [gate.admit(at, b"x") for at in (1.25, 1.5)] == [True, False]
    assert not gate.publish({}, lock)
    gate.close()
    assert not gate.admit(0.0, b"x")


@pytest.mark.parametrize("kind", GATES)
def test_a_closed_gate_keeps_nothing_alive(kind: type[gates.Gate]) -> None:
    """A message in the log may lie in shared memory."""
    gate = kind()
    held = Text("x")
    end = weakref.ref(held)
    gate.open([held], 10, 1000, 1.0, 100)
    del held
    assert end() is not None
    gate.close()
    assert end() is None
    gate.close()


@needs_compiled
def test_many_threads_publish_through_one_gate() -> None:
    """Each message once, and in each thread's order, while another trims the log."""
    gate, lock = speed.Gate(), threading.Lock()
    later = time.time() + 1000.0
    log: list[Any] = []
    trimmed: list[Any] = []
    done = threading.Event()

    def publish(number: int) -> None:
        for n in range(3000):
            while not gate.publish({number: n}, lock):
                with lock:
                    gate.open(log, 10**9, 10**9, later, 100)

    def trim() -> None:
        nonlocal log
        while not done.is_set():
            with lock:
                gate.close()
                trimmed.extend(log)
                log = []

    threads = [threading.Thread(target=publish, args=(n,)) for n in range(4)]
    trimmer = threading.Thread(target=trim)
    for thread in (*threads, trimmer):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    trimmer.join()
    seen = [plain.decode_plain(memoryview(data)) for _, data in trimmed + log]
    for number in range(4):
        assert [m[number] for m in seen if number in m] == list(range(3000))


# -- copies ----------


@pytest.mark.parametrize("past_cache", [False, True])
@pytest.mark.parametrize("start", [0, 1, 63])
@pytest.mark.parametrize("nbytes", [0, 1, 4 << 19, (16 << 20) + 12345, (40 << 20) - 1])
def test_a_copy_is_whole(nbytes: int, start: int, past_cache: bool) -> None:
    """Of any size, at any place, and no byte more."""
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 64, np.uint8)
    target = np.full(nbytes + 64, 7, np.uint8)
    place = slice(start, start + nbytes)
    speed.copy(source.data[place], target.data[place], past_cache)
    assert np.array_equal(source[place], target[place])
    assert (target[:start] == 7).all()
    assert (target[start + nbytes :] == 7).all()


@pytest.mark.parametrize("sizes", [(10, 11), (11, 10)])
def test_a_copy_to_another_size_is_refused(sizes: tuple[int, int]) -> None:
    """And nothing is written."""
    target = bytearray(sizes[1])
    with pytest.raises(ValueError, match="11"):
        speed.copy(memoryview(b"x" * sizes[0]), memoryview(target), False)
    assert not any(target)


@needs_compiled
def test_a_copy_into_memory_that_is_read_only_is_refused() -> None:
    """It belongs to a peer."""
    with pytest.raises(BufferError):
        speed.copy(memoryview(b"x"), memoryview(b"y"), False)


def test_what_the_cache_cannot_hold_is_copied_past_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in parts; the cache is as large as Linux tells, and not as all together."""
    asked: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        speed, "copy", lambda source, target, past: asked.append((len(source), past))
    )
    half = buffers.cache_bytes() // 2
    assert 1 << 18 <= half <= 1 << 30
    memory = memoryview(bytearray(half + 1))
    for nbytes, whole in ((half, 0), (half + 1, 0), (half // 4, 2 * half)):
        buffers.copy(memory[:nbytes], memory[:nbytes], whole)
    assert asked == [(half, False), (half + 1, True), (half // 4, True)]


def test_many_copy_at_once() -> None:
    """Each thread gets its own, and none is left behind."""
    wrong: list[int] = []

    def work(number: int) -> None:
        source = np.full(8 << 20, number, np.uint8)
        for _ in range(10):
            target = np.zeros(8 << 20, np.uint8)
            speed.copy(source.data, target.data, number % 2 == 0)
            if not np.array_equal(source, target):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    _await_end()


def _helpers() -> set[int]:
    """The threads of this process that help to copy."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if (task / "comm").read_text() == "mq-copy\n":
                found.add(int(task.name))
    return found


def _await_end() -> None:
    """Until nobody helps."""
    until = time.monotonic() + 60.0
    while _helpers():
        assert time.monotonic() < until
        os.sched_yield()


needs_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core: nobody helps"
)


def _copy_some() -> None:
    source, target = np.ones(8 << 20, np.uint8), np.zeros(8 << 20, np.uint8)
    speed.copy(source.data, target.data, False)
    assert target.all()


@needs_compiled
@needs_cores
def test_who_helps_to_copy_stays_for_the_next_copy_on_another_core() -> None:
    """And ends when none comes."""
    until = time.monotonic() + 60.0
    before, found = {0}, set[int]()
    while not found or found != before:  # as long as one has ended meanwhile
        assert time.monotonic() < until
        before = found
        _copy_some()
        found = _helpers()
    with contextlib.suppress(ProcessLookupError):
        for helper in found:
            cores = os.sched_getaffinity(helper)
            assert len(cores) == len(os.sched_getaffinity(0)) - 1
    _await_end()


@needs_compiled
@needs_cores
def test_who_is_called_for_a_copy_that_does_not_come_ends() -> None:
    """Small copies need nobody."""
    _await_end()
    speed.expect_copy(1 << 20)
    assert not _helpers()
    until = time.monotonic() + 60.0
    while not _helpers():  # it has its name a little later
        assert time.monotonic() < until
        speed.expect_copy(8 << 20)
    _await_end()


@needs_compiled
@needs_cores
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_helpers_of_its_own() -> None:
    """Those of its parent are not there, nor what they were doing."""
    copying = threading.Thread(target=lambda: [_copy_some() for _ in range(50)])
    copying.start()
    codes: list[int] = []
    while copying.is_alive() or not codes:
        speed.expect_copy(8 << 20)
        pid = os.fork()
        if not pid:
            signal.alarm(20)  # a lock that nobody will release
            code = 1
            try:
                _copy_some()
                code = 0 if len(os.listdir("/proc/self/task")) > 1 else 2
            finally:
                os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    copying.join()
    assert set(codes) == {0}


# -- copies of what is still being written ----------

FILLS = [speed._fill, pytest.param(speed.fill, id="compiled", marks=needs_compiled)]
FOLLOWS = [
    speed._follow,
    pytest.param(speed.follow, id="compiled", marks=needs_compiled),
]
Fill = Callable[[list[tuple[int, memoryview]], memoryview, memoryview], None]
Follow = Callable[[memoryview, memoryview, int, int, memoryview], int]


def counter(value: int = 0) -> memoryview:
    """A counter, aligned as the compiled functions want it."""
    view = memoryview(np.zeros(1, np.uint64)).cast("B")
    view[:] = value.to_bytes(8, sys.byteorder)
    return view


def count(view: memoryview) -> int:
    return int.from_bytes(view, sys.byteorder)


@pytest.mark.parametrize("fill", FILLS)
@given(sizes=st.lists(st.sampled_from([0, 1, 63, 5000, 300_000]), max_size=6))
@settings(max_examples=60, deadline=None)
def test_pieces_come_to_their_places(fill: Fill, sizes: list[int]) -> None:
    """What is between them stays as it is, and the counter says that all is there."""
    target, pieces = bytearray(b"-" * 7), []
    for number, nbytes in enumerate(sizes):
        pieces.append((len(target), memoryview(bytes([number]) * nbytes)))
        target += b"-" * (nbytes + 3)
    expected = bytearray(target)
    for start, piece in pieces:
        expected[start : start + len(piece)] = piece
    there = counter()
    fill(pieces, memoryview(target), there)
    assert target == expected
    assert count(there) == len(target)


@pytest.mark.parametrize("fill", FILLS)
def test_filling_again_changes_nothing(fill: Fill) -> None:
    """Who was told of bytes may have taken them, and the counter never goes back."""
    target, there = memoryview(bytearray(1 << 20)), counter()
    fill([(0, memoryview(bytes([1]) * (1 << 20)))], target, there)
    fill([(0, memoryview(bytes([2]) * (1 << 20)))], target, there)
    assert target == bytes([1]) * (1 << 20)
    assert count(there) == 1 << 20


@needs_compiled
def test_filling_goes_on_where_it_was() -> None:
    """As after an interrupt; slices that are there are not written again."""
    target, there = memoryview(bytearray(1 << 20)), counter(1 << 19)
    speed.fill([(0, memoryview(bytes([1]) * (1 << 20)))], target, there)
    assert target[: 1 << 19] == bytes(1 << 19)
    assert target[1 << 19 :] == bytes([1]) * (1 << 19)


@needs_compiled
@pytest.mark.parametrize("start", [-1, 1, 1 << 40])
def test_a_piece_beyond_the_target_is_refused(start: int) -> None:
    """And nothing is written."""
    target, there = memoryview(bytearray(10)), counter()
    with pytest.raises((ValueError, OverflowError)):
        speed.fill([(start, memoryview(b"x" * 10))], target, there)
    assert target == bytes(10)
    assert count(there) == 0


@needs_compiled
def test_what_is_no_counter_is_refused() -> None:
    """It would be written to."""
    for wrong in (memoryview(bytearray(4)), counter()[:7]):
        with pytest.raises(ValueError, match="counter"):
            speed.fill([], memoryview(bytearray(8)), wrong)
        with pytest.raises(ValueError, match="counter"):
            speed.follow(memoryview(b""), wrong, 0, 0, memoryview(bytearray()))
    with pytest.raises(TypeError, match="piece"):
        speed.fill([1], memoryview(bytearray(8)), counter())  # type: ignore[list-item]


@pytest.mark.parametrize("follow", FOLLOWS)
@pytest.mark.parametrize(
    ("filled", "done", "stop", "found"),
    [(0, 0, 10, 0), (4, 0, 10, 4), (9, 4, 6, 6), (99, 4, 10, 10), (3, 5, 10, 5)],
)
def test_what_is_there_is_copied(
    follow: Follow, filled: int, done: int, stop: int, found: int
) -> None:
    """No more than was asked for, whatever the counter says, and from where it was."""
    source, target = memoryview(b"0123456789"), memoryview(bytearray(b"-" * 10))
    assert follow(source, counter(filled), done, stop, target) == found
    expected = bytearray(b"-" * 10)
    expected[done:found] = source[done:found]
    assert target == expected


@needs_compiled
@pytest.mark.parametrize(("done", "stop"), [(0, 11), (11, 10), (6, 5)])
def test_beyond_the_source_nothing_is_followed(done: int, stop: int) -> None:
    """Whatever the counter says."""
    source, target = memoryview(bytes(10)), memoryview(bytearray(10))
    with pytest.raises(ValueError, match="beyond"):
        speed.follow(source, counter(99), done, stop, target)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("follow", FOLLOWS)
def test_one_thread_reads_what_another_writes(fill: Fill, follow: Follow) -> None:
    """Each byte after it was written, in any number of steps."""
    nbytes = (8 << 20) + 12345
    source = np.random.default_rng(7).integers(0, 256, nbytes, np.uint8)
    for _ in range(20):
        shared, target = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        there = counter()
        pieces = [(0, source.data[:1000]), (1000, source.data[1000:])]
        writer = threading.Thread(target=fill, args=(pieces, shared.data, there))
        writer.start()
        done = 0
        while done < nbytes:
            stop = min(done + (1 << 20), nbytes)
            done = follow(shared.data, there, done, stop, target.data)
        writer.join()
        assert np.array_equal(source, target)


@needs_compiled
def test_who_writes_a_byte_at_a_time_holds_nobody_up() -> None:
    """Other things wait for who follows, which takes some milliseconds at most."""
    nbytes = 1 << 20
    there, ended = counter(), threading.Event()

    def write() -> None:
        for filled in range(1, nbytes):
            there[:] = filled.to_bytes(8, sys.byteorder)
            if ended.wait(20e-6):
                return

    writer = threading.Thread(target=write)
    writer.start()
    source, target = memoryview(bytes(nbytes)), memoryview(bytearray(nbytes))
    done = speed.follow(source, there, 0, nbytes, target)
    ended.set()
    writer.join()
    assert done < nbytes // 2


FORGETTING = """
import contextlib
import struct
from mq import _speed
from mq.mesh import incoming

class Forgetting:
    def __getattr__(self, name):
        known.clear()
        return None if name == "keep" else {}
    def __buffer__(self, flags):
        known.clear()
        return memoryview(b"abc")

class Session:
    received = unanswered = 0
    answer_at = None
    frames = ()
    class stats:
        received_frames = received_bytes = 0

head = struct.pack("<BBHQQIIqdI", 10, 0, 0, 1, 0, 7, 1, 5, 1.5, 0)
for _ in range(2000):
    known = {7: Forgetting()}
    assert not _speed.arrive_alone(known, 10, None, Session, head, 0.0)
    assert not known
    known = [(0, Forgetting())]
    with contextlib.suppress(TypeError):  # before Python 3.12 it is no buffer
        _speed.fill(known, bytearray(8), bytearray(8))
"""


@needs_compiled
def test_what_is_let_go_while_it_is_asked_is_kept_until_then() -> None:
    """Code that runs in the middle of a call may change the caller's containers."""
    output_of(FORGETTING)
