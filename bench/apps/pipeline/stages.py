"""ResNet-50 as a pipeline of two processes that talk by mq.

The first stage sends the activations of one micro-batch after the other; the second
computes the loss of each, goes back through its own layers, and returns the gradient.
Both add up the gradients of a batch before their optimisers step, so the result is that
of one process with the same micro-batches.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.apps import placing
from bench.apps.pipeline.resnet import Size, shards
from bench.apps.timing import Timed

ACTIVATIONS, GRADIENTS = "activations", "gradients"


@dataclass(frozen=True)
class Task:
    """What is trained, and on what.

    Attributes:
        image: Height and width in pixels.
        batch: Images per step of the optimiser.
        batches: Steps.
        split: Micro-batches per batch; each has the same number of images.
        seed: Of weights, images and labels.
        device: "cpu" or "cuda": both stages on one GPU, or each on one of two.
    """

    size: Size = field(default_factory=Size)
    image: int = 128
    batch: int = 64
    batches: int = 3
    split: int = 4
    seed: int = 0
    rate: float = 0.05
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.split < 1 or self.batch % self.split:
            raise ValueError(
                f"a batch of {self.batch} cannot be split into {self.split} equal parts"
            )

    def place(self, stage: int) -> torch.device:
        """Where a stage computes; one process does so where the first stage does."""
        return placing.place(self.device, stage)

    def delivered(self, stage: int) -> dict[str, Any]:
        """How a stage subscribes: for tensors that are where it computes."""
        if self.device == "cpu":
            return {"zero_copy": True}
        return {"device": str(self.place(stage))}

    def images(self, where: torch.device) -> list[tuple[Tensor, ...]]:
        """Random images: batches of micro-batches, each (n, 3, image, image)."""
        random = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, 3, self.image, self.image)
        batches = [torch.randn(shape, generator=random) for _ in range(self.batches)]
        return [batch.to(where).chunk(self.split) for batch in batches]

    def labels(self, where: torch.device) -> list[tuple[Tensor, ...]]:
        """A class per image, in the order of `images`."""
        random = torch.Generator().manual_seed(self.seed + 1)
        drawn = [
            torch.randint(self.size.classes, (self.batch,), generator=random)
            for _ in range(self.batches)
        ]
        return [batch.to(where).chunk(self.split) for batch in drawn]


@dataclass(frozen=True)
class Trained:
    """What a stage has to tell after the last batch.

    Attributes:
        losses: Mean over each batch; empty for the first stage.
        seconds: From the first batch to the end of the last step.
    """

    losses: list[float]
    seconds: float


def alone(task: Task) -> Trained:
    """The same training in this process, micro-batch by micro-batch."""
    here = task.place(0)
    model = nn.Sequential(*shards(task.size, task.seed)).to(here)
    optimizer = torch.optim.SGD(model.parameters(), task.rate)
    images, labels = task.images(here), task.labels(here)
    _warm_up(model, images[0][0])
    losses = []
    start = time.perf_counter()
    for inputs, targets in zip(images, labels, strict=True):
        loss = 0.0
        for x, target in zip(inputs, targets, strict=True):
            part = cross_entropy(model(x), target) / task.split
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
        _step(optimizer)
        losses.append(loss)
    return _trained(losses, start, here)


def first_stage(line: Timed, task: Task) -> Trained:
    """Send activations, take gradients.

    Raises:
        mq.MembersTimeout, mq.RecvTimeout: The other stage is not there.
    """
    here = task.place(0)
    model = shards(task.size, task.seed)[0].to(here)
    optimizer = torch.optim.SGD(model.parameters(), task.rate)
    images = task.images(here)
    line.queue.subscribe(GRADIENTS, timeout=line.timeout, **task.delivered(0))
    _warm_up(model, images[0][0])
    _meet(line, ACTIVATIONS)
    start = time.perf_counter()
    for inputs in images:
        outputs: deque[Tensor] = deque()
        for x in inputs:
            outputs.append(model(x))
            line.publish(ACTIVATIONS, outputs[-1].detach())
        while outputs:
            outputs.popleft().backward(line.recv().tensor)  # type: ignore[no-untyped-call]
        _step(optimizer)
    return _trained([], start, here)


def last_stage(line: Timed, task: Task) -> Trained:
    """Take activations, compute the loss, send gradients.

    Raises:
        mq.MembersTimeout, mq.RecvTimeout: The other stage is not there.
    """
    here = task.place(1)
    first, model = (part.to(here) for part in shards(task.size, task.seed))
    optimizer = torch.optim.SGD(model.parameters(), task.rate)
    labels = task.labels(here)
    line.queue.subscribe(ACTIVATIONS, timeout=line.timeout, **task.delivered(1))
    with torch.no_grad():
        sample = first(task.images(here)[0][0])
    _warm_up(model, sample)
    _meet(line, GRADIENTS)
    losses = []
    start = time.perf_counter()
    for targets in labels:
        loss = 0.0
        for target in targets:
            x = line.recv().tensor.requires_grad_()
            part = cross_entropy(model(x), target) / task.split
            part.backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            line.publish(GRADIENTS, x.grad)
            loss += float(part.detach())
        _step(optimizer)
        losses.append(loss)
    return _trained(losses, start, here)


def _meet(line: Timed, topic: str) -> None:
    """Begin together: each says that it is ready, on the topic that it publishes."""
    line.queue.wait_for_subscribers(topic, 1, timeout=line.timeout)
    line.publish(topic, torch.empty(0))
    line.recv()
    line.reset()


def _warm_up(model: nn.Module, x: Tensor) -> None:
    """The first pass is slower: kernels are chosen and memory is taken."""
    model(x).sum().backward()
    model.zero_grad()
    placing.wait(x.device)


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _trained(losses: list[float], start: float, here: torch.device) -> Trained:
    placing.wait(here)
    return Trained(losses, time.perf_counter() - start)
