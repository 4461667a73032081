"""One cell of real work: two actors step CartPole, a learner trains on what they see.

Transitions travel one by one, and none may be lost; the network's weights travel back
as the newest only, so that an actor never waits and never falls behind.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch

import mq
from bench.peer import Metrics, Peer, Unusable
from bench.rows import percentiles
from bench.wire import connect

_BATCH = 256
_DISCOUNT = 0.98


def actor_learner(peer: Peer) -> Metrics | None:
    """Transitions per second at the learner, the age of the weights, losses."""
    try:
        import gymnasium
    except ImportError as error:
        raise Unusable("gymnasium is not installed: pip install gymnasium") from error
    with connect(peer) as queue:
        if peer.rank == 0:
            return _learn(peer, queue)
        _act(peer, queue, gymnasium.make("CartPole-v1"))
    return None


def _network() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
    )


def _act(peer: Peer, queue: mq.MQ, game: Any) -> None:
    queue.subscribe("weights", history=mq.keep_last(1), timeout=peer.remaining())
    queue.wait_for_subscribers("transition", 1, timeout=peer.remaining())
    network = _network()
    # The learner retains its first weights, so every actor starts with some.
    born = _follow(queue, network, peer.remaining())
    peer.meet()
    count, end = 0, time.monotonic() + peer.cell.budget
    state, _ = game.reset(seed=peer.rank)
    while time.monotonic() < end:
        born = _follow(queue, network, 0.0) or born
        action = _choose(network, state)
        after, reward, terminated, truncated, _ = game.step(action)
        transition = {
            "state": torch.from_numpy(state),
            "action": action,
            "reward": float(reward),
            "after": torch.from_numpy(after),
            "done": bool(terminated),
            "age": time.time() - born,
        }
        queue.publish("transition", transition, timeout=peer.remaining())
        count += 1
        state = game.reset()[0] if terminated or truncated else after
    queue.publish("transition", {"count": count}, timeout=peer.remaining())
    peer.meet()


def _follow(queue: mq.MQ, network: torch.nn.Sequential, timeout: float) -> float:
    """Take the newest weights, if there are any; when they were published, or 0."""
    born = 0.0
    try:
        while True:
            message = queue.recv(timeout=0.0 if born else timeout)
            network.load_state_dict(message.payload)
            born = message.published_at
    except mq.RecvTimeout:
        return born


def _choose(network: torch.nn.Sequential, state: Any) -> int:
    if random.random() < 0.1:
        return random.randrange(2)
    with torch.no_grad():
        return int(network(torch.from_numpy(state)).argmax())


def _learn(peer: Peer, queue: mq.MQ) -> Metrics:
    queue.subscribe("transition", timeout=peer.remaining())
    network = _network()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    queue.publish("weights", network.state_dict(), retain=True)
    peer.meet()
    start = time.monotonic()
    pending: list[dict[str, Any]] = []
    ages: list[float] = []
    counts: list[int] = []
    received = steps = 0
    while len(counts) < peer.spokes:
        seen = queue.recv(timeout=peer.remaining()).payload
        if "count" in seen:
            counts.append(seen["count"])
            continue
        received += 1
        ages.append(seen["age"] * 1000)
        pending.append(seen)
        if len(pending) == _BATCH:
            _train(network, optimizer, pending)
            queue.publish("weights", network.state_dict(), retain=True)
            pending.clear()
            steps += 1
    seconds = time.monotonic() - start
    peer.meet()
    age = percentiles(ages)
    return {
        "value": received / seconds,
        "lost": float(sum(counts) - received),
        "sent": float(sum(counts)),
        "weights_age_ms": age["p50"],
        "weights_age_p99_ms": age["p99"],
        "training_steps": float(steps),
    }


def _train(
    network: torch.nn.Sequential,
    optimizer: torch.optim.Optimizer,
    transitions: list[dict[str, Any]],
) -> None:
    """One step of Q-learning."""
    states, afters = (
        torch.stack([one[key] for one in transitions]) for key in ("state", "after")
    )
    rewards = torch.tensor([one["reward"] for one in transitions])
    going_on = torch.tensor([float(not one["done"]) for one in transitions])
    actions = torch.tensor([[one["action"]] for one in transitions])
    with torch.no_grad():
        target = rewards + _DISCOUNT * going_on * network(afters).amax(1)
    value = network(states).gather(1, actions)[:, 0]
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(value, target).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
