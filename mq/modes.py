"""Modes of torch's, which are a thread's, and what `recv` makes outside of them.

In inference mode, under FakeTensorMode or in a transform of torch.func a new tensor is
another than elsewhere: one that cannot be trained with, has no data, or stands for
another. Which `recv` returns would depend on the call that happened to decode it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Final, TypeVar

_Result = TypeVar("_Result")
_asked: Final[list[Callable[[], Any]]] = []
"""What tells whether some mode is on, once torch is loaded."""
_guards: Final[list[Callable[[], Any]]] = []
"""What makes an object, while which exists some of them have no effect."""


def outside(function: Callable[..., _Result], *args: Any) -> _Result:
    """What a function returns, where no mode has an effect on what it makes."""
    if not is_any_on():
        return function(*args)
    with _outside():
        return function(*args)


def is_any_on() -> bool:
    """Whether there is a mode in this thread."""
    for is_on in _asked:
        if is_on():
            return True
    return False


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    import torch  # it is loaded

    with torch.inference_mode(False):
        guards = [make() for make in _guards]
        try:
            yield
        finally:
            guards.clear()


def know_torch() -> None:
    """Torch is loaded."""
    import torch
    from torch import _C

    _asked.append(torch.is_inference_mode_enabled)
    # There are no public names for these. Where torch has them no more, these modes are
    # let be.
    for names in (
        ("_len_torch_dispatch_stack", "_DisableTorchDispatch"),
        ("_functorch.peek_interpreter_stack", "_DisableFuncTorch"),
    ):
        with contextlib.suppress(AttributeError):
            is_on, guard = attrgetter(*names)(_C)
            _asked.append(is_on)
            _guards.append(guard)
