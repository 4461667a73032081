"""Two linear shards in two processes; activations and gradients go over mq.

The near process owns the first shard and the loss, the far one the second shard. A pass
is four messages: activations there, outputs back, their gradient there, the gradient of
the activations back: what distributed autograd sends on bare RPC.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.apps import placing
from bench.apps.seeding import initialize
from bench.apps.timing import Timed

TO_FAR, TO_NEAR = "to-far", "to-near"


@dataclass(frozen=True)
class Task:
    """What is computed, and where.

    Attributes:
        width: Of each linear shard, in and out.
        rows: Of the input.
        passes: Forward and backward passes.
        device: "cpu" or "cuda".
        direct: Whether tensors are published where they are; else they are copied to
            host memory before, and to the device afterwards.
    """

    width: int = 1000
    rows: int = 1000
    passes: int = 10
    seed: int = 0
    device: str = "cpu"
    direct: bool = False

    def shard(self, place: int) -> nn.Linear:
        """The near (0) or far (1) shard, with weights that depend on the seed alone."""
        shard = nn.Linear(self.width, self.width)
        initialize(shard, self.seed + place)
        return shard.to(self.place(place))

    def inputs(self) -> Tensor:
        """The input of every pass, (rows, width)."""
        random = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(self.rows, self.width, generator=random)
        return drawn.to(self.place(0))

    def place(self, place: int) -> torch.device:
        """Where the near (0) or far (1) shard is."""
        return placing.place(self.device, place)


@dataclass(frozen=True)
class Passed:
    """What a process knows after the last pass.

    Attributes:
        seconds: Of all passes together.
        gradient: Of this shard's weights, added up over the passes, on the CPU.
    """

    seconds: float
    gradient: Tensor


def near(line: Timed, task: Task) -> Passed:
    """Own the first shard: begin every pass and end it.

    Raises:
        mq.MembersTimeout, mq.RecvTimeout: The other process is not there.
    """
    shard, x = task.shard(0), task.inputs()
    line.queue.subscribe(TO_NEAR, device=_device(task, 0), timeout=line.timeout)
    line.queue.wait_for_subscribers(TO_FAR, 1, timeout=line.timeout)
    line.recv()  # the far shard is ready
    _near_pass(line, task, shard, x)  # not timed: memory is taken, kernels are chosen
    shard.zero_grad()
    line.reset()
    start = time.perf_counter()
    for _ in range(task.passes):
        _near_pass(line, task, shard, x)
    return _passed(start, shard)


def _near_pass(line: Timed, task: Task, shard: nn.Linear, x: Tensor) -> None:
    y = shard(x)
    _send(line, TO_FAR, task, y.detach())
    output = _take(line, task, 0).requires_grad_()
    output.sum().backward()  # type: ignore[no-untyped-call]
    assert output.grad is not None
    _send(line, TO_FAR, task, output.grad)
    y.backward(_take(line, task, 0))


def far(line: Timed, task: Task) -> Passed:
    """Own the second shard: answer every pass.

    Raises:
        mq.MembersTimeout, mq.RecvTimeout: The other process is not there.
    """
    shard = task.shard(1)
    line.queue.subscribe(TO_FAR, device=_device(task, 1), timeout=line.timeout)
    line.queue.wait_for_subscribers(TO_NEAR, 1, timeout=line.timeout)
    line.publish(TO_NEAR, torch.empty(0))
    _far_pass(line, task, shard)
    shard.zero_grad()
    line.reset()
    start = time.perf_counter()
    for _ in range(task.passes):
        _far_pass(line, task, shard)
    return _passed(start, shard)


def _far_pass(line: Timed, task: Task, shard: nn.Linear) -> None:
    y = _take(line, task, 1).requires_grad_()
    output = shard(y)
    _send(line, TO_NEAR, task, output.detach())
    output.backward(_take(line, task, 1))
    assert y.grad is not None
    _send(line, TO_NEAR, task, y.grad)


def _device(task: Task, place: int) -> str | None:
    """Where mq shall deliver tensors."""
    return str(task.place(place)) if task.direct else None


def _send(line: Timed, topic: str, task: Task, tensor: Tensor) -> None:
    line.publish(topic, tensor if task.direct else tensor.cpu())


def _take(line: Timed, task: Task, place: int) -> Tensor:
    return line.recv().tensor.to(task.place(place))


def _passed(start: float, shard: nn.Linear) -> Passed:
    assert shard.weight.grad is not None
    gradient = shard.weight.grad.cpu()  # waits for what a GPU has still to do
    return Passed(time.perf_counter() - start, gradient)


def alone(task: Task) -> tuple[Tensor, Tensor]:
    """Both gradients by one process, on the CPU."""
    shards = task.shard(0), task.shard(1)
    for _ in range(task.passes):
        shards[1](shards[0](task.inputs()).to(task.place(1))).sum().backward()
    found = [shard.weight.grad for shard in shards]
    assert found[0] is not None
    assert found[1] is not None
    return found[0].cpu(), found[1].cpu()
