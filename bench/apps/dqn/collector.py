"""A collector: plays by the newest weights and publishes what it saw."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import mq
from bench.apps.dqn import games, network
from bench.apps.dqn.replay import NStep, Transition, pack
from bench.apps.dqn.task import Task

TRANSITIONS, WEIGHTS = "transitions", "weights"


class Policy:
    """The newest weights that came, and how much to explore with them.

    Attributes:
        version: Iterations of the learner that the weights have seen; -1: none yet.
        born: When they were published, in Unix seconds.
        stop: Whether the learner needs no more transitions.
    """

    def __init__(self, task: Task, game: games.Game, index: int) -> None:
        self._task = task
        self._index = index
        self._actions = game.actions
        self._network = network.make(game.shape, game.actions, task.seed)
        self._random = np.random.default_rng()
        self._epsilon = 1.0
        self.version = -1
        self.born = 0.0
        self.stop = False

    def follow(self, message: mq.Message) -> None:
        """Take over the weights of a message."""
        payload = message.payload
        if self.version < 0:
            # A collector that is started again shall not play the same games again.
            seed = [self._task.seed, self._index, payload["version"]]
            self._random = np.random.default_rng(seed)
        self._network.load_state_dict(payload["weights"])
        self._epsilon = payload["epsilon"]
        self.version, self.stop = payload["version"], payload["stop"]
        self.born = message.published_at

    def act(self, observation: npt.NDArray[Any]) -> int:
        """An action for an observation."""
        if self._random.random() < self._epsilon:
            return int(self._random.integers(self._actions))
        with torch.no_grad():
            values = self._network(torch.from_numpy(observation)[None])
        return int(values.argmax())

    def seed(self) -> int:
        """A seed for the game."""
        return int(self._random.integers(1 << 31))


class Player:
    """Plays on and on; an episode may span several chunks."""

    def __init__(self, task: Task, game: games.Game, policy: Policy) -> None:
        self._task = task
        self._game = game
        self._policy = policy
        self._steps = NStep(task.n_step, task.discount)
        self._observation = game.reset(policy.seed())
        self._return = 0.0
        self._kept: list[Transition] = []

    def chunk(self) -> dict[str, Any]:
        """Play `Task.chunk` steps; what the learner is told of them."""
        returns = []
        for _ in range(self._task.chunk):
            action = self._policy.act(self._observation)
            step = self._game.step(action)
            self._kept += self._steps.add(self._observation, action, step)
            self._observation = step.observation
            self._return += step.reward
            if step.terminated or step.truncated:
                returns.append(self._return)
                self._return = 0.0
                self._observation = self._game.reset()
        kept, self._kept = self._kept, []
        return {
            "rows": pack(kept) if kept else None,
            "steps": self._task.chunk,
            "returns": returns,
            "version": self._policy.version,
            "age": time.time() - self._policy.born,
        }


def collect(queue: mq.MQ, task: Task, index: int) -> None:
    """Play until the learner says stop.

    Args:
        index: Which of the task's collectors this is, from 0 on.

    Raises:
        mq.MembersTimeout, mq.RecvTimeout: There is no learner, or none any more.
    """
    game = games.make(task.game)
    queue.subscribe(WEIGHTS, history=mq.keep_last(1), timeout=task.patience)
    queue.wait_for_subscribers(TRANSITIONS, 1, timeout=task.patience)
    policy = Policy(task, game, index)
    policy.follow(queue.recv(timeout=task.patience))  # the learner retains its weights
    player = Player(task, game, policy)
    while not policy.stop:
        chunk = player.chunk() | {"collector": index, "last": False}
        queue.publish(TRANSITIONS, chunk, timeout=task.patience)
        if not queue.subscribers(TRANSITIONS):
            queue.wait_for_subscribers(TRANSITIONS, 1, timeout=task.patience)
        _next_weights(queue, task, policy)
    game.close()
    last = {"collector": index, "last": True}
    queue.publish(TRANSITIONS, last, timeout=task.patience)


def _next_weights(queue: mq.MQ, task: Task, policy: Policy) -> None:
    """In step wait for newer weights; else take them if they are there."""
    if task.in_step:
        version = policy.version
        while policy.version == version and not policy.stop:
            policy.follow(queue.recv(timeout=task.patience))
        return
    try:
        policy.follow(queue.recv(timeout=0))
    except mq.RecvTimeout:
        return
