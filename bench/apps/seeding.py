"""Weights by a seed, whatever other threads draw at the same time."""

from __future__ import annotations

import math

import torch
from torch import nn


def initialize(model: nn.Module, seed: int) -> None:
    """Draw the weights and biases of all linear and convolutional layers anew.

    As torch does it, but from a generator of our own: torch's is one for all threads
    of a process, and on `inproc` every member is a thread.
    """
    random = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if not isinstance(layer, nn.Conv2d | nn.Linear):
            continue
        bound = 1 / math.sqrt(layer.weight[0].numel())
        nn.init.uniform_(layer.weight, -bound, bound, generator=random)
        if layer.bias is not None:
            nn.init.uniform_(layer.bias, -bound, bound, generator=random)
