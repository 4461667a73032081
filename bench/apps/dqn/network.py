"""The networks that estimate the value of each action."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.apps.seeding import initialize


class Pictures(nn.Module):
    """Bytes to numbers from 0 to 1."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float() / 255.0


def make(shape: tuple[int, ...], actions: int, seed: int) -> nn.Sequential:
    """A network for observations of a shape, with weights by the seed alone.

    Args:
        shape: (n,) for numbers, (stack, height, width) for pictures.
    """
    if len(shape) == 1:
        model = nn.Sequential(
            nn.Linear(shape[0], 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, actions),
        )
    else:
        model = nn.Sequential(
            Pictures(),
            nn.Conv2d(shape[0], 16, 8, 4),
            nn.ReLU(),
            nn.Conv2d(16, 32, 4, 2),
            nn.ReLU(),
            nn.Flatten(),
        )
        features = model(torch.zeros(1, *shape)).shape[1]
        model.extend([nn.Linear(features, 256), nn.ReLU(), nn.Linear(256, actions)])
    initialize(model, seed)
    return model
