"""The networks that estimate the value of each action."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Pictures(nn.Module):
    """Bytes to numbers from 0 to 1."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float() / 255.0


def make(shape: tuple[int, ...], actions: int, seed: int) -> nn.Sequential:
    """A network for observations of a shape, with weights by the seed alone.

    Args:
        shape: (n,) for numbers, (stack, height, width) for pictures.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if len(shape) == 1:
            return nn.Sequential(
                nn.Linear(shape[0], 128),
                nn.ReLU(),
                nn.Linear(128, 128),
                nn.ReLU(),
                nn.Linear(128, actions),
            )
        body = nn.Sequential(
            Pictures(),
            nn.Conv2d(shape[0], 16, 8, 4),
            nn.ReLU(),
            nn.Conv2d(16, 32, 4, 2),
            nn.ReLU(),
            nn.Flatten(),
        )
        features = body(torch.zeros(1, *shape)).shape[1]
        return body.extend(
            [nn.Linear(features, 256), nn.ReLU(), nn.Linear(256, actions)]
        )
