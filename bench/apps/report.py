"""The tables of the applications, the published figures beside them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import tables
from bench.apps.app import App
from bench.rows import Result
from bench.summary import Row

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
    """Why rows have no value."""
    return [
        f"{row.transport} {row.workload}: {row.problem}" for row in rows if row.problem
    ]


def texts(found: Sequence[tuple[App, Sequence[Result]]]) -> list[tables.Text]:
    """The tables of all applications."""
    return [text for app, results in found for text in app.tables(results)]


def terminal(found: Sequence[tuple[App, Sequence[Result]]]) -> str:
    """The tables, aligned."""
    parts = []
    for text in texts(found):
        parts.append(f"\n{text.title}  ({text.note})")
        parts += tables.aligned(text.head, text.lines) if text.lines else []
        parts += [f"  ! {problem}" for problem in text.problems]
    return "\n".join(parts)


def write(
    found: Sequence[tuple[App, Sequence[Result]]],
    facts: Mapping[str, str],
    output: Path,
) -> list[Path]:
    """Write report.md, and what the applications add to it; the paths."""
    written = [path for app, results in found for path in app.finish(output, results)]
    parts = ["# Applications over every backend", "", f"`{facts['command']}`", ""]
    parts += tables.markdown(["", ""], [[key, text] for key, text in facts.items()])
    for text in texts(found):
        parts += ["", f"## {text.title}", "", text.note, ""]
        parts += tables.markdown(text.head, text.lines) if text.lines else []
        parts += ["", *(f"- {problem}" for problem in text.problems)]
    parts += ["", *(f"![{path.stem}]({path.name})" for path in written)]
    parts += ["", "## Conditions of the published figures", "", *conditions()]
    target = output / "report.md"
    target.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    return [*written, target]
