"""ResNet-50 in two shards, as the published pipeline has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.apps.seeding import initialize

EXPANSION = 4
"""Channels that leave a block, by those inside of it."""


@dataclass(frozen=True)
class Size:
    """What kind of ResNet.

    Attributes:
        blocks: How many in each of the four layers; (3, 4, 6, 3) is ResNet-50.
        width: Channels of the first layer's blocks; each further layer doubles them.
        classes: How many the last layer tells apart.
    """

    blocks: tuple[int, int, int, int] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000


class Bottleneck(nn.Module):
    """Three convolutions, the middle one narrow, beside a shortcut.

    Args:
        incoming: Channels of its input.
        width: Channels inside; `EXPANSION` times as many leave.
        stride: By which height and width shrink.
    """

    def __init__(self, incoming: int, width: int, stride: int) -> None:
        super().__init__()
        outgoing = EXPANSION * width
        self.body = nn.Sequential(
            nn.Conv2d(incoming, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outgoing, 1, bias=False),
            nn.BatchNorm2d(outgoing),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or incoming != outgoing:
            self.shortcut = nn.Sequential(
                nn.Conv2d(incoming, outgoing, 1, stride, bias=False),
                nn.BatchNorm2d(outgoing),
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.body(x) + self.shortcut(x))


def shards(size: Size, seed: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Both halves of the network, with weights that depend on the seed alone.

    The first has the stem and layers 1 and 2, the second layers 3 and 4 and the
    classifier: about 45 and 55 per cent of the multiplications.
    """
    width = size.width
    stem = [
        nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    layers = _layers(size)
    outgoing = 8 * width * EXPANSION
    head = [
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(outgoing, size.classes),
    ]
    first = nn.Sequential(*stem, *layers[:2])
    last = nn.Sequential(*layers[2:], *head)
    initialize(nn.Sequential(first, last), seed)
    return first, last


def _layers(size: Size) -> Sequence[nn.Sequential]:
    found, incoming = [], size.width
    for place, count in enumerate(size.blocks):
        width = size.width << place
        layer = nn.Sequential()
        for block in range(count):
            stride = 2 if place and not block else 1
            layer.append(Bottleneck(incoming, width, stride))
            incoming = EXPANSION * width
        found.append(layer)
    return found
