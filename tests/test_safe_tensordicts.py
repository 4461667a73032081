"""Relatives of TensorDict, which do not travel, say what to send in their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from payload_checks import CODEC, area_of, same, travel
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    PersistentTensorDict,
    TensorDict,
    TensorDictParams,
    lazy_stack,
)

from mq.errors import CodecError
from mq.safe_types import add_safe_types, remedy


@dataclasses.dataclass
class Settings:
    """An application's object with a device of its own."""

    device: Any


add_safe_types(TensorDict, Settings)


def stack() -> Any:
    return lazy_stack([TensorDict({"a": torch.arange(3.0)}, [3]) for _ in range(2)], 1)


def uneven() -> Any:
    return lazy_stack([TensorDict({"a": torch.ones(size)}, []) for size in (3, 4)])


def mapped() -> Any:
    return TensorDict({"a": torch.arange(3.0)}, [3]).memmap_()


def params() -> Any:
    return TensorDictParams(TensorDict({"a": torch.nn.Parameter(torch.ones(2))}, []))


@pytest.mark.parametrize(
    "kind", [LazyStackedTensorDict, PersistentTensorDict, TensorDictParams]
)
def test_a_relative_of_tensordict_needs_functions(kind: type) -> None:
    """What its `to_dict` returns has no batch size, or makes no object again."""
    with pytest.raises(TypeError, match=r"needs encode= and decode= .*; or send"):
        add_safe_types(kind)


def test_a_tensordict_itself_is_to_be_registered() -> None:
    """`to_tensordict` would make another one of it."""
    assert remedy(TensorDict).startswith(
        "register it with mq.add_safe_types(TensorDict)"
    )


@pytest.mark.parametrize(
    ("sent", "remedy", "replace"),
    [
        (stack, r"send \.contiguous\(\)", lambda sent: sent.contiguous()),
        (uneven, r"the list \.tensordicts", lambda sent: sent.tensordicts),
        (params, r"\.to_tensordict\(\)", lambda sent: sent.to_tensordict()),
        (mapped, r"\.to_tensordict\(\)", lambda sent: sent.to_tensordict()),
        (lambda: mapped()["a"], r"send \.clone\(\)", MemoryMappedTensor.clone),
    ],
)
def test_the_remedy_of_what_is_refused_helps(
    sent: Callable[[], Any], remedy: str, replace: Callable[[Any], Any]
) -> None:
    """Also where it is an entry of a TensorDict; the values arrive."""
    value = sent()
    with pytest.raises(CodecError, match=remedy):
        CODEC.encode(value)
    with pytest.raises(CodecError, match=remedy):
        CODEC.encode([{"in": value}])
    wanted = replace(value)
    found = travel(wanted)
    if isinstance(wanted, torch.Tensor):
        assert same(found, wanted)
        return
    pairs = (
        zip(found, wanted, strict=True) if type(wanted) is list else [(found, wanted)]
    )
    for got, want in pairs:
        assert type(got) is TensorDict
        assert got.batch_size == want.batch_size
        assert same(got["a"], want["a"].detach())


@pytest.mark.parametrize(
    "value",
    [5, 2.5, True, "text", b"bytes", None, [1, 2], (1, 2), {"a": 1}, [1, "a"], {1}],
    ids=repr,
)
def test_what_is_no_tensor_stays_what_it_is(value: Any) -> None:
    """Also where a TensorDict would make a tensor of it."""
    sent = TensorDict({"t": torch.ones(2)}, [2])
    sent.set_non_tensor("k", value)
    found = travel(sent)
    assert type(found["k"]) is type(value)
    assert found["k"] == value
    assert type(found.get("k")) is type(sent.get("k"))


@pytest.mark.parametrize("value", [5, "text"])
def test_what_is_no_tensor_has_the_batch_size_of_its_tensordict(value: Any) -> None:
    """Though its own had more dimensions, which do not travel."""
    entry = NonTensorData(value, batch_size=[3, 2])
    found = travel(TensorDict({"k": entry}, [3])).get("k")
    assert (found.data, found.batch_size) == (value, (3,))


def test_the_device_of_what_is_nested_is_the_device() -> None:
    """Where there is no tensor beside it."""
    inner = TensorDict({"a": torch.ones(2)}, [2], device="cpu")
    area = area_of(CODEC.encode(TensorDict({"inner": inner}, [2], device="cpu")))
    found = CODEC.decode(area, device="meta")
    assert (found.device, found["inner", "a"].device) == (torch.device("meta"),) * 2


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda:9", "trainer-1", 3])
def test_an_object_of_the_application_is_not_asked_for_the_device(device: Any) -> None:
    """It may have one, for the TensorDict's or for something else."""
    settings = Settings(device)
    entries = {"settings": NonTensorData(settings), "a": torch.ones(2)}
    found = travel(TensorDict(entries, [], device="cpu"))
    assert (found.device, found["settings"]) == (torch.device("cpu"), settings)
    assert same(found["a"], torch.ones(2))


@pytest.mark.parametrize(
    "first",
    [
        "text",
        NonTensorData(np.ones(2)),
        NonTensorData(torch.ones(2)),
        {},
        {"text": "text", "deeper": {}},
    ],
    ids=repr,
)
def test_what_has_no_tensors_does_not_tell_the_device(first: Any) -> None:
    """Wherever it is: the tensors do, also those that are nested."""
    tensors = {"a": torch.ones(2), "inner": {"b": torch.ones(2)}}
    for key in tensors:
        sent = TensorDict({"first": first, key: tensors[key]}, [], device="cpu")
        found = CODEC.decode(area_of(CODEC.encode(sent)), device="meta")
        assert found.device == torch.device("meta")
    nothing = TensorDict({"first": first}, [], device="cpu")
    assert travel(nothing).device == torch.device("cpu")
