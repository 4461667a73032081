"""What `mq bench apps` asks of an application."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from bench.rows import Cell, Result
from bench.summary import Row
from bench.tables import Text

_WORKLOADS = {
    "pipeline": r"pipeline num_split=\d+",
    "shards": r"shards (cpu|staged|direct)",
    "dqn": r"dqn \S+ seed=\d+",
}
NAMES = tuple(_WORKLOADS)
QUICK = "--quick"
"""The option for small tasks."""

ALONE = "alone"
"""In place of a backend: the same work in one process."""


@dataclass(frozen=True)
class AppCell(Cell):
    """One run of an application over one backend.

    Attributes:
        task: What it shall do: the application's own options.
    """

    preload = ("bench.apps.preload",)
    task: Any = None


class Column(NamedTuple):
    """A figure of an application, in the table of all of them.

    Attributes:
        ours: By backend.
        published: By system.
    """

    head: str
    ours: Mapping[str, str]
    published: Mapping[str, str] = {}


Arguments: TypeAlias = argparse.ArgumentParser | argparse._ArgumentGroup
"""What options are added to."""

Cells: TypeAlias = Callable[[argparse.Namespace, Sequence[str]], list[AppCell]]


@dataclass(frozen=True)
class App:
    """An application that can be measured.

    Attributes:
        summary: One line for `--help`.
        body: What each process does, as ``module:function`` of a `Peer`.
        size: How many processes a cell has.
        add_arguments: Adds the application's own options.
        cells: What is run for these options and backends, in order.
        tables: The rows as text, the published figures beside them.
        columns: What of them is shown beside other applications.
        placed: A cell that leaves its files in a folder.
        needless: Why a cell need not be run after these results; empty if it must.
        choices: Of its own options those that choose among cells; the others change
            what a cell does.
    """

    name: str
    summary: str
    body: str
    size: Callable[[AppCell], int]
    add_arguments: Callable[[Arguments], None]
    cells: Cells
    tables: Callable[[Sequence[Row]], list[Text]]
    columns: Callable[[Sequence[Row]], list[Column]]
    placed: Callable[[AppCell, Path], AppCell] = lambda cell, _: cell
    needless: Callable[[AppCell, Sequence[Result]], str] = lambda *_: ""
    choices: tuple[str, ...] = ()


def load(name: str) -> App:
    """An application of `NAMES`; imports torch."""
    app: App = importlib.import_module(f"bench.apps.{name}.cells").APP
    return app


def name_of(workload: str) -> str | None:
    """The application that a row's workload is of, or None."""
    for name, pattern in _WORKLOADS.items():
        if re.fullmatch(pattern, workload):
            return name
    return None


def count(text: str) -> int:
    """A number from 1 on, for argparse."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def words(text: str) -> list[str]:
    """Names such as A,B, each once, for argparse."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",")))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} names nothing between two commas")
    return found


def numbers(text: str) -> list[int]:
    """Different numbers such as 0,1,2, for argparse."""
    found = [int(w) if w.strip().isdecimal() else None for w in text.split(",")]
    known = [number for number in found if number is not None]
    if len({*known}) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of different numbers")
    return known


def counts(text: str) -> list[int]:
    """Different numbers from 1 on such as 1,2,4, for argparse."""
    return [count(str(number)) for number in numbers(text)]
