"""How a `tensordict.TensorDict` travels, once it is registered."""

from __future__ import annotations

from typing import Any

from mq.errors import CodecError


def state(tensors: Any) -> dict[str, Any]:
    """What `build` needs: entries, batch size and names of dimensions.

    And which entries are no tensors, but for text, which cannot be taken for any.
    """
    from torch import Tensor

    entries = dict(tensors.items())
    singles = [
        key
        for key, value in entries.items()
        if type(value) is not Tensor and _is_single(value)
    ]
    entries.update((key, entries[key].data) for key in singles)
    found = {
        "entries": entries,
        "batch_size": tuple(tensors.batch_size),
        "names": list(tensors.names),
        "has_device": tensors.device is not None,
    }
    if data := [key for key in singles if type(entries[key]) is not str]:
        found["data"] = data
    return found


def _is_single(value: Any) -> bool:
    from tensordict import NonTensorStack, is_non_tensor

    # A stack has no data of its own; it is refused, unless its type travels, too.
    return is_non_tensor(value) and not isinstance(value, NonTensorStack)


def build(state: Any) -> Any:
    """The TensorDict of a state; one that had a device has that of its tensors.

    Raises:
        CodecError: The state has other keys.
    """
    import torch
    from tensordict import NonTensorData, TensorDict

    if type(state) is not dict or state.keys() - {"data"} != {
        "entries",
        "batch_size",
        "names",
        "has_device",
    }:
        raise CodecError("a TensorDict arrived without its entries or batch size")
    entries, batch_size = dict(state["entries"]), state["batch_size"]
    for key in state.get("data", ()):
        entries[key] = NonTensorData(entries[key], batch_size=batch_size)
    device = None
    if state["has_device"]:
        found = map(_device_of_tensors, entries.values())
        device = next(filter(None, found), torch.device("cpu"))
    names = state["names"] if any(state["names"]) else None
    return TensorDict(entries, batch_size=batch_size, names=names, device=device)


def _device_of_tensors(value: Any) -> Any:
    """The device of an entry; None if no tensor is in it.

    What is nested and has none knows that it had a device, not where the others are.
    """
    import torch
    from tensordict import is_tensor_collection

    if isinstance(value, torch.Tensor):
        return value.device
    if is_tensor_collection(value) and any(True for _ in value.keys(True, True)):
        return value.device
    return None
