"""The same two shards on bare torch.distributed.rpc with distributed autograd."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.autograd
import torch.distributed.rpc
from torch import Tensor, nn

from bench.apps.shards.model import Passed, Task

NEAR, FAR = "near", "far"
rpc: Any = torch.distributed.rpc  # most of it has no types
autograd: Any = torch.distributed.autograd


class Far(nn.Module):
    """The second shard, where the near process calls it."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.shard = task.shard(1)

    def forward(self, y: Tensor) -> Tensor:
        output: Tensor = self.shard(y.to(self.task.place(1)))
        return output if self.task.direct else output.cpu()


@contextmanager
def member(task: Task, rank: int, directory: str, timeout: float) -> Iterator[None]:
    """Join the other process, and leave together with it.

    Args:
        directory: Where both meet; empty before.
        timeout: Seconds that joining and each call may take.
    """
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{directory}/rpc", rpc_timeout=timeout
    )
    if task.direct and task.device == "cuda":
        peer = {task.place(rank): task.place(1 - rank)}
        options.set_device_map(FAR if rank == 0 else NEAR, peer)
    with warnings.catch_warnings():
        # torch's own: "You are using a Backend ... as a ProcessGroup".
        warnings.simplefilter("ignore")
        rpc.init_rpc(
            (NEAR, FAR)[rank], rank=rank, world_size=2, rpc_backend_options=options
        )
    yield
    rpc.shutdown()


def near(task: Task) -> Passed:
    """Begin every pass and end it, within `member`."""
    shard, x = task.shard(0), task.inputs()
    remote = rpc.remote(FAR, Far, args=(task,))
    _one_pass(task, shard, x, remote)
    total = torch.zeros_like(shard.weight)
    start = time.perf_counter()
    for _ in range(task.passes):
        total += _one_pass(task, shard, x, remote)
    gradient = total.cpu()
    return Passed(time.perf_counter() - start, gradient)


def _one_pass(task: Task, shard: nn.Linear, x: Tensor, remote: Any) -> Tensor:
    """One forward and backward pass; the gradient of this shard's weights."""
    with autograd.context() as context:
        y = shard(x)
        output = remote.rpc_sync().forward(y if task.direct else y.cpu())
        loss = output.to(task.place(0)).sum()
        autograd.backward(context, [loss])
        gradient: Tensor = autograd.get_gradients(context)[shard.weight]
    return gradient
