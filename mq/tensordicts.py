"""How a `tensordict.TensorDict` travels, once it is registered."""

from __future__ import annotations

from typing import Any

from mq.errors import CodecError


def state(tensors: Any) -> dict[str, Any]:
    """What `build` needs: entries, batch size and names of dimensions."""
    return {
        "entries": {key: _entry(value) for key, value in tensors.items()},
        "batch_size": tuple(tensors.batch_size),
        "names": list(tensors.names),
        "has_device": tensors.device is not None,
    }


def _entry(value: Any) -> Any:
    from tensordict import NonTensorStack, is_non_tensor

    # A stack has no data of its own; it is refused, unless its type travels, too.
    single = is_non_tensor(value) and not isinstance(value, NonTensorStack)
    return value.data if single else value


def build(state: Any) -> Any:
    """The TensorDict of a state; one that had a device has that of its tensors.

    Raises:
        CodecError: The state has other keys.
    """
    import torch
    from tensordict import TensorDict

    if type(state) is not dict or state.keys() != {
        "entries",
        "batch_size",
        "names",
        "has_device",
    }:
        raise CodecError("a TensorDict arrived without its entries or batch size")
    device = None
    if state["has_device"]:
        tensors = [v for v in state["entries"].values() if isinstance(v, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
    names = state["names"] if any(state["names"]) else None
    return TensorDict(
        state["entries"], batch_size=state["batch_size"], names=names, device=device
    )
