"""The learner's side of the queue: what it takes, when it learns, what it reports."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import mq
from bench.apps.dqn.collector import TRANSITIONS, WEIGHTS
from bench.apps.dqn.learner import Learner
from bench.apps.dqn.task import Task
from bench.rows import percentiles

_LOOK = 0.2  # seconds that a wait lasts at most, so that `Tick` is called
_BEHIND = 4  # chunks of every collector that the learner may owe iterations for


class Ledger:
    """Which messages of the collectors came, so that a missing one is noticed.

    Args:
        whole: Whether every collector began after the learner had subscribed.
    """

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._next: dict[tuple[str, str], int] = {}
        self._told: Counter[str] = Counter()
        self.lost = 0

    def miss(self, error: mq.MessagesLost) -> None:
        """Take down what `recv` says was lost; it shows as a gap later, if at all."""
        self._told[error.sender] += error.count
        self.lost += error.count

    def take(self, message: mq.Message) -> None:
        """Take down a message."""
        key = (message.sender, message.incarnation)
        expected = self._next.get(key, 0 if self._whole else message.sequence)
        missing = message.sequence - expected
        told = min(missing, self._told[message.sender])
        self._told[message.sender] -= told
        self.lost += missing - told
        self._next[key] = message.sequence + 1


@dataclass
class Summary:
    """What a training was like, on the learner's side.

    Attributes:
        seconds: From the first iteration to the last.
        iterations: In these seconds.
        steps: Of the game, in these seconds.
        idle: Seconds in which the learner had to wait for transitions.
        transport: Seconds in `publish` and in `recv` calls that had not to wait.
        ages: Seconds since the weights were published that each chunk ended with.
        lost: Messages of collectors that did not arrive.
        reached: Steps by which the goal was reached; None: it was not.
        best: The highest mean return of 100 episodes.
        senders: Every incarnation of a collector that was heard of.
    """

    seconds: float = 0.0
    iterations: int = 0
    steps: int = 0
    idle: float = 0.0
    transport: float = 0.0
    ages: list[float] = field(default_factory=list)
    lost: int = 0
    reached: int | None = None
    best: float | None = None
    senders: set[tuple[str, str]] = field(default_factory=set)

    def figures(self) -> dict[str, float]:
        """What is reported, by name; "value" is seconds per 100 iterations.

        Raises:
            ValueError: There was no iteration.
        """
        if not self.iterations:
            raise ValueError("nothing was learnt: no step was left for an iteration")
        ages = percentiles(age * 1000 for age in self.ages)
        found = {
            "value": 100 * self.seconds / self.iterations,
            "seconds": self.seconds,
            "steps_per_s": self.steps / self.seconds,
            "idle_share": self.idle / self.seconds,
            "transport_share": self.transport / self.seconds,
            "weights_age_ms": ages["p50"],
            "weights_age_p99_ms": ages["p99"],
            "lost": float(self.lost),
        }
        if self.best is not None:
            found["best"] = self.best
        if self.reached is not None:
            found["reached"] = float(self.reached)
        return found


class Training:
    """A learner on a queue.

    Args:
        tick: Called again and again, at least every second.
        resumed: Whether the learner has gone on from a checkpoint, so that collectors
            may be there already.

    Attributes:
        learner: What is trained.
        summary: What it was like so far.
    """

    def __init__(
        self,
        queue: mq.MQ,
        task: Task,
        learner: Learner,
        tick: Tick = lambda _: None,
        resumed: bool = False,
    ) -> None:
        self._queue = queue
        self._task = task
        self.learner = learner
        self._tick = tick
        self._ledger = Ledger(not resumed)
        self._ended: set[tuple[str, str]] = set()
        self._version = learner.iteration
        self._heard = time.monotonic()
        self._started: float | None = None
        self._stopped = False
        self._begin = (0, 0)
        self.summary = Summary()

    def run(self) -> Summary:
        """Train to the task's end, then let the collectors finish.

        Raises:
            mq.RecvTimeout: No collector has sent anything for `Task.patience` seconds.
        """
        depth = max(2, _BEHIND // 2) * self._task.collectors
        self._queue.subscribe(TRANSITIONS, depth=depth, timeout=self._task.patience)
        self._publish()
        if self._task.in_step:
            self._in_step()
        else:
            self._freely()
        self._count()
        self._publish(stop=True)
        self._drain()
        self.summary.lost = self._ledger.lost
        return self.summary

    def stop(self) -> None:
        """End training soon, as if the task were done; for `tick`."""
        self._stopped = True

    def _freely(self) -> None:
        learner, task = self.learner, self._task
        most = int(_BEHIND * task.collectors * task.chunk * task.ratio) + 1
        while not self._over():
            owed = learner.owed()
            if owed < most:
                chunk = self._take(0.0 if owed > 0 else _LOOK)
                if chunk is not None:
                    learner.take(chunk)
                    continue
            if owed > 0:
                self._learn()
            self._tick(self)

    def _in_step(self) -> None:
        """Take turns: one chunk of every collector, then all iterations owed."""
        learner, task = self.learner, self._task
        while not self._over():
            chunks: dict[int, dict[str, Any]] = {}
            while len(chunks) < task.collectors:
                chunk = self._take(_LOOK)
                self._tick(self)
                if chunk is not None and chunk["version"] == self._version:
                    chunks.setdefault(chunk["collector"], chunk)
            for _, chunk in sorted(chunks.items()):
                learner.take(chunk)
            while learner.owed() > 0:
                self._learn(publish=False)
            self._version += 1
            self._publish()

    def _over(self) -> bool:
        learner, task, summary = self.learner, self._task, self.summary
        mean = learner.mean_return()
        if mean is not None:
            summary.best = max(mean, summary.best or mean)
            if task.goal is not None and mean >= task.goal and not summary.reached:
                summary.reached = learner.steps
        enough = task.iterations is not None and learner.iteration >= task.iterations
        done = self._stopped or enough or bool(summary.reached)
        return done or learner.steps >= task.steps

    def _learn(self, publish: bool = True) -> None:
        learner = self.learner
        if self._started is None:
            self._started = time.monotonic()
            self._begin = (learner.iteration, learner.steps)
            self.summary.idle = self.summary.transport = 0.0
        learner.learn()
        if publish and learner.iteration % self._task.weights_every == 0:
            self._version = learner.iteration
            self._publish()

    def _publish(self, stop: bool = False) -> None:
        begin = time.monotonic()
        policy = self.learner.policy(self._version, stop)
        self._queue.publish(WEIGHTS, policy, retain=True)
        self.summary.transport += time.monotonic() - begin

    def _take(self, timeout: float) -> dict[str, Any] | None:
        """A chunk; None if there is none, or if it was a collector's last word.

        Raises:
            mq.RecvTimeout: No collector has sent anything for too long.
        """
        begin = time.monotonic()
        try:
            message = self._queue.recv(timeout=timeout)
        except mq.RecvTimeout:
            self.summary.idle += time.monotonic() - begin
            patience = self._task.patience
            if time.monotonic() - self._heard <= patience:
                return None
            raise mq.RecvTimeout(
                f"no collector sent anything for {patience:g} s: see what ended them, "
                f"or start {self._task.collectors} in this group and over this backend"
            ) from None
        except mq.MessagesLost as error:
            self._ledger.miss(error)
            return None
        self._heard = time.monotonic()
        if timeout:
            self.summary.idle += self._heard - begin
        else:
            self.summary.transport += self._heard - begin
        return self._open(message)

    def _open(self, message: mq.Message) -> dict[str, Any] | None:
        self._ledger.take(message)
        sender = (message.sender, message.incarnation)
        self.summary.senders.add(sender)
        chunk: dict[str, Any] = message.payload
        if chunk["last"]:
            self._ended.add(sender)
            return None
        self.summary.ages.append(chunk["age"])
        return chunk

    def _count(self) -> None:
        if self._started is None:
            return
        iterations, steps = self._begin
        self.summary.seconds = time.monotonic() - self._started
        self.summary.iterations = self.learner.iteration - iterations
        self.summary.steps = self.learner.steps - steps

    def _drain(self) -> None:
        """Take what is still on its way, until every collector said its last word."""
        self._heard = time.monotonic()
        while True:
            self._tick(self)
            chunk = self._take(_LOOK)
            if chunk is not None:
                self.learner.take(chunk)
                continue
            ended = {name for name, _ in self._ended}
            if ended.issuperset(self._queue.subscribers(WEIGHTS)):
                return


Tick: TypeAlias = Callable[[Training], None]
"""What a training calls, so that others see how far it is."""
