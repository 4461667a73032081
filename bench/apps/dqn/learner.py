"""The learner: a replay, two networks, and what a checkpoint holds."""

from __future__ import annotations

import os
import pickle
import struct
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import smooth_l1_loss

from bench.apps.dqn import games, network
from bench.apps.dqn.replay import Replay
from bench.apps.dqn.task import Task

_EPISODES = 100
_LARGEST_GRADIENT = 10.0
_KEYS = {"game", "online", "target", "optimizer", "replay"}
_KEYS |= {"iteration", "steps", "returns"}
# What torch.load and `load_state_dict` raise for a file that is none of ours.
_ODD = (
    *(AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError),
    *(ValueError, struct.error, pickle.UnpicklingError),
)


class Learner:
    """Double DQN with a target network.

    Attributes:
        online: The network that learns, and that collectors play by.
        target: The one that estimates what follows: a copy of `online`, renewed every
            `Task.target_every` iterations.
        iteration: How many batches it has learnt from.
        steps: Steps of the game that it was told of.
        returns: Of each finished episode: `steps` by then, and the return.
    """

    def __init__(self, task: Task) -> None:
        game = games.make(task.game)
        game.close()
        self._task = task
        self.online = network.make(game.shape, game.actions, task.seed)
        self.target = network.make(game.shape, game.actions, task.seed)
        self.optimizer = torch.optim.Adam(self.online.parameters(), task.rate)
        self.replay = Replay(task.replay, task.seed, task.prioritized)
        self.iteration = 0
        self.steps = 0
        self.returns: list[tuple[int, float]] = []
        self._last: deque[float] = deque(maxlen=_EPISODES)

    def take(self, chunk: dict[str, Any]) -> None:
        """Take in a collector's chunk."""
        self.steps += chunk["steps"]
        if chunk["rows"] is not None:
            self.replay.add(chunk["rows"])
        self._last.extend(chunk["returns"])
        self.returns += [(self.steps, one) for one in chunk["returns"]]

    def owed(self) -> int:
        """Iterations that may be made with what there is."""
        return self._task.owed(self.steps, self.iteration) if len(self.replay) else 0

    def mean_return(self) -> float | None:
        """Of the last 100 episodes; None before that many."""
        if len(self._last) < _EPISODES:
            return None
        return sum(self._last) / _EPISODES

    def learn(self) -> None:
        """One iteration."""
        batch = self.replay.sample(self._task.batch)
        rows = batch.rows
        with torch.no_grad():
            best = self.online(rows["after"]).argmax(1, keepdim=True)
            after = self.target(rows["after"]).gather(1, best)[:, 0]
            wanted = rows["reward"] + rows["discount"] * after
        values = self.online(rows["observation"]).gather(1, rows["action"][:, None])
        errors = wanted - values[:, 0].detach()
        losses = smooth_l1_loss(values[:, 0], wanted, reduction="none")
        self.optimizer.zero_grad()
        (batch.weights * losses).mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.online.parameters(), _LARGEST_GRADIENT)
        self.optimizer.step()
        self.replay.learnt(batch, errors)
        self.iteration += 1
        if self.iteration % self._task.target_every == 0:
            self.target.load_state_dict(self.online.state_dict())

    def policy(self, version: int, stop: bool = False) -> dict[str, Any]:
        """What the collectors are told."""
        return {
            "version": version,
            "epsilon": self._task.epsilon(self.steps),
            "stop": stop,
            "weights": dict(self.online.state_dict()),
        }

    def save(self, path: Path) -> None:
        """Write a checkpoint; cut short, it leaves the one before."""
        state = {
            "game": self._task.game,
            "online": self.online.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "replay": self.replay.state(),
            "iteration": self.iteration,
            "steps": self.steps,
            "returns": self.returns,
        }
        beside = path.with_name(f"{path.name}.part")
        torch.save(state, beside)
        os.replace(beside, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            OSError: There is none.
            ValueError: It is damaged, no checkpoint of ours, or one of another game.
        """
        state = _read(path)
        if state["game"] != self._task.game:
            raise ValueError(
                f"{path} is about {state['game']}, not about {self._task.game}"
            )
        try:
            self.online.load_state_dict(state["online"])
            self.target.load_state_dict(state["target"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.replay.load(state["replay"])
        except _ODD as error:
            raise ValueError(f"{path} does not fit: {error}") from error
        self.iteration, self.steps = state["iteration"], state["steps"]
        self.returns = [(int(at), float(one)) for at, one in state["returns"]]
        self._last.extend(one for _, one in self.returns)


def _read(path: Path) -> dict[str, Any]:
    """What `Learner.save` has written."""
    said = (
        f"{path} is damaged or no checkpoint of this program: give a file that "
        "--checkpoint has written, or begin anew with another, without --resume"
    )
    with path.open("rb") as file:
        try:
            state = torch.load(file, weights_only=True)
        except _ODD as error:
            raise ValueError(said) from error
    if not isinstance(state, dict) or set(state) != _KEYS:
        raise ValueError(said)
    return state
