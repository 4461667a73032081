"""What `mq bench apps` asks of an application."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from bench.rows import Cell, Result
from bench.tables import Text

ALONE = "alone"
"""In place of a backend: the same work in one process."""


@dataclass(frozen=True)
class AppCell(Cell):
    """One run of an application over one backend.

    Attributes:
        task: What it shall do: the application's own options.
    """

    task: Any = None


Cells: TypeAlias = Callable[[argparse.Namespace, Sequence[str]], list[AppCell]]


@dataclass(frozen=True)
class App:
    """An application that can be measured.

    Attributes:
        summary: One line for `--help`.
        body: What each process does, as ``module:function`` of a `Peer`.
        size: How many processes a cell has.
        add_arguments: Adds the application's own options to a parser.
        cells: What is run for these options and backends, in order.
        tables: The results as text, the published figures beside them.
        finish: Called with the output's folder and the results; the pictures written.
        placed: A cell that leaves its files in a folder.
    """

    name: str
    summary: str
    body: str
    size: Callable[[AppCell], int]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    cells: Cells
    tables: Callable[[Sequence[Result]], list[Text]]
    finish: Callable[[Path, Sequence[Result]], list[Path]] = lambda *_: []
    placed: Callable[[AppCell, Path], AppCell] = lambda cell, _: cell


def count(text: str) -> int:
    """A number from 1 on, for argparse."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def counts(text: str) -> list[int]:
    """Numbers such as 1,2,4, for argparse."""
    return [count(one.strip()) for one in text.split(",")]
