"""What is trained: every number of the distributed DQN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

CARTPOLE, PONG = "CartPole-v1", "ALE/Pong-v5"


@dataclass(frozen=True)
class Task:
    """A game and how to learn it.

    Attributes:
        game: As gymnasium calls it.
        collectors: How many processes play.
        steps: Of all collectors together, after which training ends.
        iterations: Of the learner, after which training ends; None: `steps` only.
        goal: Mean return of the last 100 episodes at which training ends, or None.
        batch: Transitions per iteration of the learner.
        ratio: Iterations per step of the game: the learner waits when it is ahead, and
            takes no more transitions, so that the collectors wait, when it is behind.
        n_step: Rewards that are added up before the network's estimate.
        replay: Transitions kept.
        prioritized: Whether large errors are drawn more often; else all alike.
        warmup: Steps before the first iteration.
        target_every: Iterations after which the target network is renewed.
        weights_every: Iterations after which the collectors get new weights.
        chunk: Steps per message of a collector.
        explore: Steps over which the share of random actions falls from 1 to `least`.
        in_step: Whether learner and collectors take turns, so that the result depends
            on the seed alone; else each goes as fast as it can.
        patience: Seconds that a member waits for the others.
    """

    game: str = CARTPOLE
    collectors: int = 2
    seed: int = 0
    steps: int = 300_000
    iterations: int | None = None
    goal: float | None = None
    batch: int = 64
    rate: float = 5e-4
    discount: float = 0.99
    ratio: float = 0.25
    n_step: int = 3
    replay: int = 50_000
    prioritized: bool = False
    warmup: int = 1000
    target_every: int = 200
    weights_every: int = 10
    chunk: int = 32
    explore: int = 20_000
    least: float = 0.01
    in_step: bool = False
    patience: float = 60.0

    def __post_init__(self) -> None:
        if min(self.collectors, self.batch, self.n_step, self.chunk) < 1:
            raise ValueError(
                "collectors, batch, n_step and chunk must each be 1 or more"
            )
        if self.replay < max(self.batch, self.warmup):
            raise ValueError(
                f"a replay of {self.replay} holds neither a batch of {self.batch} nor "
                f"the {self.warmup} steps before the first iteration: make it larger"
            )

    def epsilon(self, steps: int) -> float:
        """The share of random actions after so many steps."""
        return max(self.least, 1.0 - (1.0 - self.least) * steps / self.explore)

    def owed(self, steps: int, iterations: int) -> int:
        """Iterations that may be made after so many steps and iterations."""
        if steps < self.warmup:
            return 0
        return int(self.ratio * (steps - self.warmup)) + 1 - iterations


def preset(game: str, **changes: Any) -> Task:
    """A task that suits a game.

    Args:
        changes: Attributes of `Task` to set otherwise.
    """
    if game.startswith("ALE/"):
        task = Task(
            game,
            steps=2_000_000,
            batch=32,
            rate=1e-4,
            replay=10_000,
            target_every=1000,
            explore=100_000,
        )
        return replace(task, **changes)
    return Task(game, **changes)
