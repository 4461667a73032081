"""Options of how it is learnt, for the bench and for `train`."""

from __future__ import annotations

import argparse
from typing import Any

from bench.apps.app import Arguments, count
from bench.apps.dqn.task import Task


def add_variants(parser: Arguments) -> None:
    """Options that are attributes of `Task`."""
    parser.add_argument("--collectors", type=count, default=Task.collectors)
    parser.add_argument("--prioritized", action="store_true")
    parser.add_argument(
        "--n-step",
        type=count,
        default=Task.n_step,
        help="rewards before the network's estimate (default: %(default)s)",
    )
    parser.add_argument(
        "--in-step",
        action="store_true",
        help="learner and collectors take turns: the result depends on the seed alone",
    )


def variants(options: argparse.Namespace) -> dict[str, Any]:
    """What `add_variants` was given."""
    names = ("collectors", "prioritized", "n_step", "in_step")
    return {name: getattr(options, name) for name in names}
