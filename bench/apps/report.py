"""The tables of the applications, the published figures beside them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bench.apps import app
from bench.apps.app import ALONE, App, Column
from bench.rows import Result
from bench.summary import Row, gather
from bench.tables import Text

METHOD = (
    "Every row of an application is a run in fresh processes, one for each member; the "
    "members of `inproc` are threads of one process. Each member computes with one "
    "thread. Figures are medians over the rounds.",
    "What is timed begins when all members are ready. The share of the transport is "
    "what a member spends in `publish`, and in waiting for a message for which "
    "`publish` was called already.",
)

_PUBLISHED = Path(__file__).with_name("published_apps.csv")


class Published(NamedTuple):
    """A published time of an application."""

    workload: str
    system: str
    parameter: str
    seconds: float


def published(workload: str) -> list[Published]:
    """The published times of one workload."""
    lines = _PUBLISHED.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    found = [
        Published(r["workload"], r["system"], r["parameter"], float(r["seconds"]))
        for r in rows
    ]
    return [row for row in found if row.workload == workload]


def conditions() -> list[str]:
    """What the published times hold for."""
    lines = _PUBLISHED.read_text(encoding="utf-8").splitlines()
    return [line.lstrip("# ") for line in lines if line.startswith("#")]


def percent(share: float | None) -> str:
    """A share of 1, in per cent."""
    return "-" if share is None else f"{share * 100:.1f} %"


def problems(rows: Sequence[Row]) -> list[str]:
    """Why rows have no value; backends with the same reason in one line."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.problem:
            found.setdefault((row.workload, row.problem), []).append(row.transport)
    return [
        f"{', '.join(backends)} {workload}: {problem}"
        for (workload, problem), backends in found.items()
    ]


class Source(NamedTuple):
    """The results of one file.

    Attributes:
        folder: Where the file is, and what the applications left beside it.
    """

    folder: Path
    results: list[Result]


class Taken(NamedTuple):
    """A result among those of several files.

    Attributes:
        result: Its round is one that no other file has for the same cell.
        folder: Where its file is.
        number: Its round in that file.
    """

    result: Result
    folder: Path
    number: int


def joined(sources: Sequence[Source]) -> list[Taken]:
    """The results of all files; what several have measured counts as further rounds.

    What could not be run for one file and was run for another is not missing.
    """
    found: list[Taken] = []
    for folder, results in sources:
        measured = {_cell(one.result) for one in found if one.result.status == "ok"}
        again = any(_cell(row) in measured for row in results)
        first = 1 + max(one.result.round for one in found) if again else 0
        found += [
            Taken(replace(row, round=first + row.round), folder, row.round)
            for row in results
        ]
    run = {_cell(one.result)[:2] for one in found if one.result.status == "ok"}
    return [
        one
        for one in found
        if one.result.status != "skipped" or _cell(one.result)[:2] not in run
    ]


def _cell(row: Result) -> tuple[str, str, int]:
    return row.workload, row.transport, row.round


def texts(results: Sequence[Result]) -> list[Text]:
    """The table of all applications, and then those of each."""
    rows = gather(results)
    found: list[Text] = []
    columns: list[Column] = []
    for name in app.NAMES:
        own = [row for row in rows if app.name_of(row.workload) == name]
        if own:
            known: App = app.load(name)
            found += known.tables(own)
            columns += known.columns(own)
    backends = dict.fromkeys(row.transport for row in rows if row.values)
    return [_overview(columns, list(backends)), *found] if columns else found


def _overview(columns: Sequence[Column], backends: Sequence[str]) -> Text:
    """One line per backend, and below one per system with published figures."""
    lines = [
        [name, *(column.ours.get(name, "-") for column in columns)]
        for name in sorted(backends, key=_beside)
        if any(name in column.ours for column in columns)
    ]
    systems = dict.fromkeys(name for column in columns for name in column.published)
    lines += [
        [f"published: {name}", *(column.published.get(name, "-") for column in columns)]
        for name in systems
    ]
    note = (
        "Every application in one line per backend. Published figures were measured "
        "on other hardware, in part with other tasks: see below."
    )
    head = ["backend", *(column.head for column in columns)]
    return Text("Applications", note, head, lines, [])


def _beside(name: str) -> int:
    """Ours first, then what they are compared with."""
    return 2 if name == ALONE else int(name.startswith("raw:"))
