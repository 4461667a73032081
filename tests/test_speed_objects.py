"""Objects of registered types by what is compiled, and by what stands in for it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from payload_checks import area_of, same
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode

from mq import modes, repeated, safe_types, speed
from mq.codec import Codec, add_safe_types
from mq.errors import CodecError, UntrustedPayload
from mq.extensions import OBJECT
from mq.foreign import shown
from mq.frames import Frames, assemble
from mq.mesh.large import INLINE_BYTES
from mq.plain import MOST_LEVELS

CODEC = Codec()
needs_compiled = pytest.mark.skipif(
    not speed.COMPILED,
    reason="mq._speed is not there: installed without a compiler, or MQ_COMPILED=0",
)


class Color(enum.Enum):
    """An enumeration."""

    RED = 1


@dataclasses.dataclass
class Step:
    """What an environment gives."""

    observation: Any
    reward: Any = 0.0


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


class Taken:
    """Gives what it holds, or what a function that it holds returns, once."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def take(self) -> Any:
        """It, and it is gone."""
        taken, self.content = self.content, "it is taken"
        return taken() if callable(taken) else taken


class Other(Taken):
    """The same of another type."""


def fail(kind: type[BaseException], *args: Any) -> Callable[[], Any]:
    """What raises a new one."""

    def raising() -> Any:
        raise kind(*args)

    return raising


class Made:
    """Counts how often one is made, and raises what it is told to."""

    made = 0
    error: BaseException | None = None

    def __init__(self, content: Any) -> None:
        Made.made += 1
        if Made.error is not None:
            raise Made.error
        self.content = content


add_safe_types(Color, Step, Pair, TensorDict)
add_safe_types(Taken, encode=Taken.take, decode=Taken)
add_safe_types(Other, encode=Other.take, decode=Other)
add_safe_types(Made, encode=lambda made: made.content, decode=Made)
CODEC.encode([torch.zeros(1), np.zeros(1)])  # what knows them is loaded by their first


@pytest.fixture(autouse=True)
def nothing_made() -> Iterator[None]:
    """So far."""
    Made.made, Made.error = 0, None
    yield
    Made.error = None


def in_python(payload: Any) -> Frames:
    """As it is encoded where nothing is compiled."""
    return CODEC._encode_plainly(payload)


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Nor is anything known from before."""
    with (
        mock.patch("mq.codec.pack_mixed", speed._nothing),
        mock.patch("mq.codec.unpack_mixed", speed._nothing),
    ):
        yield


def frames_of(packed: Any) -> Frames:
    """Of what `pack_mixed` returns of registered objects."""
    assert type(packed) is tuple
    return Frames(*packed)


plain = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=40)
tensors = st.sampled_from([torch.ones(3), torch.ones(2, 2).bool(), np.arange(4)])


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
        | st.builds(Step, inner, inner)
        | st.builds(Pair, inner, inner)
    )


mixed = st.recursive(
    plain | tensors | st.just(Color.RED) | st.just({1, 2}), _containers, max_leaves=12
)


def alike(a: Any, b: Any) -> bool:
    """`same`, also of what is in objects, whose own comparison tensors refuse."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Step):
        return alike(a.observation, b.observation) and alike(a.reward, b.reward)
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(alike, a.values(), b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return same(a, b)


@needs_compiled
@given(mixed)
def test_objects_are_packed_and_unpacked_as_the_codec_does(payload: Any) -> None:
    """Byte by byte, and with the names that a receiver must accept."""
    payload = [payload, Step(1)]
    expected = in_python(payload)
    packed = speed.pack_mixed(payload, repeated.described)
    is_short = type(packed) is tuple  # there is no set, which is left to the codec
    if is_short:
        found = frames_of(packed)
        assert (found.pack(), found.needs) == (expected.pack(), expected.needs)
    assert CODEC.encode(payload).pack() == expected.pack()
    area = area_of(expected)
    with nothing_compiled():
        assert alike(CODEC.decode(area), payload)
    made: list[Any] = []
    unpacked = speed.unpack_mixed(area, False, made)
    assert alike(CODEC.decode(area), payload)
    assert alike(unpacked, payload) if is_short else unpacked is None
    assert not is_short or type(made[-1]) is Step


@needs_compiled
def test_what_is_usual_goes_the_short_way() -> None:
    """Steps, named tuples and TensorDicts, and no other type is asked of a receiver."""
    inner = TensorDict({"observation": torch.ones(4, 3)}, [4])
    for one in (
        Step(torch.ones(3), 0.5),
        Pair(np.ones(3), Color.RED),
        TensorDict({"next": inner, "action": torch.ones(4)}, [4]),
    ):
        for payload in (one, [one] * 3, {"a": one, "b": (1, [one])}):
            expected = in_python(payload)
            found = frames_of(speed.pack_mixed(payload, repeated.described))
            assert (found.header, found.needs) == (expected.pack(), expected.needs)
            CODEC.decode(area_of(expected))
            assert speed.unpack_mixed(area_of(expected), False, []) is not None


@needs_compiled
def test_what_is_large_is_sent_from_where_it_lies() -> None:
    """With the names that it needs."""
    large = torch.ones(INLINE_BYTES)
    expected = in_python([Step(large)])
    found = frames_of(speed.pack_mixed([Step(large)], repeated.described))
    assert (found.pack(), found.needs) == (expected.pack(), expected.needs)
    assert found.nbytes == expected.nbytes
    assert np.shares_memory(np.asarray(found.buffers[0]), large.numpy())


OTHERS = [{1, 2}, {(1, 2): 3}, 2**70, "é" * 40_000, torch.ones(3)[::2], Step({1})]
"""Not packed by what is compiled."""


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: "")
def test_what_was_encoded_is_not_encoded_again(other: Any) -> None:
    """Where what comes after it is left to the codec."""
    payload = [Taken([Taken(1), 2]), {"a": Taken(torch.ones(2))}, other, Taken(3)]
    first, second, third, last = CODEC.decode(area_of(CODEC.encode(payload)))
    assert (first.content[0].content, first.content[1]) == (1, 2)
    assert second["a"].content.tolist() == [1, 1]
    assert alike(third, other)
    assert last.content == 3


def test_what_an_encode_raises_is_raised_with_its_place() -> None:
    """Once, whatever was encoded before it."""
    payload = {"a": [Taken(1), Step([Taken(fail(OSError, "it is out"))])]}
    with pytest.raises(CodecError) as caught:
        CODEC.encode(payload)
    assert str(caught.value) == (
        "cannot send payload['a'][1].observation[0]: encoding a "
        f"{__name__}:Taken raised OSError('it is out')"
    )
    assert isinstance(caught.value.__cause__.__cause__, OSError)


def test_what_an_encode_raises_keeps_nothing() -> None:
    """Not until the garbage collector finds it."""
    tensor = torch.ones(3)
    CODEC.encode([tensor])
    gone = weakref.ref(tensor)
    gc.disable()
    try:
        with contextlib.suppress(CodecError):
            CODEC.encode([tensor, Taken(fail(OSError))])
        del tensor
        assert gone() is None
    finally:
        gc.enable()


def test_what_ends_a_program_ends_it() -> None:
    """As in Python."""
    for kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kind):
            CODEC.encode([torch.ones(3), Taken(fail(kind))])


def _others(depth: int) -> Any:
    return Step(_others(depth - 1)) if depth else 1


@needs_compiled
def test_objects_in_one_another_are_packed_to_a_depth() -> None:
    """Deeper ones are left to the codec, which takes them."""
    for depth in range(1, 20):
        payload = _others(depth)
        packed = speed.pack_mixed(payload, repeated.described)
        short = 2 * depth <= MOST_LEVELS  # of its fields there is a dict
        assert type(packed) is (tuple if short else type(None))
        area = area_of(in_python(payload))
        unpacked = speed.unpack_mixed(area, False, [])
        assert unpacked == (payload if short else None)
        assert CODEC.decode(area) == payload


def test_what_a_decode_raises_is_raised() -> None:
    """Once: as an error of the message, or as it is if it is to end the program."""
    area = area_of(CODEC.encode([torch.ones(2), Step(mock_made(3))]))
    for error, expected in (
        (OSError("it is out"), CodecError),
        (CodecError("it is not that"), CodecError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError(), CodecError),
    ):
        for _ in range(2):  # the second time the tensor is known
            Made.made, Made.error = 0, error
            with pytest.raises(expected) as caught:
                CODEC.decode(area)
            assert Made.made == 1
            if not isinstance(error, CodecError | KeyboardInterrupt):
                said = f"decoding a {__name__}:Made raised {error!r}"
                assert str(caught.value) == said


def mock_made(content: Any) -> Made:
    """One, which is not counted."""
    made = Made(content)
    Made.made -= 1
    return made


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: "")
@pytest.mark.parametrize("read_only", [False, True])
def test_objects_are_built_once(other: Any, read_only: bool) -> None:
    """But for memory that may have changed, also where another is left to the codec."""
    steps = [mock_made(Step(mock_made(torch.ones(2)))), mock_made(1)]
    frames = CODEC.encode([*steps, other, mock_made(2)])
    for _ in range(2):
        Made.made = 0
        area = area_of(frames)
        found = CODEC.decode(area.toreadonly() if read_only else area, own=read_only)
        inner, one, third, last = found
        assert inner.content.observation.content.tolist() == [1, 1]
        assert (one.content, last.content) == (1, 2)
        assert alike(third, other)
        assert Made.made == 4 or (read_only and speed.COMPILED and Made.made <= 7)


def test_objects_are_not_built_ahead() -> None:
    """Under the queue's lock."""
    area = area_of(CODEC.encode([mock_made(1)]))
    assert CODEC.decode_ahead([area]) == []
    assert speed.unpack_mixed(area, False) is None
    assert Made.made == 0


def test_objects_are_built_in_the_mode_of_who_receives() -> None:
    """Only what we make is made outside of it."""
    seen = []
    tensor = torch.ones(3)
    payload = [tensor, Taken(1)]
    area = area_of(CODEC.encode(payload))

    class Looking:
        def __init__(self, content: Any) -> None:
            seen.append(modes.is_any_on())

    add_safe_types(Looking, encode=lambda _: 1, decode=Looking)
    area = area_of(CODEC.encode([tensor, Looking(1)]))
    seen.clear()
    with torch.inference_mode():
        found = CODEC.decode(area)
    assert not found[0].is_inference()
    with FakeTensorMode(allow_non_fake_inputs=True):
        CODEC.decode(area)
    CODEC.decode(area)
    assert seen == [True, True, False]


@needs_compiled
@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("grows", [True, False])
def test_what_an_encode_changes_around_it_is_left_to_the_codec(
    kind: type, grows: bool
) -> None:
    """A count that does not fit its elements would be nobody's message."""
    payload: Any = {}

    def change() -> int:
        if grows:
            payload["new"] = 1
        else:
            payload.pop("b")
        return 5

    def change_list() -> int:
        payload.append(1) if grows else payload.pop()
        return 5

    if kind is list:
        payload = [Taken(change_list), 2, 3]
    else:
        payload = {"a": Taken(change), "b": 2, "c": 3}
    first = payload[0 if kind is list else "a"]
    assert speed.pack_mixed([payload], repeated.described) == [(Taken.take, first, 5)]
    if kind is list:  # of a dict it is an error there
        payload = [Taken(change_list), 2, 3]
        found = CODEC.decode(area_of(CODEC.encode([payload])))
        assert found[0][0].content == 5


def _narrowed(tensor: torch.Tensor) -> None:
    tensor.data = torch.full((1,), 7.0).expand(len(tensor))


def _strided(tensor: torch.Tensor) -> None:
    tensor.data = torch.arange(2.0 * len(tensor))[::2]


def _of_integers(tensor: torch.Tensor) -> None:
    tensor.data = torch.ones(len(tensor), dtype=torch.int32)


def _shorter(tensor: torch.Tensor) -> None:
    tensor.data = torch.ones(5)


def _moved(tensor: torch.Tensor) -> None:
    tensor.data = torch.arange(float(len(tensor)))


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    """One whose attributes are in slots."""

    one: Any
    two: Any = 2


@dataclasses.dataclass(kw_only=True)
class Checked:
    """One that takes keywords only, and not all."""

    one: Any
    two: Any = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.one, str):
            raise ArithmeticError("one is a number")
        if self.one is None:
            raise CodecError("one is missing")


@dataclasses.dataclass
class Half:
    """One that its constructor does not take all of."""

    one: Any
    two: Any = dataclasses.field(init=False, default=5)


@dataclasses.dataclass
class Computed:
    """One whose attributes are code of the application's."""

    one: Any
    two: Any = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "two":
            raise TimeoutError("it is not there yet")
        return super().__getattribute__(name)


@dataclasses.dataclass
class Lazy:
    """One whose missing attributes are made."""

    one: Any
    two: Any = 0

    def __getattr__(self, name: str) -> Any:
        if name == "two":
            return 7
        raise AttributeError(name)


class Looked:
    """What is looked at in place of a value."""

    def __get__(self, instance: object, owner: type) -> Any:
        return 5 if instance is None else 6

    def __set__(self, instance: object, value: Any) -> None:
        pass


@dataclasses.dataclass
class Described:
    """One with such a field."""

    one: Any
    two: Any = Looked()


class Turned(NamedTuple):
    """A named tuple that is gone through from behind."""

    one: Any
    two: Any

    def __iter__(self) -> Iterator[Any]:
        return iter((self[1], self[0]))


@dataclasses.dataclass
class Numbers(tuple):  # type: ignore[type-arg]
    """A dataclass that is a tuple, too."""

    one: Any
    two: Any = 1

    def __new__(cls, one: Any, two: Any = 1) -> Numbers:
        return super().__new__(cls, (8, 9))


KINDS = [Slotted, Checked, Half, Computed, Lazy, Described, Turned, Numbers]
add_safe_types(*KINDS)


def _without(kind: type, name: str) -> Any:
    one = kind(one=1) if kind is not Turned else Turned(1, 2)
    with contextlib.suppress(AttributeError, TypeError):
        delattr(one, name)
    return one


@needs_compiled
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fields_is_sent_as_the_codec_does(kind: Any) -> None:
    """Whatever its attributes are, also where there are none."""
    ones = [_without(kind, "no such"), _without(kind, "one"), _without(kind, "two")]
    ones += [kind(one=torch.ones(2)) if kind is not Turned else Turned("a", {1})]
    for one in ones:
        for payload in ([one], {"a": [one, 1]}):
            sent = []
            for how in (contextlib.nullcontext, nothing_compiled):
                with how():
                    try:
                        found = CODEC.encode(payload)
                        sent.append((found.pack(), found.needs))
                    except CodecError as error:
                        sent.append((str(error), repr(error.__cause__)))
            assert sent[0] == sent[1]


@needs_compiled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "state",
    [
        {"one": 1, "two": 2},
        {"two": 2, "one": 1},
        {"one": "text", "two": 2},
        {"one": None, "two": 2},
        {"one": 1},
        {"one": 1, "two": 2, "three": 3},
        {"one": 1, 2: 2},
        [1, 2],
        None,
    ],
    ids=str,
)
def test_every_kind_of_fields_is_built_as_the_codec_does(kind: Any, state: Any) -> None:
    """Or refused in the same words."""
    entry = safe_types.by_type(kind)
    assert entry is not None
    body = msgspec.msgpack.encode([entry.name, state])
    skeleton = msgspec.msgpack.encode([msgspec.msgpack.Ext(OBJECT, body)])
    area = bytearray(assemble(skeleton, (), frozenset()).pack())
    assert outcome(area, contextlib.nullcontext) == outcome(area, nothing_compiled)


def _refused() -> Any:
    raise OSError("it is out")


@pytest.mark.parametrize("count", [100, INLINE_BYTES])
def test_a_field_that_became_code_is_code_of_the_applications(count: int) -> None:
    """It may do anything, and raise it."""

    @dataclasses.dataclass
    class Late:
        one: Any

    add_safe_types(Late, name="late")
    late: Any = Late(1)
    tensor = torch.ones(count)
    CODEC.encode([torch.zeros(count), 1])

    def shrink(_: Late) -> int:
        tensor.untyped_storage().resize_(16)
        return 5

    Late.one = property(shrink)
    with pytest.raises(CodecError, match="not resizable"):
        CODEC.encode([tensor, late])
    Late.one = property(lambda _: _refused())
    with pytest.raises(
        CodecError, match=r"encoding a late raised OSError\('it is out'"
    ):
        CODEC.encode([late])


@needs_compiled
def test_nobody_sees_the_fields_that_are_being_read() -> None:
    """There are places without any until the last is read."""
    seen: list[str] = []
    first = [1]

    @dataclasses.dataclass
    class Many:
        one: Any
        two: Any
        three: Any

    def look(_: Many) -> int:
        found = [one for one in gc.get_objects() if type(one) is tuple]
        seen.extend(repr(one) for one in found if one[:1] == (first,))
        return 2

    add_safe_types(Many, name="many")
    many = Many(first, 2, 3)
    Many.two = property(look)
    CODEC.encode([many, 1])
    assert not seen


def test_fields_are_read_before_any_is_encoded() -> None:
    """As where nothing is compiled."""
    step = Step(Taken(lambda: setattr(step, "reward", 7)), 1.0)
    found = CODEC.decode(area_of(CODEC.encode([step])))[0]
    assert found.reward == 1.0


@pytest.mark.parametrize("error", [CodecError, OSError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", [Checked, Made])
def test_what_a_decode_raises_keeps_nothing(
    kind: Any, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not until the garbage collector finds it: peers may send many."""
    tensor = torch.ones(3)
    one = Checked(one=tensor) if kind is Checked else mock_made(tensor)
    area = area_of(CODEC.encode([one]))
    CODEC.decode(area)
    built: list[Any] = []

    def raising(self: Any, *arguments: Any) -> None:
        built.append(weakref.ref(self))
        raise error

    monkeypatch.setattr(
        kind, "__post_init__" if kind is Checked else "__init__", raising
    )
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(CodecError, KeyboardInterrupt):
            CODEC.decode(area)
        assert built[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("count", [100, INLINE_BYTES])
@pytest.mark.parametrize(
    "change", [_narrowed, _strided, _of_integers, _shorter, _moved]
)
def test_a_tensor_that_an_encode_changes_is_sent_as_it_was_or_is(
    change: Callable[[torch.Tensor], None], count: int
) -> None:
    """Never memory that is none of its own, or of another dtype."""
    CODEC.encode([torch.ones(count), 1])
    tensor = torch.ones(count)
    payload = [tensor, Taken(lambda: change(tensor))]
    found, _ = CODEC.decode(area_of(CODEC.encode(payload)))
    assert same(found, tensor) or same(found, torch.ones(count))


@pytest.mark.parametrize("count", [100, INLINE_BYTES])
def test_a_tensor_whose_memory_an_encode_frees_is_refused(count: int) -> None:
    """Or the memory is kept."""
    CODEC.encode([torch.ones(count), 1])
    tensor = torch.ones(count)
    payload = [tensor, Taken(lambda: tensor.untyped_storage().resize_(0) and None)]
    with pytest.raises(CodecError, match=r"has no memory|not resizable"):
        CODEC.encode(payload)


def test_a_state_is_sent_for_its_own_object() -> None:
    """Also where an `encode` changes what is encoded, and the codec goes through it."""
    inner = [Taken(11)]
    payload: list[Any] = [inner, Other(lambda: inner.clear()), {1, 2}]
    first, second, third = CODEC.decode(area_of(CODEC.encode(payload)))
    assert [one.content for one in first] in ([], [11])
    assert (type(second), second.content, third) == (Other, None, {1, 2})
    items: list[Any] = [Taken(lambda: items.pop(0) and "first"), Other("second"), 5]
    for one in CODEC.decode(area_of(CODEC.encode([items])))[0]:
        assert one == 5 or (type(one), one.content) in (
            (Taken, "first"),
            (Other, "second"),
        )
    named: dict[str, Any] = {}
    named["a"] = Taken(lambda: named.update(a=named.pop("a")))
    named["b"] = Other("second")
    with contextlib.suppress(RuntimeError):  # nothing compiled lets a dict change
        found = CODEC.decode(area_of(CODEC.encode([named, 5])))[0]
        assert type(found["b"]) is Other


@needs_compiled
@pytest.mark.parametrize("name", ["attempt", "build"])
def test_what_a_handler_of_signals_raises_is_not_lost(name: str) -> None:
    """It may run as ours begins or ends, outside of what we catch."""
    area = area_of(CODEC.encode([torch.ones(3), Taken(1)]))
    CODEC.decode(area)
    payload = [torch.ones(3), Taken(1)]

    def handle(frame: Any, event: str, called: object) -> None:
        if (frame.f_code.co_name, event) == (name, "call"):
            sys.setprofile(None)
            raise RuntimeError("of a handler")

    sys.setprofile(handle)
    try:
        with pytest.raises((RuntimeError, CodecError), match="of a handler"):
            CODEC.encode(payload) if name == "attempt" else CODEC.decode(area)
    finally:
        sys.setprofile(None)


def test_who_looks_at_all_objects_does_not_matter() -> None:
    """As profilers of memory do."""
    payload = [Taken(lambda: len(gc.get_objects())), Taken(gc.get_objects)]
    with pytest.raises(CodecError, match=r"not data|nested"):
        CODEC.encode(payload)
    kept: list[Any] = []
    frames = CODEC.encode([Taken(lambda: kept.append(gc.get_objects())), Step(1)])
    assert CODEC.decode(area_of(frames))[1] == Step(1)
    kept.clear()


def test_nothing_is_built_of_what_is_no_message() -> None:
    """Its table is looked at first."""
    area = area_of(CODEC.encode([mock_made(1), torch.ones(3)]))
    CODEC.decode(area)
    Made.made = 0
    for damaged in (bytes(area) + b"\0", bytes(area[:-4])):
        with pytest.raises(CodecError):
            CODEC.decode(memoryview(bytearray(damaged)))
    damaged_size = bytearray(area)
    damaged_size[12:20] = (1 << 62).to_bytes(8, "little")
    with pytest.raises(CodecError):
        CODEC.decode(memoryview(damaged_size))
    assert Made.made == 0


def test_a_decode_may_make_objects_of_other_types() -> None:
    """Their own depth is nobody's business."""

    class Many:
        pass

    add_safe_types(Many, encode=lambda _: 0, decode=lambda _: [Step(1)])
    for other in (1, {1}):  # which is left to the codec
        payload = [Many(), Step(2), list(range(400)), other]
        found = CODEC.decode(area_of(CODEC.encode(payload)))
        assert found == [[Step(1)], *payload[1:]]


@needs_compiled
def test_what_is_damaged_is_unpacked_as_the_codec_does_or_not_at_all() -> None:
    """Whatever a peer sends, byte by byte."""
    payload = {"a": Step(torch.ones(3), Pair(1, "é")), "n": [Color.RED, Step(2)]}
    area = area_of(CODEC.encode(payload))
    CODEC.decode(area)
    ends = np.random.default_rng(5)
    for place in range(len(area)):
        damaged = bytearray(area)
        damaged[place] = int(ends.integers(256))
        expected = outcome(damaged, nothing_compiled)
        found = outcome(damaged, contextlib.nullcontext)
        assert found == expected
    for end in range(len(area)):
        damaged = bytearray(area[:end])
        assert outcome(damaged, contextlib.nullcontext) == outcome(
            damaged, nothing_compiled
        )


def outcome(area: bytearray, how: Callable[[], Any]) -> str:
    """What is made of a message, in words."""
    with how():
        try:
            return shown(CODEC.decode(memoryview(area)))
        except CodecError as error:
            return f"{type(error).__name__}: {error}"


def test_a_type_that_is_not_registered_here_is_refused() -> None:
    """By its name."""

    class Local:
        pass

    add_safe_types(Local, name="local", encode=lambda _: [1], decode=lambda _: Local())
    area = area_of(CODEC.encode([Step(1), Local()]))
    assert type(CODEC.decode(area)[1]) is Local

    class Another:
        pass

    add_safe_types(Local, name="other", encode=lambda _: 1, decode=lambda _: Local())
    with pytest.raises(UntrustedPayload, match="a 'local'"):
        CODEC.decode(area)
    assert CODEC.encode(Local()).needs == {"other"}
