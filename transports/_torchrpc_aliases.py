"""Names for peers that are still to come, each with its device map.

TensorPipe's device maps are keyed by a peer's name and fixed when the agent starts. But
such a name is of this process alone. So names are declared beforehand for every map
that may be asked for, and each peer gets one of them when it comes.

TensorPipe copies all declared maps at every call, about 0.1 us each (measured with
torch 2.13): so there are as many names as peers at a time, and they are used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

Pairs = tuple[tuple[int, int], ...]
"""A device map: a GPU of this process, and that of the peer."""


class Aliases:
    """The declared names, and which are free.

    Args:
        maps: Device maps, and how many peers there may be of each at a time.
    """

    def __init__(self, maps: Iterable[tuple[Pairs, int]]) -> None:
        self._free: dict[Pairs, deque[str]] = {}
        self._maps: dict[str, Pairs] = {}
        for number, (pairs, count) in enumerate(maps):
            names = [f"gpu-{number}-{n}" for n in range(count)]
            self._free[pairs] = deque(names)
            self._maps.update(dict.fromkeys(names, pairs))

    def declared(self) -> dict[str, dict[str, str]]:
        """For TensorPipe: the map of each name."""
        return {
            name: {f"cuda:{ours}": f"cuda:{theirs}" for ours, theirs in pairs}
            for name, pairs in self._maps.items()
        }

    def take(self, pairs: Pairs) -> str:
        """A free name with this map; "" where there is none."""
        names = self._free.get(pairs)
        return names.popleft() if names else ""

    def give_back(self, name: str) -> None:
        """The peer of this name is forgotten."""
        self._free[self._maps[name]].append(name)
