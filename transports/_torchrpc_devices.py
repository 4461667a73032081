"""Which GPU of a peer a tensor on one of our GPUs goes to.

Pure logic on numbers: nothing here asks torch. A map is given as a mapping
``{peer: {local: remote}}`` or as text, ``<peer>_<local GPU>_<peer's GPU>`` with commas
in between; for a peer that it does not name every GPU goes to the one of the same
index. TensorPipe allows each GPU of a peer once only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Final

from transports._torchrpc_aliases import Pairs

DeviceMap = dict[str, dict[int, int]]
"""By peer: its GPU for each of ours."""

LIVES: Final = 4
"""Peers of one name that a process may know at a time, most of them gone."""

_BYTES: Final = (bytes, bytearray, memoryview)
"""Sequences of numbers, but not of numbers of GPUs."""

_DEVICE = re.compile(r"(?:cuda:)?(\d{1,4})")


def triple(peer: str, local: int, remote: int) -> str:
    """An entry of a map as text."""
    return f"{peer}_{local}_{remote}"


def parse(given: object) -> DeviceMap:
    """A device map from what a user gave; None: an empty one.

    Raises:
        ValueError, TypeError: It is malformed; names the entry.
    """
    if given is None:
        return {}
    if isinstance(given, str):
        entries = list(_parse_text(given))
    elif isinstance(given, Mapping):
        entries = list(_parse_mapping(given))
    else:
        raise TypeError(
            "device_map is {peer: {local GPU: peer's GPU}} or text such as "
            f"'1_0_1,2_0_2', not {type(given).__name__}"
        )
    # A mapping may name a peer that is to get nothing from GPU to GPU.
    found: DeviceMap = (
        {_peer(key): {} for key in given} if isinstance(given, Mapping) else {}
    )
    for peer, local, remote in entries:
        pairs = found.setdefault(peer, {})
        text = triple(peer, local, remote)
        if pairs.get(local, remote) != remote:
            raise ValueError(
                f"device map {text}: {triple(peer, local, pairs[local])} is there "
                "already; a GPU goes to one GPU of each peer"
            )
        twin = next((a for a, b in pairs.items() if b == remote and a != local), None)
        if twin is not None:
            raise ValueError(
                f"device map {text}: {triple(peer, twin, remote)} is there already; "
                "TensorPipe sends to each GPU of a peer from one GPU only"
            )
        pairs[local] = remote
    return found


def _parse_text(text: str) -> Iterable[tuple[str, int, int]]:
    for entry in text.split(",") if text.strip() else ():
        peer, *numbers = entry.strip().rsplit("_", 2)
        if not peer or len(numbers) != 2 or not all(n.isdecimal() for n in numbers):
            raise ValueError(
                f"device map {entry.strip()!r} is not of the form "
                "<peer>_<local GPU>_<peer's GPU>, such as 1_0_1"
            )
        yield peer, int(numbers[0]), int(numbers[1])


def _parse_mapping(given: Mapping[object, object]) -> Iterable[tuple[str, int, int]]:
    for peer, pairs in given.items():
        if not isinstance(pairs, Mapping):
            raise TypeError(
                f"device_map[{peer!r}] is {{local GPU: peer's GPU}}, not {pairs!r}"
            )
        for local, remote in pairs.items():
            yield _peer(peer), device(local), device(remote)


def _peer(key: object) -> str:
    """What a mapping calls a peer: its name, or its rank.

    Raises:
        TypeError, ValueError: It is neither.
    """
    if isinstance(key, bool) or not isinstance(key, str | Integral):
        raise TypeError(f"device_map names a peer {key!r}: write a name or a rank")
    name = key if isinstance(key, str) else str(int(key))
    if not name:
        raise ValueError("device_map names a peer without a name")
    return name


def device(given: object) -> int:
    """The index of a GPU given as 1, "1", "cuda:1" or a torch device.

    Raises:
        ValueError: It is none of these.
    """
    match = _DEVICE.fullmatch(str(given))
    if match is None or isinstance(given, bool):
        raise ValueError(f"{given!r} is no GPU: write 0, '0' or 'cuda:0'")
    return int(match[1])


def chosen(given: object) -> tuple[int, ...] | None:
    """`local_devices` as a user gave it: one GPU, several, or text; None: all.

    Raises:
        TypeError, ValueError: It is none of these.
    """
    if given is None:
        return None
    if _DEVICE.fullmatch(str(given)):  # a number, text, or a device of torch's
        given = [given]
    elif isinstance(given, str):
        given = given.split(",") if given.strip() else []
    elif not isinstance(given, Sequence) or isinstance(given, _BYTES):
        raise TypeError(f"local_devices is GPUs, as in [0, 1] or '0,1', not {given!r}")
    try:
        return tuple(device(str(item).strip()) for item in given)
    except ValueError as error:
        raise ValueError(f"local_devices={given!r}: {error}") from None


def local_devices(found: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """The GPUs of this process that take part; None: all that it sees.

    Raises:
        ValueError: One does not exist, or is there twice.
    """
    if found is None:
        return tuple(range(count))
    for index in found:
        if index >= count:
            raise ValueError(f"local_devices names GPU {index}, but {_there(count)}")
    if len(set(found)) < len(found):
        raise ValueError(f"local_devices={list(found)} names a GPU twice")
    return tuple(found)


def check_local(wanted: DeviceMap, local: Sequence[int], count: int) -> None:
    """Refuse a map that starts at a GPU which this process does not use.

    Raises:
        ValueError: Names the entry.
    """
    for peer, pairs in wanted.items():
        for ours, theirs in pairs.items():
            text = triple(peer, ours, theirs)
            if ours >= count:
                raise ValueError(f"device map {text}: no GPU {ours}: {_there(count)}")
            if ours not in local:
                raise ValueError(
                    f"device map {text}: GPU {ours} is not among "
                    f"local_devices={list(local)}"
                )


def check_ranks(wanted: DeviceMap, world_size: int) -> None:
    """Refuse a map that names a rank which the launcher has not started.

    Raises:
        ValueError: Names the entry.
    """
    for peer, pairs in wanted.items():
        if peer.isdecimal() and int(peer) >= world_size:
            entry = describe({peer: pairs}).partition(",")[0] or repr({peer: pairs})
            raise ValueError(
                f"device map {entry}: no member is {peer!r}: WORLD_SIZE is "
                f"{world_size}, so they are 0 to {world_size - 1}"
            )


def declared(wanted: DeviceMap, peer: str, local: Sequence[int]) -> Pairs:
    """The map that TensorPipe is to have for a peer, whatever GPUs that has."""
    pairs = wanted.get(peer)
    if pairs is None:
        pairs = {index: index for index in local}
    return tuple(sorted(pairs.items()))


def all_declared(
    wanted: DeviceMap, local: Sequence[int], others: int
) -> tuple[tuple[Pairs, int], ...]:
    """All maps that peers may need, and how many peers of each there may be.

    Args:
        others: How many peers there may be that `wanted` does not name.
    """
    found = {declared({}, "", local): others}
    for peer in wanted:
        pairs = declared(wanted, peer, local)
        found[pairs] = found.get(pairs, 0) + LIVES
    return tuple((pairs, count) for pairs, count in found.items() if pairs)


def entry(wanted: DeviceMap, member: str, rank: str) -> str:
    """By which of its names a map knows a peer, of those that the peer goes by."""
    found = next((name for name in (member, rank) if name in wanted), "")
    return found or member or rank


def resolve(
    wanted: DeviceMap,
    peer: str,
    local: Sequence[int],
    remote_count: int,
    remote: Sequence[int] | None = None,
) -> dict[int, int]:
    """The GPU of a peer for each of ours, once the peer has said what it has.

    Args:
        remote_count: How many GPUs the peer has.
        remote: Those of them that take part; None: all.

    Raises:
        ValueError: The map names a GPU that the peer does not have; names the entry.
    """
    pairs = wanted.get(peer)
    there = range(remote_count) if remote is None else remote
    if pairs is None:
        return {index: index for index in local if index in there}
    for ours, theirs in pairs.items():
        if theirs >= remote_count:
            raise ValueError(
                f"device map {triple(peer, ours, theirs)}: member {peer!r} has no GPU "
                f"{theirs}: {_there(remote_count)} there"
            )
        if theirs not in there:
            raise ValueError(
                f"device map {triple(peer, ours, theirs)}: GPU {theirs} of member "
                f"{peer!r} is not among its local_devices={list(there)}"
            )
    return dict(pairs)


def describe(resolved: Mapping[str, Mapping[int, int]]) -> str:
    """A resolved map as the text that `parse` reads."""
    return ",".join(
        triple(peer, ours, theirs)
        for peer, pairs in sorted(resolved.items())
        for ours, theirs in sorted(pairs.items())
    )


def _there(count: int) -> str:
    if count == 0:
        return "there is no CUDA device"
    return f"there are {count}, 0 to {count - 1}" if count > 1 else "there is one, 0"
