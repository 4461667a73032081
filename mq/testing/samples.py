"""Payloads of every kind the contract names, and when two of them are the same."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections import OrderedDict
from typing import Any

import numpy as np


def all_samples() -> dict[str, Any]:
    """One payload of each kind, by a name for messages."""
    return {**_plain(), **_arrays(), **_tensors()}


def _plain() -> dict[str, Any]:
    now = datetime.datetime(2026, 2, 28, 23, 59, 59, 123456)
    values: dict[str, Any] = {
        "None": None,
        "bools": [True, False, 1, 0],
        "ints": [-1, 2**31, -(2**63), 2**64 - 1, 2**200, -(2**200)],
        "floats": [0.1, -0.0, math.inf, -math.inf, math.nan, 1.0],
        "complex": [1 + 2j, complex(math.nan, -0.0)],
        "str": ["", "a\0b", "Grüße \U0001f600", "x" * 100_000],
        "bytes": [b"", b"\0\xff", bytes(range(256)) * 1000],
        "lists and tuples": [[], (), [1, (2, [3, ()])], ((1,), [1])],
        "dict": {"a": {1: "int", (1, 2): "tuple", b"k": None, None: 1, 2.5: []}},
        "order of keys": dict.fromkeys("zyxabc"),
        "set": {1, "a", (2, 3)},
        "empty set": set(),
        "datetime": now,
        "datetime with zone": now.replace(tzinfo=datetime.timezone.utc),
        "deep": _nest(200),
        "many numbers": [number / 7 for number in range(10_000)],
        "images": [bytes([number]) * 30_000 for number in range(40)],
        "OrderedDict": _ordered({"a": 1, "b": [2], (3,): None}, None),
    }
    return values


def _ordered(items: dict[Any, Any], metadata: Any) -> Any:
    """One whose order is no longer that in which it was filled."""
    ordered = OrderedDict(items)
    ordered.move_to_end(next(iter(items)))
    if metadata is not None:  # as `state_dict` has it
        ordered._metadata = metadata  # type: ignore[attr-defined]
    return ordered


def _nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


_NUMPY = "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16 >i4 >f8 S5 U3 M8[us] m8[s]"


def _arrays() -> dict[str, Any]:
    base = np.arange(24).reshape(2, 3, 4)
    found: dict[str, Any] = {
        f"array {name}": np.zeros((3, 2), name)
        if name[0] in "SU"
        else _cast(base, name)
        for name in _NUMPY.split()
    }
    found |= {f"numpy scalar {n}": np.dtype(n).type(1) for n in ("?", "i2", "f4", "f8")}
    found |= {
        "0-d array": np.array(3.5),
        "empty array": np.empty((0, 5), np.float32),
        "strided array": base[:, ::-1, ::2],
        "large array": np.arange(700_000, dtype=np.int64),
        "structured array": np.ones(3, [("a", "i4"), ("b", "f8", (2,))]),
        "arrays in a dict": {"x": [base, (base + 1,)], "y": base.astype("f4")},
    }
    return found


def _cast(base: Any, name: str) -> Any:
    return (base % 2 if name == "?" else base).astype(name)


_TORCH = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 "
    "float64 complex64 complex128 float8_e4m3fn float8_e5m2"
)


def _tensors() -> dict[str, Any]:
    import torch

    base = torch.arange(24).reshape(2, 3, 4)
    dtypes = [getattr(torch, n) for n in _TORCH.split() if hasattr(torch, n)]
    found: dict[str, Any] = {str(dtype): base.to(dtype) for dtype in dtypes}
    found |= {
        "0-d tensor": torch.tensor(2.5),
        "empty tensor": torch.empty(0, 3),
        "strided tensor": base[:, 1:, ::3],
        "transposed tensor": base.float().permute(2, 0, 1),
        "expanded tensor": torch.ones(3, 1).expand(3, 4),
        "tensor with a gradient": torch.ones(4, requires_grad=True),
        "conjugated tensor": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "large tensor": torch.arange(600_000, dtype=torch.float32),
        "tensors in a dict": {"w": torch.ones(2, 2), "n": [torch.zeros(1), 1]},
        "batch": {"x": torch.ones(40, 9), "done": torch.arange(40) % 3 == 0},
        "weights": _weights(40, 20),
        "weights of a larger model": {"w": _weights(60, 10_000), "version": 3},
    }
    return found


def _weights(count: int, size: int) -> Any:
    """What `state_dict` gives of so many layers, the last of so many elements."""
    import torch

    layers = {}
    for number in range(1, count):
        elements = torch.arange(1 + number * size // count)
        dtype = (torch.float32, torch.bfloat16, torch.bool)[number % 3]
        layers[f"layers.{number}.weight"] = elements.to(dtype)
    return _ordered(layers, _ordered({"": {"version": 1}}, None))


def same(got: Any, sent: Any) -> bool:
    """Whether `got` is what `sent` must arrive as: type, shape, dtype and bits."""
    if type(sent).__module__ == "torch":
        return _same_tensor(got, sent)
    if type(got) is not type(sent):
        return False
    if isinstance(sent, np.ndarray | np.generic):
        alike = got.dtype == sent.dtype and got.shape == sent.shape
        return bool(alike and got.tobytes() == sent.tobytes())
    if isinstance(sent, dict):
        metadata = [getattr(one, "_metadata", None) for one in (got, sent)]
        return (
            list(got) == list(sent)
            and all(same(got[k], sent[k]) for k in sent)
            and same(*metadata)
        )
    if isinstance(sent, list | tuple):
        pairs = zip(got, sent, strict=False)
        return len(got) == len(sent) and all(same(g, s) for g, s in pairs)
    if dataclasses.is_dataclass(sent):
        return same(vars(got), vars(sent))
    if isinstance(sent, float | complex):
        return repr(got) == repr(sent)
    return bool(got == sent)


def _same_tensor(got: Any, sent: Any) -> bool:
    import torch

    if not isinstance(got, torch.Tensor) or got.requires_grad:
        return False
    if got.dtype != sent.dtype or got.shape != sent.shape:
        return False
    sent = sent.detach().resolve_conj().contiguous()
    return bool((_bits(got) == _bits(sent)).all())


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)
