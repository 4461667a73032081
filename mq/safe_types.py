"""The types beyond plain data that this process sends and accepts."""

from __future__ import annotations

import dataclasses
import enum
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple

PICKLE: Final = "pickle"
"""The name under which a member announces that it accepts pickles."""

MAX_NAME_BYTES: Final = 255
MAX_NAMES_BYTES: Final = 32 * 1024
"""All names together, each with 3 bytes more: they are part of a greeting."""


class SafeType(NamedTuple):
    """How one registered type travels.

    Attributes:
        name: The name on the wire.
        kind: The exact type; subclasses are registered on their own.
        encode: From an object to its state, which is data.
        decode: From a state, which may come from anybody, to an object.
        by_field: Whether the state's keys are the object's attributes.
        fields: Of these their names, where that is all: no code of the application's
            runs as they are looked at, and the constructor takes them by keyword.
    """

    name: str
    kind: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    by_field: bool
    fields: tuple[str, ...] | None = None


# Replaced, never changed: lookups on the message path take no lock.
tables: Final[list[dict[Any, SafeType]]] = [{}, {}]
"""All of them by type, and by name; for lookups only."""
_lock = threading.Lock()

on_change: Final[list[Callable[[], None]]] = []
"""Called after each registration."""


def add_safe_types(
    *types: type,
    name: str | None = None,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
) -> None:
    """Let objects of these types travel as data, without pickle.

    Sender and receiver register the type, under the same name. Dataclasses, named
    tuples, enumerations, `tensordict.TensorDict` and classes with a pair ``to_dict()``
    and ``from_dict(mapping)`` need no functions::

        mq.add_safe_types(Transition, TensorDict)
        mq.add_safe_types(Path, encode=str, decode=Path)

    A subclass is another type. A dataclass is built by its constructor, so that its
    ``__post_init__`` can check what came in; types of fields are not checked. One that
    changes a field there, other than once, needs functions: it would do so again.

    Args:
        types: Classes; with `name` or functions exactly one.
        name: Its name on the wire; by default ``module:qualname``.
        encode: Makes from an object a payload of data and registered types.
        decode: Makes an object from what `encode` returned. It is called with whatever
            a peer sent: any exception of it becomes a `CodecError`, but for
            KeyboardInterrupt, SystemExit, GeneratorExit and asyncio's CancelledError,
            which `recv` raises as they are; the next call then decodes it again.

    Raises:
        TypeError: One of them is no class, or needs `encode` and `decode`; or the name
            is no text.
        ValueError: The name is taken by another type, empty or over 255 bytes, or the
            type travels without being registered; or there are over 32 KiB of names.
    """
    if (encode is None) != (decode is None):
        raise TypeError("add_safe_types needs both encode= and decode=, or neither")
    for function in (encode, decode):
        if not (function is None or callable(function)):
            raise TypeError(f"encode= and decode= are functions, not {function!r}")
    if len(types) != 1 and (name is not None or encode is not None):
        raise TypeError("name=, encode= and decode= go with exactly one type")
    if name is not None:
        if not isinstance(name, str):
            raise TypeError(f"name= of add_safe_types is a str, not {name!r}")
        name = str.__str__(name)  # whatever subclass of str: it goes on the wire
    entries = []
    for kind in types:
        if not isinstance(kind, type):
            raise TypeError(f"add_safe_types takes classes, not {kind!r}")
        _check_kind(kind)
        if encode is not None and decode is not None:
            entry = SafeType(type_name(kind), kind, encode, decode, False)
        else:
            entry = _recipe(kind)
        entries.append(entry._replace(name=entry.name if name is None else name))
    _store(entries)


def _store(entries: list[SafeType]) -> None:
    with _lock:
        by_type, by_name = map(dict, tables)
        for entry in entries:
            _check(entry, by_name.get(entry.name))
            old = by_type.get(entry.kind)
            if old is not None:
                del by_name[old.name]
            taken = by_name.get(entry.name)
            if taken is not None:  # the class was defined anew: the old one goes
                del by_type[taken.kind]
            by_type[entry.kind] = by_name[entry.name] = entry
        if sum(len(name.encode()) + 3 for name in by_name) > MAX_NAMES_BYTES:
            raise ValueError(
                f"the names of {len(by_name)} types are too long together: a member "
                f"tells each other one {MAX_NAMES_BYTES} bytes of them at most; "
                "register fewer, or give some a short name="
            )
        tables[:] = by_type, by_name
    for changed in on_change:
        changed()


def _check_kind(kind: type) -> None:
    from mq import packing  # which asks here how registered types travel

    if packing.is_data(kind):
        raise ValueError(f"{kind.__name__} cannot be registered: it travels as it is")
    if kind.__module__ == "builtins":
        raise ValueError(
            f"{kind.__name__} cannot be registered, as no builtin can: {remedy(kind)}"
        )


def _check(entry: SafeType, taken: SafeType | None) -> None:
    try:
        size = len(entry.name.encode())
    except UnicodeEncodeError:
        size = 0
    if not 1 <= size <= MAX_NAME_BYTES or entry.name == PICKLE:
        raise ValueError(
            f"{entry.name!r} cannot name a type: names have 1 to {MAX_NAME_BYTES} "
            f"bytes of UTF-8 and are not {PICKLE!r}"
        )
    if taken is not None and type_name(taken.kind) != type_name(entry.kind):
        raise ValueError(
            f"the name {entry.name!r} is taken by {type_name(taken.kind)}; give "
            f"{type_name(entry.kind)} another name="
        )


def type_name(kind: type) -> str:
    """``module:qualname`` of a class.

    A process that multiprocessing has started runs its parent's script by another name.
    """
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}:{kind.__qualname__}"


def by_type(kind: type) -> SafeType | None:
    """How objects of exactly this type travel."""
    return tables[0].get(kind)


def by_name(name: object) -> SafeType | None:
    """The type that is registered under a name from the wire."""
    return tables[1].get(name) if isinstance(name, str) else None


def names() -> frozenset[str]:
    """The names of all registered types."""
    return frozenset(tables[1])


def _recipe(kind: type) -> SafeType:
    from mq import recipes  # which knows the entry that it makes

    name = type_name(kind)
    if _is_tensordict(kind):
        from mq import tensordicts

        return SafeType(
            "tensordict:TensorDict", kind, tensordicts.state, tensordicts.build, False
        )
    if dataclasses.is_dataclass(kind):
        return recipes.dataclass(name, kind)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return recipes.named_tuple(name, kind)
    if issubclass(kind, enum.Flag) and all(type(flag.value) is int for flag in kind):
        return recipes.flags(name, kind)
    if issubclass(kind, enum.Enum):
        return recipes.enumeration(name, kind)
    if _holds_tensors(kind):
        raise TypeError(
            f"{name} needs encode= and decode= of add_safe_types, as its to_dict "
            f"leaves out what its from_dict needs; or {remedy(kind)}"
        )
    to_dict, from_dict = (
        getattr(kind, "to_dict", None),
        getattr(kind, "from_dict", None),
    )
    if callable(to_dict) and callable(from_dict):
        return SafeType(name, kind, to_dict, from_dict, False)
    raise TypeError(
        f"{name} is no dataclass, named tuple or enumeration and has no pair to_dict "
        "and from_dict: pass encode= and decode= to add_safe_types"
    )


def _is_tensordict(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return (package, kind.__qualname__) == ("tensordict", "TensorDict")


def _holds_tensors(kind: type) -> bool:
    """Whether it is a relative of TensorDict."""
    return any(type_name(base) == _TENSORDICT_BASE for base in kind.__mro__)


def remedy(kind: type) -> str:
    """What to do so that objects of this class travel, in words."""
    shown = kind.__qualname__.rpartition(".")[2]
    hint = _HINTS.get(type_name(kind))
    if hint is None and "numpy" in sys.modules:
        import numpy as np

        if issubclass(kind, np.ma.MaskedArray):
            hint = "send .filled(...), or its .data and its .mask"
        elif issubclass(kind, np.ndarray):
            hint = "convert it with numpy.asarray"
    if hint is None and _holds_tensors(kind) and not _is_tensordict(kind):
        hint = f"send .to_tensordict(), after {_REGISTERED}"
    if hint is None and any(type_name(base) in _WITH_STATE for base in kind.__mro__):
        hint = "send .state_dict(), which load_state_dict takes"
    if hint is None and kind.__module__ == "builtins":  # they cannot be registered
        hint = (
            "send data in its place, or pass allow_pickle=True to mq.connect on both "
            "sides"
        )
    return hint or (
        f"register it with mq.add_safe_types({shown}{_functions(kind)}) on both sides, "
        "or pass allow_pickle=True to mq.connect on both sides"
    )


def _functions(kind: type) -> str:
    """The further arguments that `add_safe_types` needs for a class."""
    try:
        _recipe(kind)
    except TypeError:
        for base in kind.__mro__:
            package = base.__module__.partition(".")[0]
            if encode := _ENCODERS.get(f"{package}:{base.__qualname__}"):
                return f", encode={encode}, decode={kind.__qualname__}"
        return ", encode=<to plain data>, decode=<and back>"
    return ""


_ENCODERS: Final = {
    "collections:Counter": "dict",
    "collections:deque": "list",
    "decimal:Decimal": "str",
    "fractions:Fraction": "str",
    "pathlib:PurePath": "str",
    "uuid:UUID": "str",
}
_TENSORDICT_BASE: Final = "tensordict.base:TensorDictBase"
_WITH_STATE: Final = {
    "torch.nn.modules.module:Module",
    "torch.optim.optimizer:Optimizer",
    "torch.optim.lr_scheduler:LRScheduler",
}
_REGISTERED: Final = "mq.add_safe_types(TensorDict) on both sides"
_HINTS: Final = {
    "torch._subclasses.fake_tensor:FakeTensor": (
        "it stands for a tensor and has no elements; publish outside of "
        "FakeTensorMode, which torch.export uses, too"
    ),
    "tensordict._lazy:LazyStackedTensorDict": (
        f"send .contiguous(), or the list .tensordicts, after {_REGISTERED}"
    ),
    "tensordict.memmap:MemoryMappedTensor": (
        "send .clone(), or .to_tensordict() of the TensorDict that it is in"
    ),
    "tensordict.tensorclass:NonTensorStack": (
        "register it with mq.add_safe_types(NonTensorStack, "
        "encode=NonTensorStack.tolist, decode=NonTensorStack.from_list) on both sides, "
        "which turns items that are lists into stacks, or pass allow_pickle=True to "
        "mq.connect on both sides"
    ),
    "builtins:memoryview": "convert it with bytes(...) or numpy.frombuffer",
    "builtins:range": "convert it with list(...)",
    "builtins:generator": "convert it with list(...)",
}
