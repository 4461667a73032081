"""Registered types travel as data; other objects do not, but for pickle."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import os
import pathlib
import pickle
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from fresh_python import output_of, printed_by
from payload_checks import CODEC, area_of, same, travel
from tensordict import NonTensorStack, TensorDict
from torch._subclasses import FakeTensorMode

import mq
from mq import extensions as ext
from mq import safe_types
from mq.codec import Codec, add_safe_types
from mq.errors import CodecError, UntrustedPayload
from mq.frames import assemble
from mq.plain import decode_plain

Ext = msgspec.msgpack.Ext
pack = msgspec.msgpack.encode


class Color(enum.Enum):
    """An enumeration."""

    RED = 1


@dataclasses.dataclass(frozen=True)
class Step:
    """A dataclass that checks what it is built from."""

    observation: Any
    reward: float = 0.0
    norm: float = dataclasses.field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if isinstance(self.reward, str):
            raise ValueError("a reward is a number")
        object.__setattr__(self, "norm", 2.0)


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


class Box:
    """An object with a pair of methods."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and other.content == self.content

    def to_dict(self) -> dict[str, Any]:
        """What it holds."""
        return {"content": self.content}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Box:
        """An equal one."""
        return cls(state["content"])


add_safe_types(Color, Step, Pair, Box, TensorDict)


@pytest.fixture
def types_of_its_own() -> Iterator[None]:
    """What a test registers is not registered for the others."""
    before = list(safe_types.tables)
    yield
    safe_types.tables[:] = before


def test_registered_types_travel_without_functions() -> None:
    """Dataclasses, enumerations and mapping pairs need their name only."""
    step = Step(np.arange(3.0), 1.5)
    object.__setattr__(step, "norm", 9.0)
    found = travel({"s": [step, Color.RED], "b": Box((1, Box({2})))})
    assert (found["s"][0].reward, found["s"][0].norm) == (1.5, 9.0)
    assert found["s"][0].observation.tolist() == [0.0, 1.0, 2.0]
    assert found["s"][1] is Color.RED
    assert found["b"] == Box((1, Box({2})))
    assert same(travel([Pair(1, Pair("x", (2,)))]), [Pair(1, Pair("x", (2,)))])
    assert CODEC.encode([step, Color.RED]).needs == {
        f"{__name__}:Step",
        f"{__name__}:Color",
    }
    assert same(
        travel({Color.RED: 1, (Color.RED, 2): 2}), {Color.RED: 1, (Color.RED, 2): 2}
    )


def test_a_tensordict_travels_once_registered() -> None:
    """Nested entries, batch size, names, device and non-tensors are kept."""
    sent = TensorDict(
        {
            "a": torch.arange(6).reshape(3, 2),
            "n": {"b": torch.ones(3).bfloat16()},
            "s": "hi",
        },
        batch_size=[3],
        names=["time"],
        device="cpu",
    )
    found = travel((sent, 1))[0]
    assert type(found) is TensorDict
    assert (found.batch_size, found.names, found.device) == (
        (3,),
        ["time"],
        sent.device,
    )
    assert found["s"] == "hi"
    assert same(found["a"], sent["a"])
    assert same(found["n", "b"], sent["n", "b"])
    assert found["n"].batch_size == (3,)
    assert travel(TensorDict({"x": torch.ones(2)}, [])).device is None
    assert CODEC.encode(sent).needs == {"tensordict:TensorDict"}


@pytest.mark.parametrize("items", [["a", "b"], ["a", "a"]], ids=str)
def test_a_stack_in_a_tensordict_is_refused_with_remedies_that_help(
    items: list[str], types_of_its_own: None
) -> None:
    """Whatever is in it: one of equal items is no single item, either."""
    sent = TensorDict({"s": NonTensorStack.from_list([items, items])}, [2, 2])
    remedies = (
        r"\['s'\]: a .*NonTensorStack is .* mq\.add_safe_types\(NonTensorStack, "
        r"encode=NonTensorStack\.tolist, decode=NonTensorStack\.from_list\) .*"
        r"items that are lists into stacks.*pickle"
    )
    with pytest.raises(CodecError, match=remedies):
        CODEC.encode(sent)
    trusting = Codec(allow_pickle=True)
    found = [trusting.decode(area_of(trusting.encode(sent)))]
    add_safe_types(
        NonTensorStack, encode=NonTensorStack.tolist, decode=NonTensorStack.from_list
    )
    found.append(travel(sent))
    for tensors in found:
        assert type(dict(tensors.items())["s"]) is NonTensorStack
        assert tensors["s"] == [items, items]


def test_functions_make_any_type_travel_and_codecs_accept_it() -> None:
    """A registration is seen by codecs that exist already."""

    class Money:
        def __init__(self, cents: int) -> None:
            self.cents = cents

    with pytest.raises(CodecError, match="Money"):
        CODEC.encode(Money(3))
    add_safe_types(Money, name="test:Money", encode=lambda m: m.cents, decode=Money)
    assert "test:Money" in CODEC.accepts()
    assert travel([Money(3)])[0].cents == 3


def test_functions_that_raise_are_named() -> None:
    """The application's error is the cause, the type and place are in the message."""

    class Broken:
        pass

    add_safe_types(Broken, name="test:Broken", encode=lambda b: b.gone, decode=str)
    with pytest.raises(CodecError, match=r"payload\[0\].*test:Broken.*gone") as caught:
        CODEC.encode([Broken()])
    assert caught.value.__cause__ is not None


def test_types_with_too_long_names_together_are_refused() -> None:
    """They are part of each greeting; what was registered before still is."""
    before = CODEC.accepts()
    kinds = [dataclasses.make_dataclass(f"{'Long' * 55}{n}", []) for n in range(170)]
    with pytest.raises(ValueError, match=r"too long together.*short name="):
        add_safe_types(*kinds)
    assert CODEC.accepts() == before


def test_registrations_that_cannot_work_are_refused() -> None:
    """Each error says what is missing."""

    class Plain:
        pass

    @dataclasses.dataclass
    class Odd:
        value: int
        extra: dataclasses.InitVar[int]

    for bad, problem in (
        (Plain, "encode= and decode="),
        (Odd, "does not take its fields"),
        (3, "takes classes"),
    ):
        with pytest.raises(TypeError, match=problem):
            add_safe_types(bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="both encode= and decode="):
        add_safe_types(Plain, encode=str)
    with pytest.raises(TypeError, match="are functions, not 3"):
        add_safe_types(Plain, encode=str, decode=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="exactly one"):
        add_safe_types(Color, Step, name="x")
    with pytest.raises(ValueError, match="is taken by"):
        add_safe_types(Plain, name=f"{__name__}:Step", encode=str, decode=str)
    for name in ("", "pickle", "x" * 256):
        with pytest.raises(ValueError, match="cannot name a type"):
            add_safe_types(Plain, name=name, encode=str, decode=str)
    for wrong in (3, b"x", ["x"]):
        with pytest.raises(TypeError, match=r"^name= of add_safe_types is a str"):
            add_safe_types(Plain, name=wrong, encode=str, decode=str)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot name a type"):
        add_safe_types(Plain, name="\ud800", encode=str, decode=str)


@pytest.mark.parametrize(
    "kind",
    [
        *(int, bool, dict, type(None), datetime.datetime, datetime.timedelta),
        *(OrderedDict, torch.Tensor, torch.nn.Parameter, torch.Size),
        *(np.ndarray, np.memmap, np.float32, np.str_),
    ],
)
def test_what_travels_as_it_is_cannot_be_registered(kind: type) -> None:
    """Its functions would not be called."""
    before = safe_types.names()
    problem = f"{kind.__name__} cannot be registered: it travels as it is"
    for functions in ({}, {"encode": str, "decode": str}):
        with pytest.raises(ValueError, match=problem):
            add_safe_types(kind, **functions)  # type: ignore[arg-type]
    assert safe_types.names() == before


@pytest.mark.parametrize(
    ("kind", "remedy"), [(range, r"list\("), (type(CODEC.encode), "send data")]
)
def test_no_builtin_can_be_registered(kind: type, remedy: str) -> None:
    """The error says what else to do."""
    problem = f"{kind.__name__} cannot be registered, as no builtin can: .*{remedy}"
    for functions in ({}, {"encode": str, "decode": str}):
        with pytest.raises(ValueError, match=problem):
            add_safe_types(kind, **functions)  # type: ignore[arg-type]


def test_a_name_of_any_kind_of_text_goes_out_as_plain_text(
    types_of_its_own: None,
) -> None:
    """Else no greeting could be encoded, and nobody could join from then on."""

    class Plain:
        pass

    name: Any = np.str_("test:a name of NumPy's")
    with mq.connect("inproc", group="type-names", name="a") as a:
        add_safe_types(Plain, name=name, encode=vars, decode=lambda state: Plain())
        with mq.connect("inproc", group="type-names", name="b") as b:
            b.subscribe("t", timeout=10)
            a.publish("t", Plain(), timeout=10)
            assert type(b.recv(timeout=10).payload) is Plain
    assert {type(known) for known in safe_types.names()} == {str}


def test_a_class_defined_anew_replaces_the_old_one() -> None:
    """As happens in notebooks and on reload."""

    def define() -> type:
        @dataclasses.dataclass
        class Again:
            value: int

        return Again

    first, second = define(), define()
    add_safe_types(first)
    add_safe_types(second)
    assert type(travel(second(1))) is second
    with pytest.raises(CodecError, match="is not data"):
        CODEC.encode(first(1))


class Stranger:
    """Not registered."""

    data: Any = None


@pytest.mark.parametrize(
    ("payload", "place"),
    [
        (Stranger(), "payload on topic"),
        ({"a": [1, 2, 3, Step(Stranger())]}, r"payload\['a'\]\[3\]\.observation"),
        ({(1, 2): {3: Stranger()}}, r"payload\[\(1, 2\)\]\[3\]"),
        (OrderedDict(x=({1: Stranger()},)), r"payload\['x'\]\[0\]\[1\]"),
    ],
)
def test_what_cannot_travel_is_refused_with_place_and_remedies(
    payload: Any, place: str
) -> None:
    """The error names type, place, topic and both remedies."""
    with pytest.raises(CodecError, match=place) as caught:
        CODEC.encode(payload, "weights")
    for part in (
        "Stranger",
        "'weights'",
        "mq.add_safe_types(Stranger, encode=",
        "allow_pickle=True",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (torch.eye(2).to_sparse(), "to_dense"),
        (torch.empty(2, device="meta"), "meta device"),
        (np.array([object()]), r"\.astype"),
        (np.zeros(2, [("a", "O")]), r"\.astype"),
        (torch.ones([1] * 65), "64; send .flatten"),
        (np.ma.masked_array([1]), r"\.filled\(.*\.mask"),
        (np.rec.array([(1,)], dtype=[("a", "i4")]), "numpy.asarray"),
        (memoryview(b"x"), r"bytes\("),
        (range(3), r"list\("),
        (defaultdict(int), "add_safe_types"),
        (decimal.Decimal(1), "add_safe_types"),
        (torch.nn.Sequential(), r"\.state_dict\(\)"),
        (torch.optim.SGD([torch.zeros(1)]), r"\.state_dict\(\)"),
        (pathlib.PurePosixPath("x"), "add_safe_types"),
        (torch.float32, "add_safe_types"),
        (lambda: 1, "send data .* allow_pickle"),
        (..., "send data .* allow_pickle"),
        (int, "send data .* allow_pickle"),
        ("\ud800", "surrogatepass"),
        (np.str_("\ud800"), "surrogatepass"),
        (np.zeros(1, [("\ud800", "<f4")]), "surrogatepass"),
        (datetime.time(1, tzinfo=zoneinfo.ZoneInfo("Europe/Paris")), "fixed offset"),
        (1 << (8 * ext.MAX_INT_BYTES), "its bytes"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_refusals_come_with_a_remedy(value: Any, remedy: str) -> None:
    """What is refused although it looks like data says what to do."""
    for payload in (value, {"a": value}, [(value,)]):
        with pytest.raises(CodecError, match=remedy):
            CODEC.encode(payload)


@pytest.mark.parametrize(
    "value",
    [
        Counter("abb"),
        deque([1, 2]),
        decimal.Decimal("1.50"),
        fractions.Fraction(2, 3),
        pathlib.Path("x/y"),
        uuid.UUID(int=7),
        Color.RED,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_remedy_can_be_done_as_it_is_written(
    value: Any, types_of_its_own: None
) -> None:
    """It has the functions that turn objects of well-known classes into data."""
    safe_types.tables[:] = {}, {}
    known = {"mq": mq, type(value).__name__: type(value)}
    call = safe_types.remedy(type(value)).partition(" on both")[0].rpartition("mq.")[2]
    eval(f"mq.{call}", known)
    assert travel(value) == value


def test_a_remedy_says_where_functions_are_needed() -> None:
    """A class that nobody knows."""

    class Own:
        pass

    with pytest.raises(CodecError, match=r"add_safe_types\(Own, encode=.*, decode="):
        CODEC.encode(Own())


@pytest.mark.filterwarnings("ignore")  # torch will change them
def test_nested_tensors_are_refused_with_a_remedy() -> None:
    """They are said to be strided, and have no shape."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for payload in (nested, {"a": nested}):
        with pytest.raises(CodecError, match=r"is nested; send \.unbind\(\)"):
            CODEC.encode(payload)


@pytest.mark.filterwarnings("ignore")  # torch is about to give them up
def test_quantised_tensors_are_refused_with_a_remedy() -> None:
    """Their numbers need a scale that is no part of a tensor's data."""
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    with pytest.raises(CodecError, match="dequantize"):
        CODEC.encode(quantised)


def test_tensors_without_memory_are_refused_with_a_remedy() -> None:
    """NumPy takes other memory for them, and whatever lies there would be sent."""
    CODEC.encode(torch.ones(3, 4))  # that others like it are known is no difference
    freed = torch.ones(3, 4)
    others = (freed.T, torch.nn.Parameter(freed))
    freed.untyped_storage().resize_(0)
    lazy = torch._efficientzerotensor(3)  # type: ignore[attr-defined]
    trusting = Codec(allow_pickle=True)
    for tensor in (freed, *others, lazy):
        for payload in (tensor, {"a": tensor}, [tensor]):
            for codec in (CODEC, trusting):
                with pytest.raises(CodecError, match=r"no memory.*storage was freed"):
                    codec.encode(payload)
    freed.untyped_storage().resize_(48)
    assert same(travel(freed.fill_(2)), torch.full((3, 4), 2.0))
    assert same(travel(torch.ones(3, 0)), torch.ones(3, 0))


@pytest.mark.parametrize("transform", ["functionalize", "grad", "vmap"])
def test_tensors_of_a_transform_are_refused_with_a_remedy(transform: str) -> None:
    """They stand for others, and have no memory of their own, or do not tell which."""

    def inside(tensor: torch.Tensor) -> torch.Tensor:
        for payload in (tensor, {"a": tensor}, [tensor]):
            with pytest.raises(CodecError, match=r"no memory.*outside of"):
                CODEC.encode(payload)
        return tensor.sum()

    getattr(torch.func, transform)(inside)(torch.ones(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("again", [False, True])
def test_tensors_under_a_mode_that_hides_them_are_refused(
    dtype: torch.dtype, again: bool
) -> None:
    """Also such as were encoded before, and those whose memory is not sent as it is."""
    tensor = torch.ones(3, 100_000 + again, dtype=dtype)
    for payload in (tensor, {"a": tensor}, [tensor], tensor.T):
        if again:
            CODEC.encode(payload)
        with (
            FakeTensorMode(),
            pytest.raises(CodecError, match="outside of FakeTensorMode"),
        ):
            CODEC.encode(payload)


def test_tensors_made_under_that_mode_are_refused_alike() -> None:
    """They have no data, so that to register their type would be no remedy."""
    with FakeTensorMode():
        for payload in (torch.ones(3), {"a": torch.ones(3)}):
            with pytest.raises(CodecError, match="outside of FakeTensorMode"):
                CODEC.encode(payload)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("again", [False, True])
def test_tensors_are_refused_while_torch_traces(again: bool) -> None:
    """Their shapes are tensors then, which are recorded."""
    sent = torch.ones(3, 5)
    if again:
        CODEC.encode(sent)
        CODEC.encode([sent])

    def traced(tensor: torch.Tensor) -> torch.Tensor:
        for payload in (tensor, {"a": tensor}, [tensor], tensor.T):
            with pytest.raises(CodecError, match=r"torch\.jit\.trace.*outside of"):
                CODEC.encode(payload)
        return tensor

    torch.jit.trace(traced, sent, check_trace=False)  # type: ignore[no-untyped-call]
    assert same(travel(sent), sent)


FIRST_UNDER_A_MODE = """
import torch
from torch._subclasses import FakeTensorMode
import mq

with mq.connect("inproc", group="first", name="one") as queue:
    with FakeTensorMode():
        try:
            queue.publish("t", torch.ones(2))
        except mq.CodecError as error:
            print(error)
    queue.publish("t", torch.ones(2))
"""


def test_the_first_tensor_of_a_process_may_be_under_a_mode() -> None:
    """What knows tensors is imported then, and has none of its own."""
    assert "outside of FakeTensorMode" in output_of(FIRST_UNDER_A_MODE)


def test_messages_ask_for_unregistered_types_in_vain() -> None:
    """The error names the type; nothing of it is imported or built."""
    area = assemble(
        pack(Ext(ext.OBJECT, pack(["os:system", {"command": "true"}]))), (), frozenset()
    ).pack()
    with pytest.raises(UntrustedPayload, match="'os:system'"):
        CODEC.decode(memoryview(area))


def test_pickle_needs_permission_on_both_sides() -> None:
    """Without it neither side touches an arbitrary object."""
    trusting = Codec(allow_pickle=True)
    frames = trusting.encode({"x": [fraction := decimal.Decimal("1.5")]})
    assert frames.needs == {"pickle"}
    assert "pickle" in trusting.accepts()
    assert "pickle" not in CODEC.accepts()
    assert same(travel({"x": [fraction]}, trusting), {"x": [fraction]})
    with pytest.raises(UntrustedPayload, match="allow_pickle=True"):
        CODEC.decode(area_of(frames))
    with pytest.raises(CodecError, match="cannot be pickled"):
        trusting.encode([lambda: 1])
    broken = assemble(
        pack(Ext(ext.PICKLE, pack([3]))), (memoryview(b"abc"),), frozenset()
    )
    with pytest.raises(CodecError, match="unpickling raised"):
        trusting.decode(area_of(broken))


@pytest.mark.filterwarnings("ignore")  # torch will change some of them
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.ones([1] * 65),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        lambda: np.array([1, "a"], object),
        lambda: np.zeros(2, [("a", "O")])[0],
        lambda: datetime.time(1, tzinfo=zoneinfo.ZoneInfo("Europe/Paris")),
    ],
    ids=["sparse", "nested", "65 dims", "quantised", "objects", "record", "zone"],
)
def test_what_has_no_format_is_pickled_where_it_is_allowed(
    make: Callable[[], Any],
) -> None:
    """As any other object is, also when it comes again."""
    value = make()
    trusting = Codec(allow_pickle=True)
    for payload in (value, {"x": value}) * 2:
        frames = trusting.encode(payload)
        assert frames.needs == {"pickle"}
        found = trusting.decode(area_of(frames))
        assert repr(found) == repr(payload)
        with pytest.raises(UntrustedPayload, match="allow_pickle=True"):
            CODEC.decode(area_of(frames))
    with pytest.raises(CodecError):
        CODEC.encode(value)


def test_pickled_arrays_travel_out_of_band() -> None:
    """Pickle's own buffers are views on both sides."""
    trusting = Codec(allow_pickle=True)
    sent = Stranger()
    sent.data = np.arange(10_000.0)
    frames = trusting.encode(sent)
    assert frames.buffers[1].nbytes == 80_000
    assert frames.buffers[0].nbytes < 1000
    sent.data[0] = 5.0
    area = area_of(frames)
    found = trusting.decode(area).data
    assert (found[0], found[-1]) == (5.0, 9999.0)
    found[-1] = 7.0
    assert bytes(area[-8:]) == np.array(7.0).tobytes()


def test_registered_types_from_outside_cannot_break_the_receiver() -> None:
    """Wrong fields, refusals of the type and any exception become CodecError."""
    name = f"{__name__}:Step"
    good = {"observation": 1, "reward": 2.0, "norm": 1.0}
    for state, problem in (
        ({}, "in place of the fields"),
        ([], "in place of the fields"),
        ({**good, "other": 1}, "in place of the fields"),
        ({**good, "reward": "x"}, "a reward is a number"),
    ):
        area = assemble(pack(Ext(ext.OBJECT, pack([name, state]))), (), frozenset())
        with pytest.raises(CodecError, match=problem):
            CODEC.decode(area_of(area))


class Panic(BaseException):
    """No Exception, as what Rust code raises in Python is not."""


class Panicking:
    """Something that a function of its own makes, and that has no hash."""

    def __hash__(self) -> int:
        raise Panic("no hash")

    def __reduce__(self) -> Any:
        return _panic, (1,)


def _panic(state: Any) -> Panicking:
    if state:
        raise Panic("no object")
    return Panicking()


PICKLED = pickle.dumps(Panicking())


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (Ext(ext.OBJECT, pack(["test:Panicking", 1])), "a test:Panicking raised Panic"),
        (
            Ext(ext.SET, pack([Ext(ext.OBJECT, pack(["test:Panicking", 0]))])),
            "decoding a message raised Panic",
        ),
        (Ext(ext.PICKLE, pack([len(PICKLED)])), "unpickling raised Panic"),
    ],
    ids=["decode", "hash", "pickle"],
)
def test_what_is_raised_in_decoding_need_be_no_exception(
    payload: Ext, problem: str
) -> None:
    """It becomes a CodecError all the same, or every later `recv` would raise it."""
    add_safe_types(Panicking, name="test:Panicking", encode=lambda p: 1, decode=_panic)
    buffers = (memoryview(PICKLED),) if payload.code == ext.PICKLE else ()
    area = area_of(assemble(pack(payload), buffers, frozenset()))
    with pytest.raises(CodecError, match=problem) as caught:
        Codec(allow_pickle=True).decode(area)
    assert isinstance(caught.value.__cause__, Panic)


@contextlib.contextmanager
def two_queues() -> Iterator[tuple[mq.MQ, mq.MQ]]:
    """The second hears what the first publishes to "t"."""
    with (
        mq.connect("inproc", group="safe-types", name="a") as a,
        mq.connect("inproc", group="safe-types", name="b") as b,
    ):
        b.subscribe("t")
        a.wait_for_subscribers("t", 1, timeout=60)
        yield a, b


class Held:
    """Something that takes several times to be decoded."""


@pytest.mark.parametrize(
    "kind", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError]
)
def test_what_is_to_end_a_program_or_a_task_is_raised_as_it_is(
    kind: type[BaseException],
) -> None:
    """By `recv`, at each call until the message can be decoded."""

    def decode(state: Any) -> Held:
        if asked_to_end:
            raise asked_to_end.pop()
        return Held()

    asked_to_end = [kind(), kind()]
    add_safe_types(Held, name="test:Held", encode=lambda held: 1, decode=decode)
    with two_queues() as (a, b):
        a.publish("t", Held())
        for _ in range(2):
            with pytest.raises(kind):
                b.recv(timeout=60)
        assert type(b.recv(timeout=60).payload) is Held


def test_a_queue_goes_on_after_what_is_no_exception() -> None:
    """The message counts as consumed, and the next one comes."""
    add_safe_types(Panicking, name="test:Panicking", encode=lambda p: 1, decode=_panic)
    with two_queues() as (a, b):
        a.publish("t", Panicking())
        a.publish("t", "next")
        with pytest.raises(CodecError, match="no object"):
            b.recv(timeout=60)
        assert b.recv(timeout=60).payload == "next"


def test_pickles_are_not_decoded_ahead() -> None:
    """Unpickling runs anybody's code, which is not to run under a queue's lock."""
    trusting = Codec(allow_pickle=True)
    area = area_of(trusting.encode({"p": pathlib.PurePosixPath("x")}))

    assert trusting.decode_ahead([area]) == []
    assert trusting.decode(area) == {"p": pathlib.PurePosixPath("x")}


def test_what_is_pickled_with_an_array_is_read_only_in_place() -> None:
    """As other arrays are there: the memory is the publisher's."""
    trusting = Codec(allow_pickle=True)
    sent = OwnArrays([np.arange(50_000)])
    area = area_of(trusting.encode(sent))

    assert trusting.decode(area).arrays[0].flags.writeable
    (array,) = trusting.decode(area, read_only=True).arrays
    assert np.array_equal(array, sent.arrays[0])
    assert not array.flags.writeable


class OwnArrays:
    """A class that is not registered, with arrays."""

    def __init__(self, arrays: list[np.ndarray[Any, Any]]) -> None:
        self.arrays = arrays


class Meddler:
    """Decoding it changes what it came from."""

    area: memoryview


def _meddle(state: Any) -> Meddler:
    raw = bytes(Meddler.area)
    at = raw.index(b"after")
    Meddler.area[at : at + 5] = b"later"
    return Meddler()


def test_what_lies_in_shared_memory_is_looked_at_once() -> None:
    """Its publisher could change it between a check and a use."""
    add_safe_types(Meddler, encode=lambda meddler: [], decode=_meddle)
    Meddler.area = area_of(CODEC.encode([Meddler(), "after"]))

    assert CODEC.decode(Meddler.area, read_only=True)[1] == "after"
    assert b"later" in bytes(Meddler.area)


def test_a_plain_message_in_shared_memory_is_copied_before_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the rest of what is not arrays."""
    area = area_of(CODEC.encode({"text": "before"}))
    real = decode_plain

    def meddling(memory: memoryview) -> Any:
        at = bytes(area).index(b"before")
        area[at : at + 6] = b"\xff" * 6
        return real(memory)

    monkeypatch.setattr("mq.codec.decode_plain", meddling)
    assert CODEC.decode(area, read_only=True) == {"text": "before"}


SCRIPT = """
import dataclasses
import multiprocessing

import mq


@dataclasses.dataclass
class Reward:
    value: float


mq.add_safe_types(Reward)


def actor() -> None:
    with mq.connect("tcp", group="script", name="actor") as queue:
        queue.wait_for_subscribers("rewards", 1, timeout=60)
        queue.publish("rewards", Reward(1.5))
        queue.flush(timeout=60)


if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=actor)
    with mq.connect("tcp", group="script", name="learner") as queue:
        queue.subscribe("rewards")
        process.start()
        print(queue.recv(timeout=60).payload)
    process.join()
"""


def test_a_type_of_a_script_has_one_name_in_all_its_processes(
    tmp_path: pathlib.Path,
) -> None:
    """To a process that it spawns its module is another one."""
    assert printed_by(SCRIPT, tmp_path) == ["Reward(value=1.5)"]


class Holder:
    """Something that is made of data."""

    def __init__(self, data: Any) -> None:
        self.data = data


class Peevish:
    """Something that is not to be shown, nor to be put into a set."""

    def __hash__(self) -> int:
        raise AttributeError("not now")

    def __repr__(self) -> str:
        raise LookupError("never")


@pytest.mark.parametrize("data", [[1] * 300, 7, "x", torch.ones(2), {"a": [1]}])
def test_what_is_decoded_may_be_plain_data(data: Any) -> None:
    """Or a part of its state: it is no container of itself then."""
    add_safe_types(
        Holder, name="test:Holder", encode=lambda b: b.data, decode=lambda d: d
    )
    payload = [Holder(data), [1] * 300, "x", 7, torch.zeros(200, 3)]
    assert same(travel(payload), [data, *payload[1:]])


def test_what_cannot_be_shown_is_named_by_its_type() -> None:
    """Where it keeps something from travelling, and where it is not hashable."""
    with pytest.raises(CodecError, match=r"_Quiet.* is not data"):
        CODEC.encode({_Quiet(): Holder(1)})
    add_safe_types(Peevish, name="test:Peevish", encode=id, decode=lambda d: Peevish())
    area = assemble(pack(Ext(ext.SET, pack([_peevish()]))), (), frozenset()).pack()
    with pytest.raises(CodecError, match=r"decoding a message raised Attr.*not now"):
        CODEC.decode(memoryview(area))


def _peevish() -> Ext:
    return Ext(ext.OBJECT, pack(["test:Peevish", 1]))


class _Quiet(Peevish):
    def __hash__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("needs", "remedies"),
    [
        ({"test:Unknown"}, "Call mq.add_safe_types there, too."),
        ({"pickle"}, "Call .* here and there .*, or connect there with allow_pickle="),
        (
            {"pickle", "test:Unknown"},
            "Call .*there, too. Call .* here and there .*pickle=True",
        ),
    ],
)
def test_what_a_subscriber_does_not_accept_has_the_remedy_that_helps(
    needs: set[str], remedies: str
) -> None:
    """To allow pickles helps no type that travels as what it was registered as."""
    options: dict[str, Any] = {"group": f"accepts-{os.getpid()}"}
    with mq.connect("inproc", **options) as a, mq.connect("inproc", **options) as b:
        b.subscribe("t")
        publisher = a._mesh.publisher
        frames = a._codec.encode("x", "t")._replace(needs=frozenset(needs))
        with pytest.raises(CodecError, match=f"nobody got the message. {remedies}"):
            publisher.check(publisher.topic("t"), frames)
