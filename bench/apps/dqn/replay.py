"""Transitions: n-step returns at the collectors, replay at the learner."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bench.apps.dqn.games import Step

_SHARPNESS = 0.6  # how much a priority follows the error
_FLOOR = 1e-3  # so that nothing is never drawn


class Transition(NamedTuple):
    """What one action was worth, as far as it was seen.

    Attributes:
        reward: Of n steps, discounted, added up.
        after: The observation n steps later, or the last one of the episode.
        discount: Of the estimate for `after`; 0 where the episode ended for good.
    """

    observation: npt.NDArray[Any]
    action: int
    reward: float
    after: npt.NDArray[Any]
    discount: float


class NStep:
    """Turns steps into transitions."""

    def __init__(self, n: int, discount: float) -> None:
        self._n = n
        self._discount = discount
        self._window: deque[tuple[npt.NDArray[Any], int, float]] = deque()

    def add(
        self, observation: npt.NDArray[Any], action: int, step: Step
    ) -> Iterator[Transition]:
        """The transitions that are complete after this step."""
        self._window.append((observation, action, step.reward))
        ended = step.terminated or step.truncated
        while self._window and (ended or len(self._window) == self._n):
            reward = 0.0
            for _, _, one in reversed(self._window):
                reward = one + self._discount * reward
            discount = 0.0
            if not step.terminated:
                discount = self._discount ** len(self._window)
            seen, taken, _ = self._window.popleft()
            yield Transition(seen, taken, reward, step.observation, discount)


def pack(transitions: list[Transition]) -> dict[str, Tensor]:
    """Transitions as tensors, one row each."""
    columns: dict[str, Any] = {
        "observation": np.stack([one.observation for one in transitions]),
        "action": np.array([one.action for one in transitions], np.int64),
        "reward": np.array([one.reward for one in transitions], np.float32),
        "after": np.stack([one.after for one in transitions]),
        "discount": np.array([one.discount for one in transitions], np.float32),
    }
    return {name: torch.from_numpy(column) for name, column in columns.items()}


class Batch(NamedTuple):
    """What one iteration learns from.

    Attributes:
        rows: By name as `pack` makes them.
        places: Where they are in the replay.
        weights: By which each row's loss counts; 1 unless prioritised.
    """

    rows: dict[str, Tensor]
    places: npt.NDArray[np.int64]
    weights: Tensor


class Replay:
    """The newest transitions, drawn at random.

    Args:
        prioritized: Whether the last error of a transition decides how often it is
            drawn; the loss then counts less what is drawn more.
        correction: By how much it counts less, from 0 to 1.
    """

    def __init__(
        self, capacity: int, seed: int, prioritized: bool, correction: float = 0.4
    ) -> None:
        self._capacity = capacity
        self._random = np.random.default_rng(seed)
        self._columns: dict[str, Tensor] = {}
        self._next = 0
        self._size = 0
        self._correction = correction
        self._tree = SumTree(capacity) if prioritized else None
        self._highest = 1.0

    def __len__(self) -> int:
        return self._size

    def add(self, rows: dict[str, Tensor]) -> None:
        """Take in rows as `pack` makes them; the oldest make room.

        Raises:
            ValueError: There are more than fit.
        """
        count = len(rows["action"])
        if count > self._capacity:
            raise ValueError(f"{count} transitions for a replay of {self._capacity}")
        places = (self._next + np.arange(count)) % self._capacity
        where = torch.from_numpy(places)
        for name, column in rows.items():
            if name not in self._columns:
                shape = (self._capacity, *column.shape[1:])
                self._columns[name] = torch.zeros(shape, dtype=column.dtype)
            self._columns[name][where] = column
        if self._tree is not None:
            self._tree.set(places, np.full(count, self._highest))
        self._next = (self._next + count) % self._capacity
        self._size = min(self._size + count, self._capacity)

    def sample(self, count: int) -> Batch:
        """Draw transitions, some perhaps twice."""
        if self._tree is None:
            places = self._random.integers(self._size, size=count)
            weights: npt.NDArray[Any] = np.ones(count)
        else:
            places, shares = self._tree.draw(self._random.random(count))
            weights = (self._size * shares) ** -self._correction
            weights /= weights.max()
        where = torch.from_numpy(places)
        rows = {name: column[where] for name, column in self._columns.items()}
        return Batch(rows, places, torch.from_numpy(weights.astype(np.float32)))

    def learnt(self, batch: Batch, errors: Tensor) -> None:
        """Remember how wrong the estimates for a batch were."""
        if self._tree is None:
            return
        priorities = (errors.abs().double().numpy() + _FLOOR) ** _SHARPNESS
        self._tree.set(batch.places, priorities)
        self._highest = max(self._highest, float(priorities.max()))

    def state(self) -> dict[str, Any]:
        """Everything, for a checkpoint."""
        return {
            "columns": {n: c[: self._size] for n, c in self._columns.items()},
            "next": self._next,
            "random": self._random.bit_generator.state,
            "highest": self._highest,
            "priorities": None
            if self._tree is None
            else torch.from_numpy(self._tree.get(np.arange(self._size))),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a `state` of a replay of the same capacity."""
        self._next, self._size = 0, 0
        self.add(state["columns"]) if state["columns"] else None
        self._next, self._highest = state["next"], state["highest"]
        self._random.bit_generator.state = state["random"]
        if self._tree is not None and state["priorities"] is not None:
            self._tree.set(np.arange(self._size), state["priorities"].numpy())


class SumTree:
    """Numbers that can be drawn in proportion to their size, in log(n) steps."""

    def __init__(self, capacity: int) -> None:
        self._leaves = 1 << max(1, (capacity - 1).bit_length())
        self._nodes = np.zeros(2 * self._leaves)

    def set(
        self, places: npt.NDArray[np.int64], values: npt.NDArray[np.float64]
    ) -> None:
        """Change some of the numbers."""
        nodes = places + self._leaves
        self._nodes[nodes] = values
        while nodes[0] > 1:
            nodes = np.unique(nodes // 2)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def get(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Some of the numbers."""
        return self._nodes[places + self._leaves]

    def draw(
        self, at: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Places, and their shares of the sum.

        Args:
            at: Where in the sum, from 0 to below 1.
        """
        nodes = np.ones(len(at), np.int64)
        rest = at * self._nodes[1]
        while nodes[0] < self._leaves:
            left = self._nodes[2 * nodes]
            # Never into an empty half, whatever rounding says.
            right = (rest >= left) & (self._nodes[2 * nodes + 1] > 0)
            rest = np.where(right, rest - left, rest)
            nodes = 2 * nodes + right
        return nodes - self._leaves, self._nodes[nodes] / self._nodes[1]
